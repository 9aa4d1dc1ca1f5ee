#include <ATen/Parallel.h>
#include <halfstep/error.h>
#include <halfstep/memory.h>
#include <halfstep/trainer.h>

#include <algorithm>

#include "train/phase_clock.h"
#include "train/run_folder.h"
#include "train/trace.h"
#include "train/training.h"

namespace halfstep {
namespace {

using train::PhaseClock;
using train::RunFolder;
using train::Training;

bool due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

std::string precision_text(const RunConfig& config, const Precision& precision) {
  const std::string_view weights = to_string(precision.weights);
  return detail::concat(precision.name(), ", weights ", weights, ", moments ", config.precision.moments);
}

RunPlan plan_of(const RunConfig& config, Training& training, const std::filesystem::path& folder) {
  return {.model = training.task().model_text(),
          .parameters = training.parameters(),
          .precision = precision_text(config, training.precision().precision()),
          .data = training.task().data_text(),
          .folder = folder.string(),
          .unit = training.task().unit(),
          .steps = config.train.steps,
          .tokens_a_step = training.task().units_a_batch() * config.train.accumulation,
          .threads = at::get_num_threads()};
}

int64_t bytes_of(const Checkpoint& checkpoint) {
  int64_t bytes = 0;
  for (const auto& [name, part] : checkpoint.parts)
    for (const auto& [key, value] : part)
      if (const auto* tensor = std::get_if<at::Tensor>(&value))
        bytes += static_cast<int64_t>(tensor->nbytes());
  return bytes;
}

}  // namespace

struct Trainer::Impl {
  ResolvedConfig resolved;
  std::filesystem::path folder;
  Training training;
  RunPlan plan;

  Impl(const ResolvedConfig& given, const std::filesystem::path& where)
      : resolved(given), folder(where), training(given.config, where / "tokens") {
    plan = plan_of(given.config, training, where);
  }

  const RunConfig& config() const { return resolved.config; }
  bool last(int64_t step) const { return step == config().train.steps; }

  /// An evaluation that is due after this step: also before the first, to see what the run changes, and after
  /// the last.
  std::optional<EvaluationRecord> evaluation_after(int64_t step) {
    const int64_t every = config().train.evaluate_every;
    if (every == 0 || !(due(step, every) || last(step))) return std::nullopt;
    return training.evaluate(step);
  }

  void tell(std::optional<EvaluationRecord> evaluation, RunFolder& run, RunWatcher& watcher) {
    if (!evaluation) return;
    evaluation->seconds = run.seconds();
    run.write(*evaluation);
    watcher.evaluation(*evaluation);
  }

  /// One step with all that belongs to it but the checkpoint: once it returns, log and watcher know of it.
  void do_step(int64_t step, RunFolder& run, RunWatcher& watcher) {
    StepRecord record = training.step(step, run.histograms_at(step));
    record.seconds = run.seconds();
    const auto evaluation = evaluation_after(step);
    if (evaluation) record.evaluation_loss = evaluation->loss;
    const bool logged = due(step, config().log.every) || record.skipped || evaluation || last(step);
    if (logged) run.write(record);
    watcher.step(record);
    tell(evaluation, run, watcher);
    if (due(step, config().train.sample_every)) {
      if (auto sample = training.sample(step)) {
        sample->seconds = run.seconds();
        run.write(*sample);
        watcher.sample(*sample);
      }
    }
    training.check_not_diverged();
  }

  RunEnd run(RunWatcher& watcher, const std::atomic<bool>& stop);
};

RunEnd Trainer::Impl::run(RunWatcher& watcher, const std::atomic<bool>& stop) {
  RunFolder run(resolved, folder, plan.unit);
  if (run.checkpoint()) training.restore(*run.checkpoint());
  int64_t step = plan.steps_done = run.step();
  run.forget_checkpoint();
  watcher.begin(plan);
  for (const std::string& note : run.notes()) watcher.note(step, note);

  std::optional<train::Trace> trace;
  const int64_t traced_until = step + 1 + config().log.trace_steps;  // the first step warms up
  RunEnd end;
  try {
    if (step == 0) tell(evaluation_after(0), run, watcher);
    while (step < config().train.steps && !stop.load()) {
      if (config().log.trace_steps > 0 && step == plan.steps_done + 1) trace.emplace();
      do_step(step + 1, run, watcher);
      ++step;
      if (trace && (step == traced_until || last(step))) {
        trace->write(folder / "trace.json");
        trace.reset();
        run.note(step, "trace.json holds the last steps' operations", watcher);
      }
      if (due(step, config().checkpoint.every)) run.save(training.checkpoint(step), watcher);
    }
    end = {.outcome = last(step) ? RunOutcome::Done : RunOutcome::Interrupted,
           .step = step,
           .why = last(step) ? "all steps were taken"
                             : detail::concat("stopped after step ", step, " of ", config().train.steps,
                                              "; the same command goes on from there")};
    if (step > run.saved_step()) run.save(training.checkpoint(step), watcher);
    run.wait();
    if (last(step)) training.task().write_model(folder / "model");
  } catch (const SkipLimitError& error) {
    // Nothing is saved: skipped steps changed no weight, and the scale that they ended with helps nobody.
    end = {.outcome = RunOutcome::Diverged, .step = step + 1, .why = error.what()};
    run.wait();
  }
  run.end(end);
  watcher.end(end);
  return end;
}

Trainer::Trainer(const ResolvedConfig& resolved, const std::filesystem::path& folder)
    : impl_(std::make_unique<Impl>(resolved, folder)) {}
Trainer::~Trainer() = default;
Trainer::Trainer(Trainer&&) noexcept = default;
Trainer& Trainer::operator=(Trainer&&) noexcept = default;

const RunPlan& Trainer::plan() const { return impl_->plan; }

RunEstimate Trainer::estimate() {
  constexpr int64_t kTried = 3;
  RunEstimate estimate;
  reset_memory_peak();
  int64_t peak_bytes = 0;
  for (int64_t step = 1; step <= kTried; ++step) {
    PhaseClock clock;
    const StepRecord record = impl_->training.step(step, nullptr);
    impl_->training.check_not_diverged();
    estimate.seconds_a_step = clock.seconds();  // of the last: the first ones warm up
    if (record.memory) peak_bytes = std::max(peak_bytes, record.memory->peak_bytes);
  }
  const RunConfig& config = impl_->config();
  double evaluations = 0;
  if (config.train.evaluate_every > 0) {
    estimate.evaluation_seconds = impl_->training.evaluate(kTried).duration_seconds;
    const int64_t after_steps =
        (config.train.steps + config.train.evaluate_every - 1) / config.train.evaluate_every;
    evaluations = static_cast<double>(1 + after_steps);
  }
  estimate.total_seconds = static_cast<double>(config.train.steps) * estimate.seconds_a_step +
                           evaluations * estimate.evaluation_seconds;
  estimate.peak_bytes = peak_bytes;
  estimate.checkpoint_bytes = bytes_of(impl_->training.checkpoint(kTried));
  return estimate;
}

RunEnd Trainer::run(RunWatcher& watcher, const std::atomic<bool>& stop) { return impl_->run(watcher, stop); }

}  // namespace halfstep
