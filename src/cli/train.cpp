// `halfstep train`: from a configuration to a trained model.
#include <halfstep/error.h>
#include <halfstep/printable.h>
#include <halfstep/ranks.h>
#include <halfstep/trainer.h>

#include <fcntl.h>
#include <link.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/stop_signals.h"
#include "cli/train_screen.h"
#include "words/numbers.h"

namespace halfstep::cli {
namespace {

using Path = std::filesystem::path;

struct TrainRequest {
  ConfigRequest config;
  std::string folder;
  bool print_config = false, dry_run = false, json = false;
  int64_t from_step = -1;  // the latest
};

// Its name is synced where it is new: CheckpointFolder does so for the run's own folder only. A failure to
// make it is reported by whoever makes a folder in it.
void make_parent(const Path& path) {
  if (::mkdir(path.c_str(), 0755) != 0) {
    const int code = errno;
    if (code == EEXIST) return;
    throw FileError(path.string() + ": cannot make the folder: " + std::strerror(code) +
                        ". Name another one with --folder.",
                    code);
  }
  const int around = ::open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (around < 0) return;
  ::fsync(around);
  ::close(around);
}

/// runs/<what>-<date>-<time>, made here: two runs that begin in the same second each have one of their own.
Path make_new_folder(const TrainRequest& request) {
  const std::string name = !request.config.preset.empty() ? request.config.preset
                           : !request.config.file.empty() ? Path(request.config.file).stem().string()
                                                          : "run";
  const std::time_t now = std::time(nullptr);
  std::ostringstream stamp;
  stamp << std::put_time(std::localtime(&now), "%Y%m%d-%H%M%S");
  const Path first = Path("runs") / (name + "-" + stamp.str());
  make_parent(first.parent_path());
  Path folder = first;
  for (int next = 2; ::mkdir(folder.c_str(), 0755) != 0; ++next) {
    const int code = errno;
    if (code != EEXIST)
      throw FileError(folder.string() + ": cannot make the folder: " + std::strerror(code) +
                          ". Name another one with --folder.",
                      code);
    folder = first;
    folder += "-" + std::to_string(next);
  }
  return folder;
}

/// A folder of its own that is gone at the end: a dry run leaves nothing behind.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::error_code missing;
    const std::filesystem::path temporary = std::filesystem::temp_directory_path(missing);
    if (missing)
      throw FileError("TMPDIR names no folder: " + missing.message() + ". Set it to one, or leave it out.",
                      missing.value());
    std::string name = (temporary / "halfstep-dry-run-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr)
      throw FileError("No folder can be made in " + temporary.string(), errno);
    path_ = name;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const Path& path() const { return path_; }

 private:
  Path path_;
};

/// Also when another rank is gone, which is no matter of files.
template <typename Function>
auto about_files_and_ranks(Function function) {
  return about_files([&] {
    try {
      return function();
    } catch (const RankError& error) {
      throw ExitWith(kRankLost, error.what());
    }
  });
}

Trainer open_trainer(const ResolvedConfig& resolved, const Path& folder, const TrainerOptions& options = {}) {
  return about_files_and_ranks([&] { return Trainer(resolved, folder, options); });
}

Trainer open_trainer_in_new_folder(const TrainRequest& request, const ResolvedConfig& resolved,
                                   const TrainerOptions& options) {
  const Ranks& ranks = *options.ranks;
  const Path made = ranks.rank() == 0 ? about_files([&] { return make_new_folder(request); }) : Path();
  const Path folder = ranks.told(made.string());
  try {
    return open_trainer(resolved, folder, options);
  } catch (...) {
    if (ranks.rank() == 0)
      ::rmdir(folder.c_str());  // only if it is empty: a run that wrote something keeps it
    throw;
  }
}

/// Of a rank whose screen nobody watches: what is worth a line.
class RankNotes final : public RunWatcher {
 public:
  explicit RankNotes(const Ranks& ranks) : begin_(detail::concat("rank ", ranks.rank(), ", ")) {}
  void begin(const RunPlan& plan) override { note(plan.steps_done, "training"); }
  void step(const StepRecord& record) override {
    if (record.skipped) note(record.step, record.why);
  }
  void evaluation(const EvaluationRecord&) override {}
  void sample(const SampleRecord&) override {}
  void note(int64_t step, std::string_view text) override {
    std::cerr << begin_ << "step " << step << ": " << printable(text, Unprintable::Escaped) << std::endl;
  }
  void end(const RunEnd& end) override { note(end.step, end.why); }
  void stuck(std::string_view doing, double seconds) override {
    std::cerr << begin_ << "no progress for " << static_cast<int64_t>(seconds) << " s: " << doing
              << std::endl;
  }

 private:
  std::string begin_;
};

/// Until it goes, signals that would end the program wait.
class HeldSignals {
 public:
  HeldSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~HeldSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;

 private:
  sigset_t before_{};
};

void print_estimate(const TrainRequest& request, const RunPlan& plan, const RunEstimate& estimate) {
  if (request.json) {
    print_answer({{"model", plan.model},
                  {"parameters", plan.parameters},
                  {"precision", plan.precision},
                  {"data", plan.data},
                  {"steps", plan.steps},
                  {"seconds_per_step", estimate.seconds_per_step},
                  {"evaluation_seconds", estimate.evaluation_seconds},
                  {"total_seconds", estimate.total_seconds},
                  {"peak_bytes", estimate.peak_bytes},
                  {"checkpoint_bytes", estimate.checkpoint_bytes}});
    return;
  }
  const auto megabytes = [](int64_t bytes) { return std::to_string(bytes / 1000000) + " MB"; };
  std::cout << "model       " << printable(plan.model, Unprintable::Replaced) << ", " << plan.parameters
            << " parameters\n"
            << "precision   " << plan.precision << "\n"
            << "data        " << printable(plan.data, Unprintable::Replaced) << "\n"
            << "memory      " << megabytes(estimate.peak_bytes) << " of tensors at the peak of a step\n"
            << "checkpoint  " << megabytes(estimate.checkpoint_bytes) << " each\n"
            << "time        " << fine_duration_text(estimate.seconds_per_step) << " a step, "
            << duration_text(estimate.total_seconds) << " for " << plan.steps << " steps on " << plan.threads
            << " threads\n"
            << "Nothing was written; the trial steps are discarded.\n";
}

void dry_run(const TrainRequest& request, const ResolvedConfig& resolved) {
  about_files([&] { check_paths(resolved); });
  Trainer trainer = open_for_trial(resolved);
  const RunEstimate estimate = trainer.estimate();
  print_estimate(request, trainer.plan(), estimate);
}

void train(const TrainRequest& request, const ResolvedConfig& resolved) {
  const StopSignals signals;  // before the data is read: from here on Ctrl-C loses nothing
  if (request.from_step >= 0 && !resolved.config.run.folder)
    throw ExitWith(kUsage, "--from-step resumes a run, and no --folder says which.");
  about_files([&] { check_paths(resolved); });
  TrainerOptions options;
  if (request.from_step >= 0) options.from_step = request.from_step;
  const auto timeout = std::chrono::duration<double>(resolved.config.run.rank_timeout_seconds);
  const Ranks ranks = about_files_and_ranks([&] {
    return Ranks::from_environment(
        {.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(timeout)});
  });
  options.ranks = std::make_shared<const Ranks>(ranks);
  Trainer trainer = resolved.config.run.folder ? open_trainer(resolved, *resolved.config.run.folder, options)
                                               : open_trainer_in_new_folder(request, resolved, options);
  std::ostream& out = request.json ? std::cout : std::cerr;
  TrainScreen screen(out, screen_options(request.json ? STDOUT_FILENO : STDERR_FILENO, request.json));
  RankNotes notes(ranks);
  RunWatcher& watcher = ranks.rank() == 0 ? static_cast<RunWatcher&>(screen) : notes;
  const RunEnd end = about_files_and_ranks([&] { return trainer.run(watcher, signals.requested()); });
  if (end.outcome == RunOutcome::Diverged) throw ExitWith(kDiverged, end.why);
  if (end.outcome == RunOutcome::OutOfTime) throw ExitWith(kOutOfTime, "");
  // The signal may have come to another rank.
  if (end.outcome == RunOutcome::Interrupted)
    throw ExitWith(kSignalled + (signals.signal() != 0 ? signals.signal() : SIGTERM), "");
}

void run_train(TrainRequest request) {
  if (!request.print_config) spin_briefly();
  // A run may have been moved since its configuration was written. First, so that what is given counts.
  if (std::error_code unknown; std::filesystem::is_directory(request.config.file, unknown))
    request.config.set.insert(request.config.set.begin(), "run.folder=" + request.config.file);
  const ResolvedConfig resolved = configuration(
      request.config, request.folder.empty() ? std::vector<std::string>{}
                                             : std::vector<std::string>{"run.folder=" + request.folder});
  if (request.print_config) {
    std::cout << to_toml(resolved, /*with_origins=*/true);
    return;
  }
  request.dry_run ? dry_run(request, resolved) : train(request, resolved);
}

}  // namespace

namespace {

/// LibTorch's headers: text that is there wherever we are. The library's own path leads to them.
std::optional<std::string> headers_of_torch() {
  std::string library;
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void* found) {
        if (!std::string_view(object->dlpi_name).ends_with("/libtorch_cpu.so")) return 0;
        *static_cast<std::string*>(found) = object->dlpi_name;
        return 1;
      },
      &library);
  std::error_code missing;
  const Path folder =
      std::filesystem::weakly_canonical(Path(library).parent_path() / "../include/torch", missing);
  return std::filesystem::is_directory(folder, missing) ? std::optional(folder.string()) : std::nullopt;
}

/// What a run that is in the folder already trains on: it goes on with that, whatever is installed by now.
std::vector<std::string> text_of_run(const std::optional<std::string>& folder) {
  if (!folder) return {};
  const Path written = Path(*folder) / "config.toml";
  std::error_code missing;
  if (!std::filesystem::exists(written, missing)) return {};
  return resolve_config({.file = read_config_file(written)}).config.data.train;
}

/// Where the preset's own text, which a Debian package brings, is not there.
std::optional<std::string> text_instead_of_presets(const ResolvedConfig& resolved) {
  if (!resolved.origin("data.train").starts_with("preset ")) return std::nullopt;
  const std::vector<std::string>& named = resolved.config.data.train;
  const auto headers = headers_of_torch();
  if (const auto of_run = text_of_run(resolved.config.run.folder); !of_run.empty())
    return headers && of_run == std::vector{*headers} ? headers : std::nullopt;
  const auto is_there = [](const std::string& path) {
    std::error_code unknown;
    return std::filesystem::exists(path, unknown);
  };
  return std::ranges::none_of(named, is_there) ? headers : std::nullopt;
}

/// A run's folder stands for the configuration in it.
Path config_file(const std::string& given) {
  std::error_code unknown;
  if (!std::filesystem::is_directory(given, unknown)) return given;
  Path inside = Path(given) / "config.toml";
  HALFSTEP_CHECK(std::filesystem::exists(inside, unknown), given,
                 " is a folder without a config.toml. Name a TOML file, or the folder of a run.");
  return inside;
}

}  // namespace

ResolvedConfig configuration(const ConfigRequest& request, const std::vector<std::string>& more) {
  try {
    ConfigSources sources;
    if (!request.preset.empty()) sources.preset = request.preset;
    if (!request.file.empty()) sources.file = read_config_file(config_file(request.file));
    sources.environment = config_environment();
    sources.unset = request.unset;
    sources.set = request.set;
    if (!request.precision.empty()) sources.set.push_back("precision.compute=" + request.precision);
    sources.set.insert(sources.set.end(), more.begin(), more.end());
    ResolvedConfig resolved = resolve_config(sources);
    if (const auto headers = text_instead_of_presets(resolved)) {
      sources.set.push_back("data.train=" + *headers);
      resolved = resolve_config(sources);
      resolved.notes.push_back("data.train of preset " + request.preset + " is left out: the run trains on " +
                               *headers);
    }
    for (const std::string& note : resolved.notes)
      std::cerr << "halfstep: " << printable(note, Unprintable::Escaped) << "\n";
    return resolved;
  } catch (const FileError&) {
    throw;
  } catch (const Error& error) {
    throw ExitWith(kUsage, error.what());
  }
}

void add_config_options(CLI::App& command, ConfigRequest& request) {
  command.add_option("--preset", request.preset, "Begin from a preset: see 'halfstep preset ls'")
      ->type_name("NAME");
  command.add_option("CONFIG", request.file, "A TOML file, or the folder of a run")->type_name("FILE");
  command.add_option("--set", request.set, "One key of the configuration: optimizer.lr=3e-4")
      ->type_name("KEY=VALUE")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command.add_option("--unset", request.unset, "Drop a key that the preset or file sets")
      ->type_name("KEY")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command.add_option("--precision", request.precision, "bf16, fp8-delayed, mxfp8, ...: precision.compute")
      ->type_name("NAME");
}

/// For three steps and an evaluation, without encoding a corpus. The files are mapped, so their names can go
/// at once: whatever ends the program later leaves nothing behind.
Trainer open_for_trial(const ResolvedConfig& resolved) {
  constexpr int64_t kTrialBytes = int64_t{4} << 20;
  const HeldSignals held;
  const ScratchFolder scratch;
  return open_trainer(resolved, scratch.path(), {.most_text_bytes = kTrialBytes});
}

void add_train(CLI::App& program) {
  CLI::App* const command = program.add_subcommand("train", "Train or fine-tune a model");
  auto request = std::make_shared<TrainRequest>();
  add_config_options(*command, request->config);
  command->add_option("--folder", request->folder, "Where logs and checkpoints go: run.folder")
      ->type_name("DIR");
  command->add_option("--from-step", request->from_step, "Resume from this step; removes later ones")
      ->type_name("STEP")
      ->transform(decimal);
  command->add_flag("--print-config", request->print_config,
                    std::string("Show every value and where it came from, and stop"));
  command->add_flag("--dry-run", request->dry_run, std::string("Report memory and time; write nothing"));
  command->add_flag("--json", request->json, std::string("Progress as JSON, one object per line"));
  command->footer(
      "Keys are listed by 'halfstep train --preset tiny --print-config' and in\n"
      "docs/configuration.md. What the screen shows goes to standard error.\n"
      "Ctrl-C or SIGTERM finishes the step, saves and stops; the same command with\n"
      "the same --folder resumes. Exit codes: 0 done, 2 usage, 3 data or checkpoint,\n"
      "4 diverged, 5 out of memory, 6 ended at once by a second Ctrl-C, 7 out of time,\n"
      "130/143/138/129 stopped after saving.");
  command->callback([request] { run_train(*request); });
}

}  // namespace halfstep::cli
