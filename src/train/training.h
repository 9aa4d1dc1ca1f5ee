// The parts of a run that live in memory, and one step over them.
#pragma once

#include <halfstep/checkpoint.h>
#include <halfstep/event_file.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/probe.h>
#include <halfstep/run_config.h>
#include <halfstep/run_log.h>
#include <halfstep/shadow.h>
#include <halfstep/task.h>
#include <halfstep/trainer.h>

#include <limits>
#include <memory>

#include "tensor/transfers.h"
#include "train/choices.h"
#include "train/culprits.h"
#include "train/watches.h"

namespace halfstep::train {

class Training {
 public:
  Training(const RunConfig& config, std::unique_ptr<Task> task, const Ranks& ranks,
           const std::optional<TrainerShadow>& shadow = {});

  Task& task() { return *task_; }
  const MixedPrecision& precision() const { return precision_; }
  const Ranks& ranks() const { return precision_.ranks(); }
  bool is_sharded() const { return precision_.sharding() != Sharding::None; }
  /// Whether weights are there only while all ranks use them.
  bool gathers_weights() const { return precision_.sharding() == Sharding::Weights; }
  /// Of a sharded run, what is to be loaded into this rank's parts; nothing otherwise.
  std::map<std::string, StateDict> live_parts() const;
  /// By rank 0, at the end; all ranks call it.
  void write_model(const std::filesystem::path& folder);
  int64_t parameters() const;

  bool on_accelerator() const { return on_accelerator_; }

  /// One update of the weights, or a skipped one. `histograms`, if given, gets those of weights and
  /// gradients. An accelerator is not waited for.
  void step(int64_t number, EventFile* histograms);
  /// Of the steps since the last call. Waits for an accelerator, once.
  std::vector<StepRecord> records();
  /// Of the steps since the last call that watch.every has looked at, over all ranks.
  std::vector<ProbeRecord> probes();
  /// Of the steps since the last call that were compared with other precisions.
  std::vector<ShadowRecord> shadows() { return shadow_ ? shadow_->take() : std::vector<ShadowRecord>(); }
  /// Of a skipped step, if watch.trace_on_skip has found who made the first number that is not finite.
  std::vector<CulpritRecord> culprits() { return std::exchange(culprits_, {}); }
  /// Throws the SkipLimitError of a step, if one had it: after the step was logged.
  void check_not_diverged() {
    if (skip_limit_) throw *std::exchange(skip_limit_, std::nullopt);
  }
  bool has_passed_skip_limit() const { return skip_limit_.has_value(); }

  /// Whether the loss has risen for good: a sentence with the numbers.
  std::optional<std::string> diverged() const {
    return divergence_ ? std::optional(divergence_->why) : std::nullopt;
  }
  /// The first step of the present trouble; the next one if there is none.
  int64_t trouble_since() const { return divergence_ ? divergence_->since : watch_.above_since(); }

  /// How many of the run's first steps were skipped; those of an accelerator once they are told.
  int64_t skipped_until(int64_t step) const { return step - optimizer_steps_; }

  /// False from the first batch of a step that did not end on: its state is of no step.
  bool between_steps() const { return between_steps_; }

  EvaluationRecord evaluate(int64_t step);
  std::optional<SampleRecord> sample(int64_t step);

  /// Evaluations in a row, up to the last, that had no lower loss than the best before them.
  int64_t evaluations_without_gain() const { return progress_.without_gain; }
  /// Whether it was evaluated after this step, with the lowest loss so far.
  bool is_best_at(int64_t step) const {
    return progress_.evaluated_step == step && progress_.without_gain == 0;
  }

  /// Here or before the checkpoint that was restored.
  bool evaluated_at(int64_t step) const { return progress_.evaluated_step == step; }

  /// With the loss of an evaluation after this step as its score.
  Checkpoint checkpoint(int64_t step) const;
  /// All that was saved, but the options of the configuration: those are carried out from here on.
  void restore(const Checkpoint& checkpoint);
  /// The same, but data and random numbers go on where they are: the batches since the checkpoint are left
  /// out.
  void go_back(const Checkpoint& checkpoint);
  int64_t rollbacks() const { return progress_.rollbacks; }
  /// The step of the last rollback's checkpoint, if there was one.
  std::optional<int64_t> went_back_to() const {
    return progress_.rollbacks > 0 ? std::optional(progress_.went_back_to) : std::nullopt;
  }

 private:
  /// What a run counts over all its processes.
  struct Progress {
    int64_t rollbacks = 0, went_back_to = 0;
    int64_t without_gain = 0;
    double best_loss = std::numeric_limits<double>::infinity();  ///< held out
    int64_t evaluated_step = -1;
    double evaluated_loss = 0;
  };

  /// A step that was taken, and what of it an accelerator may still have to tell.
  struct Taken {
    StepRecord record;
    StepReport report;
    std::optional<Arrival> loss{};
    bool counts_stalls = false;
    double seconds = 0;
  };

  /// What a step began with, to take it again.
  struct Beginning {
    StateDict task{}, random{};
    double loss_scale = 1;
  };
  std::optional<Beginning> beginning_if_traced() const;
  /// Takes a step that was skipped again, looked at by an OpTracer. Leaves everything as it is.
  void trace(int64_t step, const Beginning& beginning, const GradSummary& grads);
  /// One micro-batch of it, the one that was taken.
  void look_again(double loss_scale, Retrace& found);
  /// Each rank's own mean.
  std::vector<double> rank_losses(const at::Tensor& losses, RankShare mine) const;

  void tell(Taken& taken);
  double mean_of(const at::Tensor& losses) const;
  double stalled_share(const StepReport& report) const;

  /// As it was when it was first seen: of several steps that are told together the last may look well again.
  struct Divergence {
    std::string why;
    int64_t since = 0;
  };

  /// So soon after a rollback that it may diverge again: the ones before are kept until then.
  bool on_trial(int64_t step) const;
  void write_histograms(EventFile& events, int64_t step) const;

  RunConfig config_;
  std::unique_ptr<Task> task_;
  MixedPrecision precision_;
  RunOptimizer optimizer_;
  DivergenceWatch watch_;
  std::optional<Divergence> divergence_;
  Progress progress_;
  bool on_accelerator_ = false;
  std::vector<Taken> taken_;
  int64_t optimizer_steps_ = 0;  ///< that are known to be taken
  bool between_steps_ = true;
  std::optional<SkipLimitError> skip_limit_;
  std::optional<Probe> probe_;
  int64_t latest_step_ = 0;
  std::optional<Shadow> shadow_;
  std::vector<CulpritRecord> culprits_;
  int64_t traces_ = 0, skips_in_a_row_ = 0;
  std::optional<double> flops_per_step_;
  double machine_flops_ = 0;  ///< a second
};

}  // namespace halfstep::train
