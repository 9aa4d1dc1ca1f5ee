#include "train/run_folder.h"

#include <halfstep/error.h>
#include <halfstep/ranks.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "checkpoint_format/step_folders.h"
#include "io/durable_file.h"
#include "words/numbers.h"

namespace halfstep::train {
namespace {

namespace fs = std::filesystem;

// Histograms where no evaluation says how often the run is looked at.
constexpr int64_t kHistogramSteps = 100;
constexpr double kStatusSeconds = 5;
// Prometheus reads the file some times a minute.
constexpr double kFiguresSeconds = 1;
// What `patiently` writes, as people read it.
constexpr const char *kLog = "the log", *kEvents = "the event file";
// After a save that failed: until the next attempt, twice as long each time.
constexpr double kFirstRetrySeconds = 5, kLongestRetrySeconds = 300;
// Of a disk that has not been seen to write yet: a slow one.
constexpr double kGuessedBytesPerSecond = 100e6;

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

template <typename Bytes>
std::string size_text(Bytes bytes) {
  return bytes_text(static_cast<double>(bytes));
}

RunHeader header_of(const ResolvedConfig& resolved, const std::string& unit, int64_t ranks) {
  RunHeader header{.configuration = to_toml(resolved, /*with_origins=*/false),
                   .machine = {},
                   .unit = unit,
                   .ranks = ranks};
  for (const auto& [name, value] : fingerprint()) header.machine.emplace_back(name, value);
  return header;
}

std::optional<Checkpoint> checkpoint_to_resume(const CheckpointFolder& checkpoints, const std::string& resume,
                                               const fs::path& folder, std::optional<int64_t> from_step,
                                               const std::map<std::string, StateDict>& live) {
  if (resume == "never") {
    HALFSTEP_CHECK(checkpoints.steps().empty() && !fs::exists(folder / "log.jsonl"), folder.string(),
                   ": already holds a run, and checkpoint.resume is never. Choose another folder, or let it "
                   "resume (checkpoint.resume=auto).");
    HALFSTEP_CHECK(!from_step, "--from-step ", from_step.value_or(0),
                   ", and checkpoint.resume is never. Leave one of them out.");
    return std::nullopt;
  }
  if (from_step) {
    const std::vector<int64_t> steps = checkpoints.steps();
    HALFSTEP_CHECK(std::binary_search(steps.begin(), steps.end(), *from_step), folder.string(),
                   ": has no checkpoint of step ", *from_step,
                   ". 'halfstep checkpoint ls' shows those that there are.");
    return checkpoints.load(*from_step, live);
  }
  auto latest = checkpoints.load_latest(live);
  HALFSTEP_CHECK(latest || resume != "must", folder.string(),
                 ": has no checkpoint, and checkpoint.resume is must. Check run.folder.");
  return latest;
}

/// Says which `halfstep launch` has started this process.
constexpr const char* kLaunchVariable = "HALFSTEP_LAUNCH";

/// Which attempt of that launcher this is.
int launch_attempt() {
  const char* const attempt = std::getenv("TORCHELASTIC_RESTART_COUNT");
  return attempt == nullptr ? 0 : std::atoi(attempt);
}

/// Whether the launcher that started this process has started the run in the folder in an earlier attempt:
/// the same command, for the second time. Within one attempt it is another command.
bool is_restart(const fs::path& folder) {
  const char* const launch = std::getenv(kLaunchVariable);
  if (launch == nullptr) return false;
  std::ifstream file(folder / "status.json");
  const auto status = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  return status.is_object() && status.value("launch", "") == launch &&
         status.value("attempt", 0) < launch_attempt();
}

/// Keys that are for the beginning of a run, and what they change in one that goes on.
constexpr std::array<std::pair<std::string_view, std::string_view>, 2> kAtTheStart = {
    {{"train.seed",
      "; weights, dropout and the optimizer continue as they were, samples and what a recipe draws "
      "(stochastic rounding, Hadamard signs) follow the new seed"},
     {"precision.loss_scale.initial",
      "; it is for the start of a run only, and changes nothing in a resumed one"}}};

/// What is asked for now and was not when the run's folder was written, each in a sentence.
std::vector<std::string> changes_since(RunConfig before, const RunConfig& now) {
  // Where it lies and whether it may go on: not what it is.
  before.run.folder = now.run.folder;
  before.checkpoint.resume = now.checkpoint.resume;
  std::vector<std::string> changes = config_changes(before, now);
  for (std::string& change : changes)
    for (const auto& [key, effect] : kAtTheStart)
      if (change.starts_with(std::string(key) + " ")) change += effect;
  return changes;
}

/// Before a list of tensors that do not fit, which names no key.
void check_same_shapes(const fs::path& folder, const RunConfig::Model& before, const RunConfig::Model& now) {
  const auto check = [&](const char* key, const auto& was, const auto& is) {
    HALFSTEP_CHECK(!was || !is || *was == *is, folder.string(), ": model.", key, " is ", *is,
                   ", and this run was started with ", *was,
                   ". Restore it to resume, or start another run in a new --folder.");
  };
  check("kind", before.kind, now.kind);
  check("layers", before.layers, now.layers);
  check("width", before.width, now.width);
  check("ffn_width", before.ffn_width, now.ffn_width);
}

/// Moves all that a run left but its tokens into a folder of its own, `earlier-1`; returns its name.
std::string move_aside(const fs::path& folder) {
  fs::path aside;
  for (int number = 1;; ++number) {
    aside = folder / ("earlier-" + std::to_string(number));
    if (!fs::exists(aside)) break;
  }
  files::make_folder(aside);
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name == "tokens" || name == "checkpoints" || name.starts_with('.') || name.starts_with("earlier-"))
      continue;
    fs::rename(entry.path(), aside / name);
  }
  files::sync_folder(aside);
  files::sync_folder(folder);
  return aside.filename().string();
}

}  // namespace

int64_t bytes_of(const Checkpoint& checkpoint) {
  int64_t bytes = 0;
  for (const auto& [name, part] : checkpoint.parts)
    for (const auto& [key, value] : part)
      if (const auto* tensor = std::get_if<at::Tensor>(&value))
        if (tensor->defined()) bytes += static_cast<int64_t>(tensor->nbytes());
  return bytes;
}

FolderClaim::FolderClaim(const fs::path& folder) : folder_(folder), made_(!fs::exists(folder)) {
  files::make_folders(folder);
  lock_.emplace(folder);
  files::remove_asides(folder, {"config.toml", "status.json"});
  files::remove_asides(folder / "tokens");
  files::remove_asides(folder / "model");
}

FolderClaim::~FolderClaim() {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder_, ignored))
    if (entry.path().filename() != ".lock") return;
  fs::remove(folder_ / ".lock", ignored);
  if (made_) fs::remove(folder_, ignored);
}

RunFolder::RunFolder(const ResolvedConfig& resolved, const fs::path& folder, std::optional<int64_t> from_step,
                     bool only_reads, RunShards shards)
    : resolved_(resolved),
      folder_(folder),
      only_reads_(only_reads),
      shards_(std::move(shards)),
      histogram_every_(resolved.config.train.evaluate_every > 0 ? resolved.config.train.evaluate_every
                                                                : kHistogramSteps),
      log_every_(resolved.config.log.every) {
  if (const auto& figures = resolved.config.watch.prometheus) {
    const fs::path path = folder / *figures;
    HALFSTEP_CHECK(!fs::exists(path) || fs::is_regular_file(path), "watch.prometheus is ", *figures, ", and ",
                   path.string(), " is a folder or a device. It would be replaced: give the name of a file.");
  }
  const RunConfig::Checkpoint& asked = resolved.config.checkpoint;
  if (!only_reads || shards_.are_there())
    checkpoints_.emplace(
        folder / "checkpoints",
        CheckpointOptions{
            .keep_last = asked.keep_last, .keep_every = asked.keep_every, .keep_best = asked.keep_best},
        shards_.ranks);
  if (!only_reads) {
    // What a restart goes on with is what this very command has made until then.
    const bool again = is_restart(folder);
    if (again && from_step)
      notes_.push_back(detail::concat(
          "restarted by its launcher: it resumes from the last checkpoint, not from step ", *from_step));
    if (again) from_step.reset();
    checkpoint_ =
        checkpoint_to_resume(*checkpoints_, again && asked.resume == "never" ? "auto" : asked.resume, folder,
                             from_step, shards_.live());
  } else if (from_step) {
    checkpoint_ = loaded_for_resume(*from_step);
  }
  if (!checkpoint_) return;
  step_ = saved_step_ = checkpoint_->step;
  notes_.push_back(detail::concat("resumed after step ", step_));
  if (!checkpoint_->healthy)
    notes_.push_back(
        "the run was in trouble when this checkpoint was saved; 'halfstep checkpoint ls' shows earlier ones, "
        "and --from-step goes back to one");
  for (const auto& change : fingerprint_changes(*checkpoint_)) notes_.push_back(change);
  const fs::path written = folder / "config.toml";
  if (!fs::exists(written)) return;
  std::optional<RunConfig> before;
  try {
    before = resolve_config({.file = read_config_file(written)}).config;
  } catch (const Error&) {
    notes_.push_back(detail::concat(
        written.string(), " cannot be read by this version: what the configuration changes is not known"));
    return;
  }
  check_same_shapes(folder, before->model, resolved.config.model);
  log_every_ = std::max(log_every_, before->log.every);
  for (const auto& change : changes_since(*before, resolved.config)) notes_.push_back(change);
}

void RunFolder::begin(const std::string& unit, uint64_t checkpoint_bytes, RunWatcher& watcher) {
  watcher_ = &watcher;
  if (only_reads_) return checkpoint_.reset();
  check_room_to_begin(checkpoint_bytes);
  if (checkpoint_) {
    const auto pinned = pinned_after(step_);
    HALFSTEP_CHECK(!pinned, folder_.string(), ": the checkpoint of step ", pinned.value_or(0),
                   " is pinned, and resuming from step ", step_,
                   " would remove it. Unpin it, or copy it elsewhere.");
    RunLog::check_resumable(folder_, step_);
    if (auto removal = removal_text(step_)) notes_.push_back(std::move(*removal));
    checkpoints_->remove_newer_than(step_);
    checkpoint_.reset();  // its tensors take as much memory as the run's
  } else if (const int64_t last = RunLog::last_step(folder_); last > 0) {
    notes_.push_back(detail::concat("the folder held a run of ", last,
                                    " steps without a checkpoint: moved into ", move_aside(folder_)));
  }
  files::write_durably(folder_ / "config.toml", to_toml(resolved_, /*with_origins=*/false));
  if (auto gap = open_logs(unit)) notes_.push_back(std::move(*gap));
  for (const std::string& note : notes_) log_->note(step_, seconds(), note);
}

std::optional<std::string> RunFolder::open_logs(const std::string& unit) {
  const RunHeader header = header_of(resolved_, unit, shards_.processes);
  // One or both may have been moved away.
  const bool is_there = step_ > 0 || fs::exists(folder_ / "log.jsonl") || fs::exists(folder_ / "log.csv");
  // The old ones go once the new ones are open: going back may be refused, and the end is told all the same.
  RunLog log = is_there ? RunLog::resume(folder_, header, step_) : RunLog::create(folder_, header);
  log_ = std::move(log);
  seconds_before_ = log_->seconds_before() - clock_.seconds();
  if (resolved_.config.log.tensorboard) {
    EventFile events(folder_, step_ > 0 ? std::optional(step_) : std::nullopt);
    events_ = std::move(events);
  }
  if (resolved_.config.watch.prometheus && !figures_)
    figures_.emplace(files::folder_name(folder_), unit, resolved_.config.precision.compute,
                     resolved_.config.train.steps);
  const int64_t recorded = log_->recorded_before();
  if (log_every_ == 0 || step_ - recorded < log_every_) return std::nullopt;
  return detail::concat("the log has no records of steps ", recorded + 1, " to ", step_);
}

template <typename Body>
void RunFolder::patiently(int64_t step, const std::string& what, Body body, bool reaches_disk) {
  try {
    body();
  } catch (const FileError& error) {
    if (refused_.emplace(what, Refusal{.since = step, .why = error.what()}).second)
      watcher_->note(step, detail::concat(what, " cannot be written: ", error.what(),
                                          " It is kept in memory and tried again; the run continues."));
    return;
  }
  const auto refused = refused_.find(what);
  if (refused == refused_.end() || !reaches_disk) return;
  const int64_t since = refused->second.since;
  refused_.erase(refused);
  std::string missing;
  if (log_->lost() > 0) missing = detail::concat("; ", log_->lost(), " records of the log are lost");
  if (events_ && events_->lost_bytes() > 0)
    missing += detail::concat("; ", size_text(events_->lost_bytes()), " of events are lost");
  note(step, detail::concat(what, " can be written again; what was kept in memory since step ", since,
                            " is written", missing));
}

EventFile* RunFolder::histograms_at(int64_t step) {
  // Of parts of weights they would be taken for those of the whole.
  return events_ && !shards_.are_there() && step % histogram_every_ == 0 ? &*events_ : nullptr;
}

void RunFolder::write(const StepRecord& record) {
  if (only_reads_) return;
  patiently(record.step, kLog, [&] { log_->step(record); });
  if (figures_) {
    figures_->take(record);
    write_figures(record.step, /*at_once=*/false);
  }
  if (!events_) return;
  patiently(
      record.step, kEvents,
      [&] {
        events_->scalar("loss", record.loss, record.step);
        events_->scalar("lr", record.lr, record.step);
        events_->scalar("grad_norm", record.grad_norm, record.step);
        events_->scalar("items_per_second", record.items_per_second, record.step);
        if (record.loss_scale) events_->scalar("loss_scale", *record.loss_scale, record.step);
        if (record.stalled_share) events_->scalar("stalled_share", *record.stalled_share, record.step);
        if (record.saturated_share) events_->scalar("saturated_share", *record.saturated_share, record.step);
        if (record.vanished_share) events_->scalar("vanished_share", *record.vanished_share, record.step);
        if (record.share_of_peak) events_->scalar("share_of_peak", *record.share_of_peak, record.step);
        if (record.memory)
          events_->scalar("peak_bytes", static_cast<double>(record.memory->peak_bytes), record.step);
      },
      /*reaches_disk=*/false);
}

void RunFolder::write(const EvaluationRecord& record) {
  if (only_reads_) return;
  patiently(record.step, kLog, [&] { log_->evaluation(record); });
  if (figures_) figures_->take(record);
  if (!events_) return;
  patiently(record.step, kEvents, [&] {
    events_->scalar("evaluation/loss", record.loss, record.step);
    if (record.accuracy) events_->scalar("evaluation/accuracy", *record.accuracy, record.step);
    events_->flush();
  });
}

void RunFolder::write(const SampleRecord& record) {
  if (only_reads_) return;
  patiently(record.step, kLog, [&] { log_->sample(record); });
}

void RunFolder::write(const ProbeRecord& record) {
  if (only_reads_) return;
  patiently(record.step, kLog, [&] { log_->probe(record); });
  if (figures_) figures_->take(record);
  if (!events_) return;
  patiently(
      record.step, kEvents,
      [&] {
        events_->histogram(detail::concat("log2_", record.role, "/", record.name), histogram_of(record.stats),
                           record.step);
      },
      /*reaches_disk=*/false);
}

void RunFolder::write(const ShadowRecord& record) {
  if (only_reads_) return;
  patiently(record.step, kLog, [&] { log_->shadow(record); });
}

void RunFolder::write(const CulpritRecord& record) {
  if (only_reads_) return;
  patiently(record.step, kLog, [&] { log_->culprit(record); });
}

void RunFolder::write(const FindingRecord& record) {
  if (only_reads_) return;
  patiently(record.step, kLog, [&] { log_->finding(record); });
  if (figures_) figures_->take(record);
}

void RunFolder::note(int64_t step, std::string_view text) {
  watcher_->note(step, text);
  if (only_reads_) return;
  patiently(step, kLog, [&] { log_->note(step, seconds(), text); });
}

void RunFolder::end(const RunEnd& end) {
  if (only_reads_) return;
  patiently(end.step, kLog, [&] {
    log_->end(end.step, seconds(), to_string(end.outcome), end.why);
    log_->sync();
  });
  if (events_) patiently(end.step, kEvents, [&] { events_->flush(); });
  if (const auto refused = refused_.find(kEvents); refused != refused_.end())
    watcher_->note(end.step, detail::concat("events for TensorBoard since step ", refused->second.since,
                                            " could not be written and are lost"));
  if (figures_) write_figures(end.step, /*at_once=*/true);
}

/// What the disk refuses is told once, and the next file has newer figures.
void RunFolder::write_figures(int64_t step, bool at_once) {
  if (!at_once && seconds_here() - figures_at_ < kFiguresSeconds) return;
  figures_at_ = seconds_here();
  const fs::path path = folder_ / *resolved_.config.watch.prometheus;
  try {
    files::replace_file(path, figures_->text(unix_time()));
    figures_refused_ = false;
  } catch (const FileError& error) {
    if (std::exchange(figures_refused_, true)) return;
    note(step, detail::concat("the figures for Prometheus cannot be written: ", error.what(),
                              " It is tried again; the run continues."));
  }
}

std::optional<std::string> RunFolder::unwritten() const {
  const int64_t records = only_reads_ ? 0 : log_->unwritten();
  if (records == 0) return std::nullopt;
  const auto refused = refused_.find(kLog);
  return detail::concat(
      folder_.string(), ": ", counted(records, "record"), " of the log could not be written and are lost",
      refused == refused_.end()
          ? "."
          : detail::concat(", since step ", refused->second.since, ": ", refused->second.why));
}

double RunFolder::retry_seconds() const {
  return std::min(kLongestRetrySeconds, kFirstRetrySeconds * std::exp2(failures_ - 1));
}

bool RunFolder::save_due(int64_t step) const {
  if (only_reads_) return false;
  if (step == saved_step_ || (saving_ && step == saving_->step)) return false;
  const RunConfig::Checkpoint& asked = resolved_.config.checkpoint;
  const double since = seconds_here() - saved_at_;
  if (failures_ > 0) return since > retry_seconds();
  return (asked.every > 0 && step % asked.every == 0) ||
         (asked.keep_every > 0 && step % asked.keep_every == 0) ||
         (asked.every_minutes > 0 && since > 60 * asked.every_minutes);
}

std::optional<uint64_t> RunFolder::free_bytes() const {
  struct statvfs disk{};
  // Some file systems fill in nothing, or -1: the write itself will tell.
  if (::statvfs((folder_ / "checkpoints").c_str(), &disk) != 0 || disk.f_blocks == 0) return std::nullopt;
  if (disk.f_bavail > disk.f_blocks) return std::nullopt;
  return uint64_t{disk.f_bavail} * disk.f_frsize;
}

void RunFolder::check_room_to_begin(uint64_t checkpoint_bytes) {
  guessed_save_seconds_ = static_cast<double>(checkpoint_bytes) / kGuessedBytesPerSecond;
  const auto free = free_bytes();
  if (!free) return;
  const RunConfig::Checkpoint& asked = resolved_.config.checkpoint;
  const auto keep_last = static_cast<uint64_t>(asked.keep_last);
  uint64_t newer = 0, in_turn = 0;  // that go, and that will go when new ones come
  for (const int64_t step : checkpoints_->steps()) {
    const bool stays_for_ever = files::is_pinned(folder_ / "checkpoints", step) ||
                                (asked.keep_every > 0 && step % asked.keep_every == 0);
    if (step > step_)
      ++newer;
    else if (!stays_for_ever)
      ++in_turn;
  }
  const uint64_t room = *free + newer * checkpoint_bytes;
  check_space(room, checkpoint_bytes);
  // One more than are kept: an old one goes when the new one is there.
  if (keep_last > 0 && in_turn <= keep_last && room < (keep_last + 1 - in_turn) * checkpoint_bytes)
    notes_.push_back(detail::concat("the disk has room for ", room / checkpoint_bytes, " checkpoints of ",
                                    size_text(checkpoint_bytes), ", and ", keep_last + 1 - in_turn,
                                    " are saved before the oldest is removed: lower checkpoint.keep_last, or "
                                    "free some space"));
}

void RunFolder::check_space(uint64_t room, uint64_t checkpoint_bytes) const {
  if (room < checkpoint_bytes)
    throw FileError(detail::concat((folder_ / "checkpoints").string(), ": ", size_text(room),
                                   " are free, and a checkpoint takes ", size_text(checkpoint_bytes),
                                   ". Free some space; 'halfstep checkpoint rm' removes old ones."),
                    ENOSPC);
}

std::string RunFolder::last_saved_text() const {
  return saved_step_ > 0 ? detail::concat("The last one is of step ", saved_step_, ".")
                         : std::string("There is none before it.");
}

void RunFolder::note_failed_save(int64_t step, const std::string& why) {
  ++failures_;
  failure_ = why;
  saved_at_ = seconds_here();  // from here on the wait for the next attempt counts
  note(step,
       detail::concat("a checkpoint could not be saved: ", why, " ", last_saved_text(), " It is tried again",
                      ending_ ? "." : detail::concat(" in ", retry_seconds(), " s; the run continues.")));
}

void RunFolder::save(Checkpoint checkpoint) {
  const int64_t step = checkpoint.step;
  PhaseClock waiting;
  finish_saves(step);
  if (const double waited = waiting.seconds(); waited > 1)
    note(step, detail::concat("waited ", waited,
                              " s for the checkpoint before: they come faster than the disk can write"));
  saved_at_ = seconds_here();
  const int64_t bytes = bytes_of(checkpoint);
  if (!only_reads_) patiently(step, kLog, [&] { log_->sync(); });
  if (events_) patiently(step, kEvents, [&] { events_->flush(); });
  try {
    // Of several that save together, one must not stay away: the write itself tells.
    if (const auto room = shards_.are_there() ? std::nullopt : free_bytes())
      check_space(*room, static_cast<uint64_t>(bytes));
    saving_ = {.step = step, .tensor_bytes = bytes, .begun = seconds_here()};
    (void)checkpoints_->save_async(std::move(checkpoint));
  } catch (const OldCheckpointError& error) {
    note(step, error.what());
  } catch (const FileError& error) {  // any other is no matter of the disk, and would come again
    saving_.reset();
    note_failed_save(step, error.what());
  }
}

void RunFolder::look_after_saves(int64_t step) {
  if (saving_ && !checkpoints_->writing()) finish_saves(step);
}

void RunFolder::finish_saves(int64_t step) {
  if (!saving_) return;
  const Saving saving = *saving_;
  saving_.reset();
  std::string trouble;
  try {
    checkpoints_->wait();
  } catch (const OldCheckpointError& error) {
    trouble = error.what();
  } catch (const RankError&) {
    throw;
  } catch (const Error& error) {
    // Of the disk, or of what somebody put among the checkpoints meanwhile.
    return note_failed_save(step, error.what());
  }
  saved_step_ = saving.step;
  saved_unix_time_ = unix_time();
  longest_save_seconds_ = std::max(longest_save_seconds_.value_or(0), seconds_here() - saving.begun);
  failures_ = 0;
  if (only_reads_) return;
  watcher_->note(step, detail::concat("checkpoint of step ", saving.step,
                                      " is saved: ", size_text(saving.tensor_bytes)));
  patiently(step, kLog, [&] {
    log_->checkpoint(
        {.step = step, .seconds = seconds(), .saved_step = saving.step, .tensor_bytes = saving.tensor_bytes});
  });
  if (!trouble.empty()) note(step, trouble);
}

void RunFolder::save_last(const Checkpoint& checkpoint) {
  constexpr std::array<double, 5> kPauses = {0.2, 0.5, 1, 2, 4};
  ending_ = true;
  for (size_t attempt = 0;; ++attempt) {
    save(checkpoint);
    finish_saves(checkpoint.step);
    if (saved_step_ == checkpoint.step) return;
    if (attempt == kPauses.size())
      throw FileError(
          detail::concat(folder_.string(), ": the last checkpoint, of step ", checkpoint.step,
                         ", could not be saved in ", attempt + 1, " attempts: ", failure_, " ",
                         last_saved_text(), " Then run the same command again: it ",
                         saved_step_ > 0 ? "resumes from there." : "starts again from the beginning."),
          EIO);
    std::this_thread::sleep_for(std::chrono::duration<double>(kPauses[attempt]));
  }
}

Checkpoint RunFolder::loaded(int64_t step) const {
  if (shards_.are_there()) return checkpoints_->load(step, shards_.live());
  return load_checkpoint(folder_ / "checkpoints", step);
}

Checkpoint RunFolder::loaded_for_resume(int64_t step) const {
  try {
    return loaded(step);
  } catch (const FileError&) {
    throw;
  } catch (const Error& error) {
    throw Error(detail::concat(error.what(),
                               " 'halfstep checkpoint ls' shows the ones before, and "
                               "'halfstep train --from-step' resumes from one."));
  }
}

std::vector<CheckpointSummary> RunFolder::whole_checkpoints() const {
  std::vector<CheckpointSummary> found;
  for (const int64_t step : checkpoints_->steps()) try {
      found.push_back(summarize_checkpoint(folder_ / "checkpoints", step));
    } catch (const Error&) {  // damaged: nothing to go back to
    }
  return found;
}

std::optional<int64_t> RunFolder::healthy_step(int64_t most) const {
  std::optional<int64_t> found;
  for (const CheckpointSummary& each : whole_checkpoints()) {
    if (found && each.step > most) break;
    if (each.healthy) found = each.step;
  }
  return found;
}

std::optional<int64_t> RunFolder::best_step() const {
  if (!resolved_.config.checkpoint.keep_best) return std::nullopt;
  std::optional<CheckpointSummary> best;
  for (const CheckpointSummary& each : whole_checkpoints())
    if (each.score && (!best || *each.score <= *best->score)) best = each;
  return best && best->healthy ? std::optional(best->step) : std::nullopt;
}

std::vector<CheckpointSummary> RunFolder::kept_after(int64_t step) const {
  const int64_t keep_every = resolved_.config.checkpoint.keep_every;
  const auto best = best_step();
  std::vector<CheckpointSummary> kept;
  for (CheckpointSummary& each : whole_checkpoints())
    if (each.step > step && ((keep_every > 0 && each.step % keep_every == 0) || each.step == best))
      kept.push_back(std::move(each));
  return kept;
}

std::optional<std::string> RunFolder::removal_text(int64_t step) const {
  std::string steps;
  for (const CheckpointSummary& each : kept_after(step))
    steps += detail::concat(steps.empty() ? " " : ", ", each.step);
  if (steps.empty()) return std::nullopt;
  return detail::concat("checkpoints that checkpoint.keep_every or keep_best kept are removed, of steps",
                        steps, ": the run goes back to step ", step);
}

std::optional<int64_t> RunFolder::pinned_after(int64_t step) const {
  for (const int64_t each : checkpoints_->steps())
    if (each > step && files::is_pinned(folder_ / "checkpoints", each)) return each;
  return std::nullopt;
}

void RunFolder::go_back_to(int64_t step, const std::string& unit) {
  if (only_reads_) {
    step_ = saved_step_ = step;
    return;
  }
  const auto removal = removal_text(step);
  checkpoints_->remove_newer_than(step);
  step_ = saved_step_ = step;
  const auto gap = open_logs(unit);
  for (const auto& text : {removal, gap})
    if (text) note(step, *text);
}

void RunFolder::write_status(const std::string& state, const StepRecord* latest, bool at_once) {
  if (only_reads_ || (!at_once && seconds_here() - status_at_ < kStatusSeconds)) return;
  status_at_ = seconds_here();
  nlohmann::ordered_json status{{"state", state},
                                {"process", ::getpid()},
                                {"unix_time", unix_time()},
                                {"seconds", seconds()},
                                {"step", latest != nullptr ? latest->step : step_},
                                {"steps", resolved_.config.train.steps}};
  if (const char* const launch = std::getenv(kLaunchVariable)) {
    status["launch"] = launch;
    status["attempt"] = launch_attempt();
  }
  if (latest != nullptr) {
    if (std::isfinite(latest->loss)) status["loss"] = latest->loss;
    status["items_per_second"] = latest->items_per_second;
  }
  status["saved_step"] = saved_step_;
  if (saved_unix_time_ > 0) status["saved_unix_time"] = saved_unix_time_;
  try {
    files::replace_file(folder_ / "status.json", status.dump(2) + "\n");
  } catch (const FileError&) {
    // The next one may work; what else the disk refuses is told where something is lost by it.
  }
}

}  // namespace halfstep::train
