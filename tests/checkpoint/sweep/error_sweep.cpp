#include <halfstep/error.h>

#include <cerrno>
#include <cstring>
#include <optional>

#include "checkpoint/sweep/sweep.h"
#include "checkpoint_format/step_folders.h"

namespace halfstep::testing {
namespace {

namespace fs = std::filesystem;
using shim::Call;
using shim::Fault;

/// Opens and saves under the plan, in this process. Then the fault is gone: the same writer, where it could
/// be opened, must save what it could not.
std::string fault_of_error(const Scenario& scenario, shim::Plan plan, bool must_succeed) {
  const ScratchFolder scratch;
  const fs::path run = scratch.path() / "run";
  prepare(scenario, run);
  const Content content(scenario.shape, Scenario::kNew);
  plan.folder = run;
  bool saved = false;
  {
    std::optional<files::CheckpointWriter> writer;
    std::string fault;
    shim::begin(plan);
    try {
      writer.emplace(run, files::Retention{.keep_last = Scenario::kKept});
      writer->save(content.checkpoint());
      saved = true;
    } catch (const FileError& error) {
      if (error.code() != plan.code) fault = std::string("another errno: ") + error.what();
      if (must_succeed) fault = std::string("not gone on after: ") + error.what();
    } catch (const std::exception& error) {
      fault = std::string("not a FileError: ") + error.what();
    }
    shim::end();
    if (!fault.empty()) return fault;
    // Before anything is tried again: a retry would hide what the failure did to the one before.
    fault = fault_of(run, scenario.shape, Scenario::kPrevious);
    if (!fault.empty()) return "the previous checkpoint is not whole after the failure: " + fault;
    try {
      const bool there = files::checkpoint_steps(run).back() == Scenario::kNew;
      if (writer && !there) writer->save(content.checkpoint());
      saved = saved || writer;
    } catch (const std::exception& error) {
      return std::string("the same writer cannot save once the fault is gone: ") + error.what();
    }
  }
  // Two are kept: the one before stands beside the new one.
  const std::string previous = fault_of(run, scenario.shape, Scenario::kPrevious);
  if (!previous.empty()) return "the previous checkpoint is not whole after the save: " + previous;
  return fault_after(scenario, run, saved);
}

}  // namespace

SweepResult sweep_errors(const Scenario& scenario) {
  SweepResult result;
  const std::vector<Call> calls = calls_of_save(scenario);
  for (size_t at = 0; at < calls.size(); ++at) {
    const auto attempt = [&](Fault fault, int code, bool must_succeed) {
      const std::string name = fault == Fault::ShortWrite ? "short write" : strerrorname_np(code);
      result.add(name + " at call " + std::to_string(at),
                 fault_of_error(scenario,
                                {.folder = "", .fault = fault, .at = static_cast<int64_t>(at), .code = code},
                                must_succeed));
    };
    for (const int code : {ENOSPC, EIO, EROFS, EMFILE, EACCES, EDQUOT}) attempt(Fault::Fail, code, false);
    const bool interruptible = calls[at] == Call::Open || calls[at] == Call::Write ||
                               calls[at] == Call::Fsync || calls[at] == Call::Close ||
                               calls[at] == Call::Flock;
    if (interruptible) attempt(Fault::Fail, EINTR, true);
    if (calls[at] != Call::Write) continue;
    attempt(Fault::ShortWrite, 0, true);
    attempt(Fault::FailMidway, ENOSPC, false);
  }
  return result;
}

}  // namespace halfstep::testing
