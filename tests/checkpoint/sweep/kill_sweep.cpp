#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "checkpoint/sweep/sweep.h"

namespace halfstep::testing {
namespace {

namespace fs = std::filesystem;

/// One byte that outlives the child that writes it.
class SharedFlag {
 public:
  SharedFlag()
      : byte_(static_cast<volatile char*>(
            ::mmap(nullptr, 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~SharedFlag() { ::munmap(const_cast<char*>(byte_), 1); }
  SharedFlag(const SharedFlag&) = delete;
  SharedFlag& operator=(const SharedFlag&) = delete;
  void set() { *byte_ = 1; }
  bool get() const { return *byte_ != 0; }

 private:
  volatile char* byte_;
};

/// Saves step 3 in a process of its own, which the plan ends.
std::string fault_of_kill(const Scenario& scenario, shim::Plan plan) {
  const ScratchFolder scratch;
  const fs::path run = scratch.path() / "run";
  prepare(scenario, run);
  const Content content(scenario.shape, Scenario::kNew);
  plan.folder = run;
  SharedFlag saved;
  const pid_t child = ::fork();
  if (child == 0) {
    shim::begin(plan);
    try {
      files::CheckpointWriter writer(run, {.keep_last = Scenario::kKept});
      writer.save(content.checkpoint());
      saved.set();
    } catch (const std::exception&) {
      ::_exit(3);
    }
    ::_exit(0);
  }
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child) return "no child could be started";
  if (WIFEXITED(status) && WEXITSTATUS(status) != 0) return "the save failed instead of being killed";
  if (!WIFEXITED(status) && WTERMSIG(status) != SIGKILL) return "ended by another signal than SIGKILL";
  return fault_after(scenario, run, saved.get());
}

}  // namespace

SweepResult sweep_kills(const Scenario& scenario, const shim::Plan& sabotage) {
  SweepResult result;
  const std::vector<shim::Call> calls = calls_of_save(scenario);
  for (size_t at = 0; at < calls.size(); ++at) {
    for (const auto& [fault, name] :
         {std::pair{shim::Fault::KillBefore, "before"}, std::pair{shim::Fault::KillAfter, "after"},
          std::pair{shim::Fault::KillMidway, "amid"}}) {
      if (fault == shim::Fault::KillMidway && calls[at] != shim::Call::Write) continue;
      shim::Plan plan = sabotage;
      plan.fault = fault;
      plan.at = static_cast<int64_t>(at);
      result.add("killed " + std::string(name) + " call " + std::to_string(at),
                 fault_of_kill(scenario, plan));
    }
  }
  return result;
}

}  // namespace halfstep::testing
