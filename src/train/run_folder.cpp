#include "train/run_folder.h"

#include <halfstep/error.h>

#include <fstream>

namespace halfstep::train {
namespace {

using Path = std::filesystem::path;

// Histograms where no evaluation says how often the run is looked at.
constexpr int64_t kHistogramSteps = 100;

RunHeader header_of(const ResolvedConfig& resolved, const std::string& unit) {
  RunHeader header{.configuration = to_toml(resolved, /*with_origins=*/false), .machine = {}, .unit = unit};
  for (const auto& [name, value] : fingerprint()) header.machine.emplace_back(name, value);
  return header;
}

std::optional<Checkpoint> checkpoint_to_resume(const CheckpointFolder& checkpoints, const std::string& resume,
                                               const Path& folder) {
  if (resume == "never") {
    HALFSTEP_CHECK(checkpoints.steps().empty() && !std::filesystem::exists(folder / "log.jsonl"),
                   folder.string(),
                   ": already holds a run, and checkpoint.resume is never. Choose another folder, or let it "
                   "resume (checkpoint.resume=auto).");
    return std::nullopt;
  }
  auto latest = checkpoints.load_latest();
  HALFSTEP_CHECK(latest || resume != "must", folder.string(),
                 ": has no checkpoint, and checkpoint.resume is must. Check run.folder.");
  return latest;
}

/// What is asked for now and was not when the run's folder was written, each in a sentence.
std::vector<std::string> changes_since(const Path& path, const RunConfig& now) {
  if (!std::filesystem::exists(path)) return {};
  try {
    RunConfig before = resolve({.file = read_config_file(path)}).config;
    // Where it lies and whether it may go on: not what it is.
    before.run = now.run;
    before.checkpoint.resume = now.checkpoint.resume;
    return config_changes(before, now);
  } catch (const Error&) {
    return {detail::concat(path.string(),
                           " cannot be read by this version: what the configuration changes is not known")};
  }
}

}  // namespace

RunFolder::RunFolder(const ResolvedConfig& resolved, const Path& folder, const std::string& unit)
    : checkpoints_(folder / "checkpoints", {.keep_last = resolved.config.checkpoint.keep_last}),
      checkpoint_(checkpoint_to_resume(checkpoints_, resolved.config.checkpoint.resume, folder)),
      histogram_every_(resolved.config.train.evaluate_every > 0 ? resolved.config.train.evaluate_every
                                                                : kHistogramSteps) {
  if (checkpoint_) {
    step_ = saved_step_ = checkpoint_->step;
    notes_.push_back(detail::concat("resumed after step ", step_));
    for (const auto& change : fingerprint_changes(*checkpoint_)) notes_.push_back(change);
    for (const auto& change : changes_since(folder / "config.toml", resolved.config))
      notes_.push_back(change);
  }
  write_configuration(resolved, folder);
  const RunHeader header = header_of(resolved, unit);
  log_ = std::filesystem::exists(folder / "log.jsonl") ? RunLog::resume(folder, header, step_)
                                                       : RunLog::create(folder, header);
  seconds_before_ = log_->seconds_before();
  if (resolved.config.log.tensorboard)
    events_.emplace(folder, checkpoint_ ? std::optional(step_) : std::nullopt);
  for (const std::string& note : notes_) log_->note(step_, seconds(), note);
}

void RunFolder::write_configuration(const ResolvedConfig& resolved, const Path& folder) {
  std::ofstream file(folder / "config.toml");
  file << to_toml(resolved, /*with_origins=*/false);
  if (!file.flush())
    throw FileError(
        detail::concat((folder / "config.toml").string(), ": cannot be written. Is the disk full?"), errno);
}

EventFile* RunFolder::histograms_at(int64_t step) {
  return events_ && step % histogram_every_ == 0 ? &*events_ : nullptr;
}

void RunFolder::write(const StepRecord& record) {
  log_->step(record);
  if (!events_) return;
  events_->scalar("loss", record.loss, record.step);
  events_->scalar("lr", record.lr, record.step);
  events_->scalar("grad_norm", record.grad_norm, record.step);
  events_->scalar("tokens_per_second", record.tokens_per_second, record.step);
  if (record.loss_scale) events_->scalar("loss_scale", *record.loss_scale, record.step);
  if (record.stalled_share) events_->scalar("stalled_share", *record.stalled_share, record.step);
  if (record.share_of_peak) events_->scalar("share_of_peak", *record.share_of_peak, record.step);
  if (record.memory)
    events_->scalar("peak_bytes", static_cast<double>(record.memory->peak_bytes), record.step);
}

void RunFolder::write(const EvaluationRecord& record) {
  log_->evaluation(record);
  if (!events_) return;
  events_->scalar("evaluation/loss", record.loss, record.step);
  if (record.accuracy) events_->scalar("evaluation/accuracy", *record.accuracy, record.step);
  events_->flush();
}

void RunFolder::write(const SampleRecord& record) { log_->sample(record); }

void RunFolder::note(int64_t step, std::string_view text, RunWatcher& watcher) {
  log_->note(step, seconds(), text);
  watcher.note(step, text);
}

void RunFolder::end(const RunEnd& end) {
  log_->end(end.step, seconds(), to_string(end.outcome), end.why);
  log_->sync();
  if (events_) events_->flush();
}

void RunFolder::save(Checkpoint checkpoint, RunWatcher& watcher) {
  const int64_t step = saved_step_ = checkpoint.step;
  log_->sync();
  if (events_) events_->flush();
  const SaveReport report = checkpoints_.save_async(std::move(checkpoint));
  watcher.note(step, detail::concat("checkpoint of step ", step, ": ", report.tensor_bytes / 1000000, " MB"));
  if (report.waited_seconds > 1)
    note(step,
         detail::concat("waited ", report.waited_seconds,
                        " s for the checkpoint before: they come faster than the disk can write"),
         watcher);
}

}  // namespace halfstep::train
