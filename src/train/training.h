// The parts of a run that live in memory, and one step over them.
#pragma once

#include <halfstep/checkpoint.h>
#include <halfstep/event_file.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/run_config.h>
#include <halfstep/run_log.h>

#include <filesystem>
#include <memory>

#include "train/run_optimizer.h"
#include "train/task.h"

namespace halfstep::train {

class Training {
 public:
  Training(const RunConfig& config, const std::filesystem::path& tokens_folder);

  Task& task() { return *task_; }
  const MixedPrecision& precision() const { return precision_; }
  int64_t parameters() const;

  /// One update of the weights, or a skipped one. `histograms`, if given, gets those of weights and
  /// gradients.
  StepRecord step(int64_t number, EventFile* histograms);
  /// Throws the SkipLimitError of the last step, if it had one: after the step was logged.
  void check_not_diverged() const {
    if (skip_limit_) throw *skip_limit_;
  }

  EvaluationRecord evaluate(int64_t step);
  std::optional<SampleRecord> sample(int64_t step);

  Checkpoint checkpoint(int64_t step) const;
  void restore(const Checkpoint& checkpoint);

 private:
  void write_histograms(EventFile& events, int64_t step) const;

  RunConfig config_;
  std::unique_ptr<Task> task_;
  MixedPrecision precision_;
  RunOptimizer optimizer_;
  std::optional<SkipLimitError> skip_limit_;
  std::optional<double> flops_a_step_;
  double machine_flops_ = 0;  ///< a second
};

}  // namespace halfstep::train
