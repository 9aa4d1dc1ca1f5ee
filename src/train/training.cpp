#include "train/training.h"

#include <halfstep/autocast.h>
#include <halfstep/error.h>
#include <halfstep/memory.h>
#include <halfstep/op_tracer.h>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "tensor/transfers.h"
#include "tensor/update_path.h"
#include "train/backward_root.h"
#include "train/choices.h"
#include "train/phase_clock.h"
#include "train/tasks.h"

namespace halfstep::train {
namespace {

// How fast this machine multiplies matrices.

double measured_rate(c10::ScalarType type) {
  constexpr int64_t kSide = 1024;
  constexpr int kRounds = 8;
  constexpr double kMostSeconds = 0.2;  // in all, but for the last round
  const at::NoGradGuard no_grad;
  // As a run multiplies: where the processor has no products of this type, those of the scope are FP32's.
  std::optional<AutocastScope> scope;
  if (type != at::kFloat) scope.emplace(type, OpPolicy::standard(), AutocastOptions{.allow_emulated = true});
  const at::Tensor a = at::full({kSide, kSide}, 0.5, type), b = at::full({kSide, kSide}, 0.25, type);
  double best_seconds = 1e30;
  PhaseClock all;
  for (int round = 0; round < kRounds && all.seconds() < kMostSeconds; ++round) {
    PhaseClock clock;
    const at::Tensor product = at::mm(a, b);
    best_seconds = std::min(best_seconds, clock.seconds());
  }
  return 2.0 * kSide * kSide * kSide / best_seconds;
}

/// Floating-point operations a second in products of square matrices of this type, the best of a few rounds:
/// what `share of the machine's peak` is a share of. Measured once for each type and number of threads, for
/// 0.2 s at most or one product.
double product_rate(c10::ScalarType type) {
  static std::mutex mutex;
  static std::map<std::pair<c10::ScalarType, int>, double> known;
  const std::lock_guard lock(mutex);
  const auto [rate, is_new] = known.try_emplace({type, at::get_num_threads()});
  if (is_new) rate->second = measured_rate(type);
  return rate->second;
}

Sharding sharding_of(const RunConfig& config) {
  const std::string& name = config.run.shard;
  return name == "states"      ? Sharding::States
         : name == "gradients" ? Sharding::Gradients
         : name == "weights"   ? Sharding::Weights
                               : Sharding::None;
}

MixedPrecision make_precision(const RunConfig& config, torch::nn::Module& model, const Ranks& ranks) {
  const auto accumulation = config.train.accumulation > 1 ? Accumulation::Fp32 : Accumulation::None;
  const std::string& reduction = config.run.reduction;
  // Emulated precisions are what a rehearsal on a CPU is for; the plan says that they are no faster.
  return {precision_of(config),
          model,
          {.autocast = {.allow_emulated = true},
           .accumulation = accumulation,
           .ranks = ranks,
           .reduction = {.type = reduction == "bf16"   ? at::kBFloat16
                                 : reduction == "fp16" ? at::kHalf
                                                       : at::kFloat,
                         .canonical_batches = takes_whole_batches(config) ? config.train.accumulation : 0},
           .sharding = sharding_of(config),
           .gather = config.run.gather == "fp8" ? Gather::Fp8 : Gather::Own}};
}

/// Numbers of its own for a part of a step, a rank's or a micro-batch's: the same whoever stopped and resumed
/// before.
void seed_part(const RunConfig& config, int64_t step, int64_t number) {
  uint64_t seed = static_cast<uint64_t>(config.train.seed);
  for (const int64_t part : {step, number})
    seed = (seed ^ static_cast<uint64_t>(part + 1)) * 0x9e3779b97f4a7c15 + (seed >> 29);
  at::manual_seed(seed);
}

/// LibTorch's own statistics of a device's memory; none where it keeps none.
c10::DeviceAllocator* counting_allocator(at::Device device) {
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  return allocator && allocator->initialized() ? allocator : nullptr;
}

void reset_peak(at::Device device) {
  reset_memory_peak();
  if (device.is_cpu()) return;
  if (auto* allocator = counting_allocator(device)) allocator->resetPeakStats(device.index());
}

std::optional<MemoryRecord> memory_on(at::Device device) {
  auto* allocator = counting_allocator(device);
  if (!allocator) return std::nullopt;
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto bytes = allocator->getDeviceStats(device.index()).allocated_bytes[kAll];
  return MemoryRecord{.live_bytes = bytes.current, .peak_bytes = bytes.peak};
}

std::optional<MemoryRecord> memory_of_step(at::Device device) {
  if (!device.is_cpu()) return memory_on(device);
  if (!cpu_allocator_installed()) return std::nullopt;
  const MemoryReport report = memory_report();
  MemoryRecord record{.live_bytes = static_cast<int64_t>(report.live.total),
                      .peak_bytes = static_cast<int64_t>(report.at_peak.total)};
  for (size_t i = 0; i < kMemoryClassCount; ++i) {
    const auto which = static_cast<MemoryClass>(i);
    record.classes.push_back({name_of(which), static_cast<int64_t>(report.live[which]),
                              static_cast<int64_t>(report.class_peaks[which])});
  }
  return record;
}

/// The task with its model on the device of the configuration; of several ranks of a host each has its own.
std::unique_ptr<Task> placed(const RunConfig& config, std::unique_ptr<Task> task, const Ranks& ranks) {
  const std::string& name = config.run.device;
  std::optional<at::Device> device;
  try {
    device.emplace(name);
    if (ranks.size() > 1 && !device->is_cpu() && !device->has_index())
      device.emplace(device->type(), static_cast<c10::DeviceIndex>(ranks.local_rank()));
    (void)at::empty({1}, at::TensorOptions(*device));
  } catch (const std::exception& error) {
    const std::string_view why = error.what();
    detail::throw_error(detail::concat(
        "run.device is '", name, "', and LibTorch has no such device here: ", why.substr(0, why.find('\n')),
        " `halfstep env` lists what there is."));
  }
  if (!device->is_cpu()) task->model().to(*device);
  return task;
}

ShadowOptions shadow_options(RunConfig config, const TrainerShadow& shadow) {
  ShadowOptions options{.every = shadow.every};
  for (const RunConfig::Precision& asked : shadow.precisions) {
    config.precision = asked;
    config.precision.keep_high.clear();  // what to keep high is what is asked
    config.precision.weights.reset();
    options.precisions.push_back({.name = asked.compute, .precision = precision_of(config)});
  }
  return options;
}

at::Device device_of(const MixedPrecision& precision) { return precision.params().front().working.device(); }

}  // namespace

Training::Training(const RunConfig& config, std::unique_ptr<Task> task, const Ranks& ranks,
                   const std::optional<TrainerShadow>& shadow)
    : config_(config),
      task_(placed(config, std::move(task), ranks)),
      precision_(make_precision(config, task_->model(), ranks)),
      optimizer_(precision_.params(), config),
      on_accelerator_(!kernels_serve(precision_.params().front().working)) {
  HALFSTEP_CHECK(!on_accelerator_ || !takes_whole_batches(config),
                 "run.reduction is canonical, and run.device ", config.run.device,
                 ": such sums are for the CPU so far. Use fp32.");
  if (config.watch.every > 0) probe_.emplace(precision_, ProbeOptions{.every = config.watch.every});
  if (shadow) {
    HALFSTEP_CHECK(!probe_, "TrainerOptions::shadow, and watch.every is ", config.watch.every,
                   ": only one of them can sample a run. Set watch.every = 0.");
    shadow_.emplace(precision_, shadow_options(config, *shadow));
  }
  // How fast an accelerator could be is not measured: its products would have to be waited for.
  const auto flops = task_->flops_per_batch();
  if (!flops || on_accelerator_) return;
  flops_per_step_ = *flops * static_cast<double>(config.train.accumulation) / ranks.size();
  machine_flops_ = product_rate(precision_.precision().compute);
}

int64_t Training::parameters() const {
  int64_t count = 0;
  for (const Param& param : precision_.params())
    count += param.is_part() ? c10::multiply_integers(param.whole_sizes) : param.working.numel();
  return count;
}

void Training::step(int64_t number, EventFile* histograms) {
  const int64_t batch_count = config_.train.accumulation;
  const auto batches = static_cast<double>(batch_count);
  const bool whole_batches = takes_whole_batches(config_);
  const RankShare mine =
      whole_batches ? ranks().share(batch_count) : RankShare{.first = 0, .count = batch_count};
  StepRecord record{.step = number, .items = task_->items_per_batch() * config_.train.accumulation};
  const at::Device device = device_of(precision_);
  reset_peak(device);
  PhaseClock clock;
  const auto beginning = beginning_if_traced();
  latest_step_ = number;
  if (probe_) probe_->set_step(number);
  if (shadow_) shadow_->set_step(number);
  if (ranks().size() > 1 && !whole_batches) seed_part(config_, number, ranks().rank());
  at::Tensor loss_there;  // summed where it is, if the host would have to wait for it
  const at::Tensor losses = at::zeros({batch_count}, at::kDouble);
  for (int64_t batch = 0; batch < batch_count; ++batch) {
    between_steps_ = false;  // before: a task that throws may have counted the batch
    task_->take_batch();
    clock.lap(record.phases.data);
    if (batch < mine.first || batch >= mine.first + mine.count) continue;
    if (whole_batches) seed_part(config_, number, batch);
    const at::Tensor loss = precision_.forward([&] { return task_->loss(); });
    if (on_accelerator_) {
      const at::Tensor part = loss.detach().to(at::kFloat) / batches;
      loss_there = loss_there.defined() ? loss_there + part : part;
    } else {
      losses.mutable_data_ptr<double>()[batch] = loss.item<double>();
    }
    clock.lap(record.phases.forward);
    precision_.backward(batches > 1 ? loss / batches : loss, {.last = batch + 1 == mine.first + mine.count});
    clock.lap(record.phases.backward);
  }
  if (whole_batches) seed_part(config_, number, batch_count);  // what follows, too, is the same on all
  // An accelerator would have to be waited for.
  if (ranks().size() > 1 && probe_ && probe_->looks_at(number) && !on_accelerator_)
    record.rank_losses = rank_losses(losses, mine);
  record.loss = mean_of(losses);
  precision_.close_sum();
  const GradSummary grads = precision_.inspect_grads();
  clock.lap(record.phases.inspect);
  const auto& clip_norm = config_.optimizer.clip_norm;
  // Where nobody reads them, they are not counted; on an accelerator they cannot be.
  const bool stalls = config_.log.every > 0 && number % config_.log.every == 0 && !on_accelerator_;
  const StepReport report =
      optimizer_.step(clip_norm ? grads.clipped_to(*clip_norm) : grads.unclipped(), {.stalls = stalls});
  clock.lap(record.phases.step);
  if (histograms != nullptr) write_histograms(*histograms, number);
  optimizer_.zero_grad();
  // Before anything is evaluated: a skipped step leaves its overflow in running statistics until then.
  try {
    precision_.advance(grads);
  } catch (const SkipLimitError& error) {
    skip_limit_.emplace(error);
  }
  if (const auto shares = precision_.take_quantised_shares()) {
    record.saturated_share = shares->saturated;
    record.vanished_share = shares->vanished;
    record.saturated_most = shares->most_saturated;
    record.vanished_most = shares->most_vanished;
  }
  if (beginning && grads.any()) {
    skips_in_a_row_ = grads.finite() ? 0 : skips_in_a_row_ + 1;
    // A loss scale that is too large now and then is as it should be. A loss that is not finite is looked at
    // even where the step was taken, with the weights that it left.
    const bool is_trouble =
        !std::isfinite(record.loss) ||
        (!grads.finite() && (!precision_.precision().loss_scaling || skips_in_a_row_ >= 3));
    if (is_trouble) trace(number, *beginning, grads);
  }
  between_steps_ = true;
  record.memory = memory_of_step(device);
  clock.lap(record.phases.other);
  taken_.push_back({.record = record, .report = report, .counts_stalls = stalls, .seconds = clock.seconds()});
  if (on_accelerator_) taken_.back().loss.emplace(std::vector<at::Tensor>{loss_there});
}

std::vector<ProbeRecord> Training::probes() {
  // All ranks look at the same steps; the others exchange nothing.
  if (!probe_ || !probe_->looks_at(latest_step_)) return {};
  return merged_over_ranks(probe_->take(), ranks(), is_sharded());
}

std::optional<Training::Beginning> Training::beginning_if_traced() const {
  constexpr int64_t kMostTraces = 8;  // of 2 ranks so many say whether one differs
  // On an accelerator a skip is known later; weights in parts are not there outside a step's own backward.
  if (!config_.watch.trace_on_skip || on_accelerator_ || gathers_weights() || traces_ >= kMostTraces)
    return std::nullopt;
  try {
    // A copy: a task may hand out the tensors that it goes on writing to.
    return Beginning{.task = on_host(task_->state_dict()),
                     .random = random_state(),
                     .loss_scale = precision_.loss_scale()};
  } catch (const std::exception&) {
    if (ranks().size() > 1) throw;  // the others would wait for this one
    return std::nullopt;            // a task whose state cannot be had is told when it is to be saved
  }
}

void Training::trace(int64_t step, const Beginning& beginning, const GradSummary& grads) {
  ++traces_;
  const Beginning after{.task = on_host(task_->state_dict()), .random = random_state()};
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& buffer : task_->model().buffers()) buffers.push_back(buffer.clone());
  task_->load_state_dict(beginning.task);
  load_random_state(beginning.random);
  const int64_t batch_count = config_.train.accumulation;
  const bool whole_batches = takes_whole_batches(config_);
  const RankShare mine =
      whole_batches ? ranks().share(batch_count) : RankShare{.first = 0, .count = batch_count};
  if (ranks().size() > 1 && !whole_batches) seed_part(config_, step, ranks().rank());
  Retrace found;
  std::optional<FailedSum> failed_sum;
  // No micro-batch's gradients were at fault, but what they were added up to.
  if (grads.any() && !grads.finite() && grads.micro_batch() < 0 && batch_count * ranks().size() > 1) {
    failed_sum.emplace(FailedSum{.parameter = grads.first_bad(),
                                 .micro_batches = mine.count,
                                 .type = precision_.reduction().type,
                                 .loss_scale = beginning.loss_scale});
    const auto named = task_->model().named_parameters();
    if (const at::Tensor* parameter = named.find(grads.first_bad())) found.sum.emplace(*parameter);
  }
  for (int64_t batch = 0; batch < batch_count; ++batch) {
    // With ranks all look at as many as the step had: they may exchange something in forward.
    if (found.culprit && ranks().size() == 1) break;
    try {
      task_->take_batch();
      if (batch >= mine.first && batch < mine.first + mine.count) {
        if (whole_batches) seed_part(config_, step, batch);
        look_again(beginning.loss_scale, found);
      }
    } catch (const std::exception&) {
      // The step itself was taken without trouble: looking at it again must not end the run.
      found.complete = false;
    }
    precision_.zero_grad();
  }
  task_->load_state_dict(after.task);
  load_random_state(after.random);
  (void)precision_.take_quantised_shares();  // of no step
  {
    const at::NoGradGuard no_grad;
    const auto live = task_->model().buffers();
    for (std::size_t i = 0; i < live.size(); ++i) live[i].copy_(buffers[i]);
  }
  if (auto culprit = agreed_culprit(ranks(), std::move(found), failed_sum)) {
    culprit->step = step;
    culprits_.push_back(*std::move(culprit));
  }
}

void Training::look_again(double loss_scale, Retrace& found) {
  std::optional<OpTracer> tracer;
  if (!found.culprit) tracer.emplace(precision_.params());
  const auto batches = static_cast<double>(config_.train.accumulation);
  const at::Tensor loss = precision_.forward([&] { return task_->loss(); });
  // Not precision_.backward: the loss scale is the next step's by now, and this is no step.
  const at::Tensor root = backward_root(batches > 1 ? loss / batches : loss,
                                        precision_.precision().loss_scaling ? &loss_scale : nullptr,
                                        ranks().size(), precision_.reduction());
  if (tracer) tracer->watch_backward(root);
  root.backward();
  if (tracer) found.culprit = tracer->culprit(loss);
  if (found.sum) found.sum->add();
}

std::vector<double> Training::rank_losses(const at::Tensor& losses, RankShare mine) const {
  double mean = 0;
  for (int64_t batch = mine.first; batch < mine.first + mine.count; ++batch)
    mean += losses.const_data_ptr<double>()[batch] / static_cast<double>(mine.count);
  const at::Tensor all = ranks().gathered(at::full({1}, mean, at::kDouble));
  return {all.const_data_ptr<double>(), all.const_data_ptr<double>() + all.numel()};
}

/// Over a step's micro-batches and all ranks.
double Training::mean_of(const at::Tensor& losses) const {
  // Of whole batches each is one rank's, and zero on all others.
  if (takes_whole_batches(config_)) ranks().sum(losses);
  double mean = 0;
  for (int64_t batch = 0; batch < losses.numel(); ++batch)
    mean += losses.const_data_ptr<double>()[batch] / static_cast<double>(losses.numel());
  if (takes_whole_batches(config_) || ranks().size() == 1) return mean;
  const at::Tensor sum = at::full({1}, mean, at::kDouble);
  ranks().sum(sum);
  return sum.item<double>() / ranks().size();
}

/// Of all ranks' parts.
double Training::stalled_share(const StepReport& report) const {
  UpdateStall stall = report.stall();
  if (precision_.sharding() == Sharding::None) return stall.lost_fraction();
  const at::Tensor counts = at::zeros({2}, at::kLong);
  auto* const numbers = counts.mutable_data_ptr<int64_t>();
  numbers[0] = stall.updates, numbers[1] = stall.lost;
  ranks().sum(counts);
  stall.updates = numbers[0], stall.lost = numbers[1];
  return stall.lost_fraction();
}

void Training::write_model(const std::filesystem::path& folder) {
  const bool is_first = ranks().rank() == 0;
  if (precision_.sharding() == Sharding::Weights) {
    // The run is over: rank 0 has all weights from here on, and no rank trains them any more.
    const at::NoGradGuard no_grad;
    std::vector<std::pair<at::Tensor, at::Tensor>> whole;
    precision_.forward([&] {
      for (const at::Tensor& weight : task_->model().parameters()) {
        at::Tensor values = weight.clone();
        if (is_first) whole.emplace_back(weight, std::move(values));
      }
      return 0;
    });
    for (auto& [weight, values] : whole) weight.set_data(values);
  }
  if (is_first) task_->write_model(folder);
}

std::vector<StepRecord> Training::records() {
  std::vector<Taken> all = std::exchange(taken_, {});  // each is told once, even if one throws
  if (all.empty()) return {};
  PhaseClock clock;
  if (all.back().loss) (void)all.back().loss->wait_for(0);  // with it everything before it is there
  double seconds = 0, items = 0;
  for (Taken& taken : all) {
    tell(taken);
    seconds += taken.seconds;
    items += static_cast<double>(taken.record.items);
  }
  if (on_accelerator_) {
    clock.lap(all.back().record.phases.other);
    seconds += clock.seconds();
  }
  std::vector<StepRecord> records;
  for (Taken& taken : all) {
    taken.record.items_per_second = items / seconds;
    records.push_back(std::move(taken.record));
  }
  if (flops_per_step_) {
    // Measured on a machine that was busy then, the peak may have come out too low.
    machine_flops_ = std::max(machine_flops_, *flops_per_step_ / seconds);
    records.back().share_of_peak = *flops_per_step_ / seconds / machine_flops_;
  }
  return records;
}

void Training::tell(Taken& taken) {
  auto& [record, report, loss, counts_stalls, seconds] = taken;
  if (loss) record.loss = loss->wait_for(0).item<double>();
  record.lr = optimizer_.lr_at(optimizer_steps_);
  record.grad_norm = report.grad_norm();
  if (precision_.precision().loss_scaling) record.loss_scale = report.loss_scale();
  record.skipped = !report.stepped();
  if (record.skipped) {
    record.why = report.sentence();
    record.parameter = report.parameter();
  } else {
    ++optimizer_steps_;
    if (counts_stalls) {
      record.stalled_share = stalled_share(report);
      record.stalled_most = report.stall().parameter;
    }
  }
  watch_.see(record.step, record.loss, record.skipped);
  if (const auto why = watch_.diverged(); why && !divergence_)
    divergence_.emplace(Divergence{.why = *why, .since = watch_.above_since()});
}

EvaluationRecord Training::evaluate(int64_t step) {
  PhaseClock clock;
  const Score score = task_->evaluate(precision_);
  progress_.evaluated_step = step;
  progress_.evaluated_loss = score.loss;
  progress_.without_gain = score.loss < progress_.best_loss ? 0 : progress_.without_gain + 1;
  if (score.loss < progress_.best_loss) progress_.best_loss = score.loss;
  return {.step = step,
          .loss = score.loss,
          .accuracy = score.accuracy,
          .items = score.count,
          .duration_seconds = clock.seconds()};
}

std::optional<SampleRecord> Training::sample(int64_t step) {
  // The same draws at every step, so that two samples differ by what was learnt between them.
  const auto sample = task_->sample(precision_, static_cast<uint64_t>(config_.train.seed));
  if (!sample) return std::nullopt;
  return SampleRecord{.step = step, .prompt = sample->prompt, .text = sample->text};
}

void Training::write_histograms(EventFile& events, int64_t step) const {
  const at::NoGradGuard no_grad;
  const auto write = [&](const std::string& tag, const at::Tensor& tensor, double scaled_by = 1) {
    at::Tensor values = tensor.cpu().to(at::kFloat).contiguous();
    if (scaled_by != 1) values = values / scaled_by;
    events.histogram(tag, {values.const_data_ptr<float>(), static_cast<size_t>(values.numel())}, step);
  };
  for (const Param& param : precision_.params()) {
    write("weights/" + param.name, param.working);
    if (!param.working.grad().defined()) continue;
    // As the optimizer sees them: backward left the loss scale of this step in them.
    write("gradients/" + param.name, param.working.grad(), precision_.loss_scale());
  }
}

bool Training::on_trial(int64_t step) const {
  return progress_.rollbacks > 0 && step <= progress_.went_back_to + int64_t{DivergenceWatch::kLong};
}

std::map<std::string, StateDict> Training::live_parts() const {
  if (precision_.sharding() == Sharding::None) return {};
  return {{"precision", precision_.state_dict()}, {"optimizer", optimizer_.state_dict()}};
}

Checkpoint Training::checkpoint(int64_t step) const {
  StateDict progress;
  progress.set("rollbacks", progress_.rollbacks);
  progress.set("went_back_to", progress_.went_back_to);
  progress.set("without_gain", progress_.without_gain);
  progress.set("best_loss", progress_.best_loss);
  progress.set("evaluated_step", progress_.evaluated_step);
  Checkpoint made{.step = step,
                  .parts = {{"precision", precision_.state_dict()},
                            {"optimizer", optimizer_.state_dict()},
                            {"random", random_state()},
                            {"task", task_->state_dict()},
                            {"watch", watch_.state_dict()},
                            {"progress", progress}},
                  .healthy = !watch_.in_trouble() && !on_trial(step)};
  if (progress_.evaluated_step == step && !std::isnan(progress_.evaluated_loss))
    made.score = progress_.evaluated_loss;
  return made;
}

void Training::restore(const Checkpoint& checkpoint) {
  precision_.load_state_dict(checkpoint.part("precision"));
  // The saved rules come along with the scale; the configuration may ask for others now.
  if (const auto rules = precision_of(config_).loss_scaling) precision_.set_loss_scaling(*rules);
  optimizer_.load_state_dict(checkpoint.part("optimizer"));
  optimizer_steps_ = optimizer_.steps();
  taken_.clear();
  divergence_.reset();
  load_random_state(checkpoint.part("random"));
  task_->load_state_dict(checkpoint.part("task"));
  watch_.load_state_dict(checkpoint.part("watch"));
  const StateDict& progress = checkpoint.part("progress");
  std::vector<std::string_view> names = {"rollbacks", "went_back_to", "without_gain", "best_loss"};
  // Older checkpoints have none: their score tells, but not of a loss that was NaN.
  if (progress.contains("evaluated_step")) names.push_back("evaluated_step");
  progress.expect_exactly("progress", names);
  progress_ = {.rollbacks = progress.integer("rollbacks"),
               .went_back_to = progress.integer("went_back_to"),
               .without_gain = progress.integer("without_gain"),
               .best_loss = progress.real("best_loss")};
  if (progress.contains("evaluated_step")) progress_.evaluated_step = progress.integer("evaluated_step");
  if (checkpoint.score) progress_.evaluated_step = checkpoint.step;
  progress_.evaluated_loss = checkpoint.score.value_or(std::numeric_limits<double>::quiet_NaN());
  skip_limit_.reset();
  between_steps_ = true;
}

void Training::go_back(const Checkpoint& checkpoint) {
  const StateDict position = task_->state_dict();
  const StateDict random = random_state();  // a task may draw its batches from it
  const int64_t rollbacks = progress_.rollbacks;
  restore(checkpoint);
  task_->move_data_to(position);
  load_random_state(random);
  progress_.rollbacks = rollbacks + 1;
  progress_.went_back_to = checkpoint.step;
}

}  // namespace halfstep::train
