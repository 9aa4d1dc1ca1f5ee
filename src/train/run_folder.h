// All that a run writes: its folder with configuration, logs and checkpoints.
#pragma once

#include <halfstep/checkpoint.h>
#include <halfstep/event_file.h>
#include <halfstep/run_config.h>
#include <halfstep/run_log.h>
#include <halfstep/run_watch.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "train/phase_clock.h"

namespace halfstep::train {

class RunFolder {
 public:
  /// Begins a run, or opens one to go on with it: checkpoint.resume says which.
  RunFolder(const ResolvedConfig& resolved, const std::filesystem::path& folder, const std::string& unit);

  /// To go on from; nothing in a new run.
  const std::optional<Checkpoint>& checkpoint() const { return checkpoint_; }
  void forget_checkpoint() { checkpoint_.reset(); }  ///< its tensors take as much memory as the run's

  int64_t step() const { return step_; }  ///< done before
  const std::vector<std::string>& notes() const { return notes_; }

  /// Since the run began, pauses between processes not counted.
  double seconds() const { return seconds_before_ + clock_.seconds(); }

  /// Where histograms go, if there are any to write at this step.
  EventFile* histograms_at(int64_t step);

  void write(const StepRecord& record);
  void write(const EvaluationRecord& record);
  void write(const SampleRecord& record);
  void note(int64_t step, std::string_view text, RunWatcher& watcher);
  void end(const RunEnd& end);

  /// The logs first, so that no checkpoint is ahead of them. Written while the run goes on.
  void save(Checkpoint checkpoint, RunWatcher& watcher);
  void wait() { checkpoints_.wait(); }
  int64_t saved_step() const { return saved_step_; }

 private:
  void write_configuration(const ResolvedConfig& resolved, const std::filesystem::path& folder);

  CheckpointFolder checkpoints_;
  std::optional<Checkpoint> checkpoint_;
  std::vector<std::string> notes_;
  int64_t step_ = 0;
  int64_t saved_step_ = 0;
  std::optional<RunLog> log_;
  std::optional<EventFile> events_;
  double seconds_before_ = 0;
  PhaseClock clock_;
  int64_t histogram_every_;
};

}  // namespace halfstep::train
