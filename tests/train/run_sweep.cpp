// run_sweep: everything that a run writes, with every system call failing or being the last one.
//
//   run_sweep [--points N] [--thin K] [--ranks N] [--json]
//
// A tiny run is made again and again, each time with one of its calls on the run's folder struck: refused
// with ENOSPC, EIO or EDQUOT, or the process killed before, after or amid it. Then the same command is run
// again, without faults. It must end with the bits of a run that nothing befell, or refuse with a sentence
// that names a file, and end so once that file is moved away. A struck run that says it is done must have
// these bits itself. Run by tools/crash_sweep --all.
//
// With ranks one of them is struck, in turn; whoever is left must end by itself within the time that a rank
// is waited for, and all of them run again.
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <halfstep/checkpoint.h>
#include <halfstep/error.h>
#include <halfstep/ranks.h>
#include <halfstep/trainer.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/shim.h"
#include "support/scratch.h"

namespace halfstep::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;
using shim::Fault;

class Silent : public RunWatcher {
 public:
  explicit Silent(int64_t stop_after) : stop_after_(stop_after) {}
  void begin(const RunPlan&) override {}
  void step(const StepRecord& record) override { stop = stop || record.step == stop_after_; }
  void evaluation(const EvaluationRecord&) override {}
  void sample(const SampleRecord&) override {}
  void note(int64_t, std::string_view) override {}
  void end(const RunEnd&) override {}
  std::atomic<bool> stop = false;

 private:
  int64_t stop_after_;
};

struct Scenario {
  std::string name;
  std::vector<std::string> set;
  /// Above 0: the run is stopped after so many steps first, and it is the process that goes on which is
  /// struck.
  int64_t stopped_after = 0;
};

std::vector<Scenario> scenarios(int ranks) {
  if (ranks > 1)
    return {{"on ranks, evaluated",
             {"train.evaluate_every=2", "train.evaluate_batches=1", "data.validation_fraction=0.2"}},
            {"states in parts, resumed", {"run.shard=states", "precision.compute=bf16"}, 3},
            {"weights in parts, all kept", {"run.shard=weights", "checkpoint.keep_last=0"}},
            {"gradients in parts, one kept", {"run.shard=gradients", "checkpoint.keep_last=1"}}};
  return {
      {"fp32", {}},
      {"bf16 with event files", {"precision.compute=bf16", "log.tensorboard=true"}},
      {"fp16, evaluated, best kept",
       {"precision.compute=fp16", "train.evaluate_every=2", "train.evaluate_batches=1",
        "data.validation_fraction=0.2", "checkpoint.keep_best=true"}},
      {"resumed", {"train.sample_every=4", "train.sample_tokens=3"}, 4},
      {"resumed in bf16 with event files", {"precision.compute=bf16", "log.tensorboard=true"}, 3},
      {"a checkpoint a step, one kept", {"checkpoint.every=1", "checkpoint.keep_last=1"}},
      {"accumulated, all kept", {"train.accumulation=2", "checkpoint.keep_last=0", "checkpoint.every=2"}}};
}

// A rank that is left over ends within a second of the loss of another; this is for one that does not.
constexpr int kRankTimeoutSeconds = 10;

ResolvedConfig config_of(const Scenario& scenario, const fs::path& corpus, int ranks) {
  std::vector<std::string> all = {"model.kind=gpt2",
                                  "model.layers=1",
                                  "model.width=8",
                                  "model.heads=1",
                                  "model.dropout=0.1",
                                  "data.train=" + corpus.string(),
                                  detail::concat("data.batch_size=", ranks),
                                  "data.sequence_length=8",
                                  "train.steps=6",
                                  detail::concat("run.rank_timeout_seconds=", kRankTimeoutSeconds),
                                  "train.threads=1",
                                  "train.watchdog_minutes=0",
                                  "checkpoint.every=2",
                                  "checkpoint.keep_last=2"};
  all.insert(all.end(), scenario.set.begin(), scenario.set.end());
  return resolve_config({.set = all});
}

struct Outcome {
  bool killed = false, done = false;
  std::string error{};
};

/// Where ranks meet, held by a process of its own: a thread of it here would hold locks while this one forks.
class MeetingProcess {
 public:
  MeetingProcess() {
    int port[2], losses[2];
    if (::pipe2(port, O_CLOEXEC) != 0 || ::pipe2(losses, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(losses[1]);
      MeetingPlace place;
      const uint16_t number = place.port();
      (void)!::write(port[1], &number, sizeof number);
      for (int rank = 0; ::read(losses[0], &rank, sizeof rank) == sizeof rank;)
        place.announce_lost(rank, "ended");
      ::_exit(0);
    }
    ::close(losses[0]);
    losses_ = losses[1];
    if (::read(port[0], &port_, sizeof port_) != sizeof port_) throw std::runtime_error("no meeting place");
    ::close(port[0]);
    ::close(port[1]);
  }
  ~MeetingProcess() {
    ::close(losses_);
    ::waitpid(pid_, nullptr, 0);
  }
  MeetingProcess(const MeetingProcess&) = delete;
  MeetingProcess& operator=(const MeetingProcess&) = delete;

  uint16_t port() const { return port_; }
  void announce_lost(int rank) const { (void)!::write(losses_, &rank, sizeof rank); }

 private:
  pid_t pid_ = -1;
  int losses_ = -1;
  uint16_t port_ = 0;
};

/// A process that trains, and what it tells.
struct Child {
  pid_t pid = -1;
  int answer = -1;
};

/// Of several ranks, those that meet at `meeting`.
Child begin_child(const ResolvedConfig& config, const fs::path& run, const shim::Plan& plan,
                  int64_t stop_after, bool tells_calls, int rank, int ranks, const MeetingProcess* meeting) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    std::string answer;
    if (plan.fault != Fault::None || tells_calls) shim::begin(plan);
    try {
      TrainerOptions options;
      if (meeting != nullptr) {
        const std::pair<const char*, std::string> variables[] = {
            {"RANK", std::to_string(rank)},
            {"WORLD_SIZE", std::to_string(ranks)},
            {"MASTER_ADDR", "127.0.0.1"},
            {"MASTER_PORT", std::to_string(meeting->port())},
            {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
        for (const auto& [name, value] : variables) ::setenv(name, value.c_str(), 1);
        options.ranks = std::make_shared<Ranks>(
            Ranks::from_environment({.timeout = std::chrono::seconds(kRankTimeoutSeconds)}));
      }
      Silent watcher(stop_after);
      Trainer trainer(config, run, options);
      const RunEnd end = trainer.run(watcher, watcher.stop);
      answer = end.outcome == RunOutcome::Done ? "D" : "I";
    } catch (const std::exception& error) {
      answer = std::string("E") + error.what();
    }
    const std::vector<shim::Call> made = shim::end();
    for (const shim::Call call : made)
      answer += tells_calls ? std::to_string(static_cast<int>(call)) + " " : "";
    (void)!::write(ends[1], answer.data(), answer.size());
    ::_exit(answer[0] == 'E' ? 1 : 0);
  }
  ::close(ends[1]);
  return {child, ends[0]};
}

Outcome outcome_of(const Child& child, int status, std::vector<shim::Call>* calls) {
  std::string answer;
  char bytes[4096];
  for (ssize_t got = 0; (got = ::read(child.answer, bytes, sizeof bytes)) > 0;)
    answer.append(bytes, static_cast<size_t>(got));
  ::close(child.answer);
  Outcome outcome{.killed = WIFSIGNALED(status)};
  if (outcome.killed && WTERMSIG(status) != SIGKILL)
    outcome.error = std::string("ended by ") + strsignal(WTERMSIG(status));
  if (answer.empty()) return outcome;
  outcome.done = answer[0] == 'D';
  if (answer[0] == 'E') outcome.error = answer.substr(1);
  if (calls != nullptr) {
    std::istringstream numbers(answer.substr(1));
    for (int call = 0; numbers >> call;) calls->push_back(static_cast<shim::Call>(call));
  }
  return outcome;
}

/// In processes of their own, rank `struck` under the plan. What one of several says of its own counts before
/// what the others say of it.
Outcome run_in_children(const ResolvedConfig& config, const fs::path& run, const shim::Plan& plan,
                        int64_t stop_after, int ranks, int struck = 0,
                        std::vector<shim::Call>* calls = nullptr) {
  std::optional<MeetingProcess> meeting;
  if (ranks > 1) meeting.emplace();
  std::map<pid_t, std::pair<int, Child>> running;
  for (int rank = 0; rank < ranks; ++rank) {
    const Child child =
        begin_child(config, run, rank == struck ? plan : shim::Plan{.folder = run}, stop_after,
                    calls != nullptr && rank == struck, rank, ranks, meeting ? &*meeting : nullptr);
    running[child.pid] = {rank, child};
  }
  std::vector<Outcome> outcomes(static_cast<std::size_t>(ranks));
  while (!running.empty()) {
    int status = 0;
    const auto ended = running.find(::waitpid(-1, &status, 0));
    if (ended == running.end()) continue;
    const auto [rank, child] = ended->second;
    running.erase(ended);
    outcomes[static_cast<std::size_t>(rank)] = outcome_of(child, status, rank == struck ? calls : nullptr);
    if (meeting && status != 0) meeting->announce_lost(rank);
  }
  Outcome all = outcomes[static_cast<std::size_t>(struck)];
  for (const Outcome& each : outcomes) {
    all.done = all.done && each.done;
    all.killed = all.killed || each.killed;
    if (all.error.empty() && !outcomes[static_cast<std::size_t>(struck)].killed) all.error = each.error;
  }
  return all;
}

/// What the run left: its last checkpoint, its model and its log, without times.
std::map<std::string, std::string> result_of(const fs::path& run) {
  std::map<std::string, std::string> result;
  const fs::path checkpoints = run / "checkpoints";
  const CheckpointSummary last = summarize_checkpoint(checkpoints, checkpoint_steps(checkpoints).back());
  result["step"] = std::to_string(last.step);
  if (last.ranks > 1) {
    const Checkpoint whole = load_checkpoint(checkpoints, last.step);
    for (const auto& [part, state] : whole.parts)
      for (const auto& [name, value] : state)
        if (const auto* tensor = std::get_if<at::Tensor>(&value))
          result[part + "/" + name] = std::to_string(std::hash<std::string_view>()(
              {static_cast<const char*>(tensor->contiguous().const_data_ptr()), tensor->nbytes()}));
  }
  for (const auto& part : last.parts) {
    for (const auto& tensor : part.tensors) result[part.name + "/" + tensor.name] = tensor.sha256;
    for (const auto& [key, value] : part.values) result[part.name + "/" + key] = value;
  }
  result["model"] = std::to_string(std::hash<std::string>()(read_text(run / "model/model.safetensors")));
  std::ifstream log(run / "log.jsonl");
  for (std::string line; std::getline(log, line);) {
    const auto record = nlohmann::json::parse(line);
    const std::string at = record["kind"].get<std::string>() + std::to_string(record["step"].get<int64_t>());
    if (record["kind"] == "step")
      result[at] += record["loss"].dump() + record["lr"].dump() + record["grad_norm"].dump();
    if (record["kind"] == "evaluation") result[at] += record["loss"].dump();
    if (record["kind"] == "sample") result[at] += record["text"].dump();
  }
  return result;
}

struct Sweep {
  int64_t points = 0, tolerated = 0, refused = 0;
  std::vector<std::string> faults;
  std::map<std::string, int> refusals;  ///< sentences, without what differs from point to point
};

class Sweeper {
 public:
  Sweeper(const Scenario& scenario, const fs::path& scratch, int ranks)
      : scenario_(scenario), scratch_(scratch), ranks_(ranks), calls_(static_cast<std::size_t>(ranks)) {
    std::string text;
    for (int line = 0; line < 60; ++line) text += "line " + std::to_string(line * line) + "\n";
    write_text(scratch / "corpus.txt", text);
    config_ = config_of(scenario, scratch / "corpus.txt", ranks);
    // Once in this process: what LibTorch makes at first use, the children find made.
    Silent watcher(-1);
    Trainer(config_, scratch / "first").run(watcher, watcher.stop);
    for (int rank = 0; rank < ranks; ++rank) {
      const fs::path run = prepared();
      run_in_children(config_, run, {.folder = run}, -1, ranks, rank,
                      &calls_[static_cast<std::size_t>(rank)]);
      expected_ = result_of(run);
    }
  }

  const std::vector<shim::Call>& calls_of(int rank) const { return calls_[static_cast<std::size_t>(rank)]; }

  void strike(int rank, size_t at, Fault fault, int code, const std::string& name, Sweep& sweep) {
    ++sweep.points;
    const std::string fault_text = fault_of(rank, at, fault, code, sweep);
    if (!fault_text.empty())
      sweep.faults.push_back(detail::concat(scenario_.name, ", rank ", rank, ", call ", at, " (",
                                            static_cast<int>(calls_of(rank)[at]), ") ", name, ": ",
                                            fault_text));
  }

 private:
  /// A run's folder, before the process that is struck.
  fs::path prepared() {
    const fs::path run = scratch_ / "run";
    fs::remove_all(run);
    if (scenario_.stopped_after > 0)
      run_in_children(config_, run, {.folder = run}, scenario_.stopped_after, ranks_);
    return run;
  }

  std::string differences(const fs::path& run) const {
    try {
      const auto found = result_of(run);
      for (const auto& [name, value] : expected_)
        if (!found.contains(name) || found.at(name) != value) return name + " differs";
      return found.size() == expected_.size() ? "" : "more than expected is there";
    } catch (const std::exception& error) {
      return error.what();
    }
  }

  std::string fault_of(int rank, size_t at, Fault fault, int code, Sweep& sweep) {
    const fs::path run = prepared();
    const Outcome struck = run_in_children(
        config_, run, {.folder = run, .fault = fault, .at = static_cast<int64_t>(at), .code = code}, -1,
        ranks_, rank);
    if (struck.killed && !struck.error.empty()) return struck.error;
    if (struck.done) {
      ++sweep.tolerated;
      if (const std::string difference = differences(run); !difference.empty())
        return "said to be done, but " + difference;
    }
    for (int attempt = 0;; ++attempt) {
      const Outcome again = run_in_children(config_, run, {.folder = run}, -1, ranks_);
      if (again.done) break;
      if (again.error.empty()) return "the next run neither ended nor said why";
      const size_t colon = again.error.find(": ");
      const fs::path named = again.error.substr(0, colon);
      if (attempt == 3 || colon == std::string::npos || !fs::exists(named) || named == run)
        return "the next run refuses: " + again.error;
      ++sweep.refused;
      ++sweep.refusals[again.error.substr(colon)];
      fs::rename(named, scratch_ / detail::concat("moved-", sweep.refused));
    }
    const std::string difference = differences(run);
    return difference.empty() ? "" : "after the next run " + difference;
  }

  Scenario scenario_;
  fs::path scratch_;
  int ranks_;
  ResolvedConfig config_;
  std::vector<std::vector<shim::Call>> calls_;  // by rank
  std::map<std::string, std::string> expected_;
};

int run(int argc, char** argv) {
  CLI::App program("Breaks a whole run off at every moment.", "run_sweep");
  int64_t points = 10000, thin = 1;
  int ranks = 1;
  bool json = false;
  program.add_option("--points", points, std::string("At least so many"))->capture_default_str();
  program.add_option("--thin", thin, std::string("Every so many of the calls only"))
      ->check(CLI::PositiveNumber);
  program.add_option("--ranks", ranks, std::string("Processes of each run"))->check(CLI::Range(1, 8));
  program.add_flag("--json", json, std::string("As JSON"));
  CLI11_PARSE(program, argc, argv);
  at::set_num_threads(1);  // a child of a process with more would wait for threads that it does not have

  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  Sweep sweep;
  for (const Scenario& scenario : scenarios(ranks)) {
    const ScratchFolder scratch;
    Sweeper sweeper(scenario, scratch.path(), ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      const std::vector<shim::Call>& calls = sweeper.calls_of(rank);
      std::cerr << "run_sweep: " << scenario.name << ", rank " << rank << ", " << calls.size() << " calls\n";
      for (size_t at = 0; at < calls.size(); at += static_cast<size_t>(thin)) {
        for (const auto& [code, name] : {std::pair{ENOSPC, "ENOSPC"}, {EIO, "EIO"}, {EDQUOT, "EDQUOT"}})
          sweeper.strike(rank, at, Fault::Fail, code, name, sweep);
        sweeper.strike(rank, at, Fault::KillBefore, 0, "killed before", sweep);
        sweeper.strike(rank, at, Fault::KillAfter, 0, "killed after", sweep);
        if (calls[at] == shim::Call::Write)
          sweeper.strike(rank, at, Fault::KillMidway, 0, "killed amid", sweep);
      }
    }
    std::cerr << "run_sweep: " << sweep.points << " points, " << sweep.faults.size() << " faults, "
              << static_cast<int>(seconds()) << " s\n";
  }
  const bool passed = sweep.faults.empty() && sweep.points >= points;
  ordered_json answer{{"points", sweep.points},
                      {"points_wanted", points},
                      {"faults", sweep.faults.size()},
                      {"tolerated", sweep.tolerated},
                      {"refused", sweep.refused},
                      {"refusals", sweep.refusals},
                      {"passed", passed},
                      {"seconds", seconds()}};
  answer["examples"] = ordered_json::array();
  for (size_t i = 0; i < std::min<size_t>(sweep.faults.size(), 20); ++i)
    answer["examples"].push_back(sweep.faults[i]);
  if (json) {
    std::cout << answer.dump(2) << "\n";
  } else {
    std::cout << (passed ? "ok      " : "FAILED  ") << "everything a run writes: " << sweep.points
              << " points, " << sweep.faults.size() << " faults; " << sweep.tolerated
              << " runs ended in spite of theirs, " << sweep.refused << " were refused by name first\n";
    for (const auto& [text, count] : sweep.refusals)
      std::cout << "  refused " << count << " times" << text << "\n";
    for (const auto& example : answer["examples"]) std::cout << "  " << example.get<std::string>() << "\n";
  }
  return passed ? 0 : 1;
}

}  // namespace
}  // namespace halfstep::testing

int main(int argc, char** argv) { return halfstep::testing::run(argc, argv); }
