#include "usage/oracle.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>

namespace usage {

double rounding_unit(Compute compute) {
  return compute == Compute::Fp32 ? 0x1p-24 : compute == Compute::Bf16 ? 0x1p-8 : 0x1p-11;
}

double compression_unit(RegionKind kind) {
  switch (kind) {
    case RegionKind::CompressBf16:
      return 0x1p-8;
    case RegionKind::CompressE4M3:
      return 0x1p-4;
    case RegionKind::CompressE5M2:
      return 0x1p-3;
    default:
      return 0;
  }
}

namespace {

double compression_of_layer(const Program& program, int index) {
  double unit = 0;
  for (const Region& region : program.regions)
    if (region.first <= index && index <= region.last) unit = std::max(unit, compression_unit(region.kind));
  return unit;
}

bool any_compression(const Program& program) {
  for (const Region& region : program.regions)
    if (compression_unit(region.kind) > 0) return true;
  return false;
}

at::Tensor noise_like(const at::Tensor& x, double unit, const at::Generator& random) {
  return at::empty_like(x).uniform_(1 - unit, 1 + unit, random);
}

int layer_of(const std::string& name) { return name.starts_with("layer") ? std::stoi(name.substr(5)) : -1; }

}  // namespace

GradientOracle::GradientOracle(const Program& program)
    : program_(program),
      model_(program),
      random_(at::detail::createCPUGenerator(program.seed ^ 0xABCDEF)),
      quant_(program.recipe, at::detail::createCPUGenerator(program.seed ^ 0x4EC1)),
      unit_(rounding_unit(program.compute)) {
  // Module::to would turn counters into FP64 too.
  parameters_ = unique_parameters(model_);
  buffers_ = unique_buffers(model_);
  compute_in(at::kDouble);
  sensitivity_.assign(parameters_.size(), 0);
  compression_.assign(parameters_.size(), 0);
  buffer_sensitivity_.assign(buffers_.size(), 0);
}

void GradientOracle::compute_in(at::ScalarType type) {
  type_ = type;
  for (auto* tensors : {&parameters_, &buffers_})
    for (auto& [name, tensor] : *tensors)
      if (tensor.is_floating_point()) {
        tensor.mutable_grad() = at::Tensor();
        tensor.set_data(tensor.detach().to(type));
      }
}

void GradientOracle::load(const Snapshot& present) {
  torch::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].second.copy_(present.full[i]);
    parameters_[i].second.requires_grad_(present.trained[i]);
    parameters_[i].second.mutable_grad() = at::Tensor();
  }
  for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].second.copy_(present.buffers[i]);
}

at::Tensor GradientOracle::perturb(const at::Tensor& x, bool perturbed) {
  if (!perturbed) {
    largest_activation_ = std::max(largest_activation_, x.detach().abs().max().item<double>());
    if (x.requires_grad())
      x.register_hook(
          [this](const at::Tensor& grad) { largest_ = std::max(largest_, grad.abs().max().item<double>()); });
    return x;
  }
  const at::Tensor y = x * noise_like(x, unit_, random_);
  if (y.requires_grad())
    y.register_hook([this](const at::Tensor& grad) { return grad * noise_like(grad, unit_, random_); });
  return y;
}

/// A norm divides by the deviation of its input, which is saved as it is. The input that is saved beside it
/// is off by `unit` of its size: where the deviation is smaller than that, the derivative is noise.
void GradientOracle::note_norm_error(int layer, const at::Tensor& x) {
  const double unit = compression_of_layer(program_, layer);
  if (unit == 0) return;
  std::vector<int64_t> over;  // of batch, length and width; of a group, one channel: no larger a deviation
  switch (program_.layers[static_cast<size_t>(layer)].kind) {
    case LayerKind::LayerNorm:
      over = {2};
      break;
    case LayerKind::GroupNorm:
    case LayerKind::InstanceNorm:
      over = {1};
      break;
    case LayerKind::BatchNorm1d:
    case LayerKind::BatchNorm2d:
      over = {0, 1};
      break;
    default:
      return;
  }
  const at::Tensor deviation = (x.var(over, /*unbiased=*/false) + 1e-5).sqrt();
  norm_error_ = std::max(norm_error_, unit * (x.abs().amax(over) / deviation).max().item<double>());
}

at::Tensor GradientOracle::forward(const Batch& batch, bool perturbed, bool compressed) {
  model_.begin(batch);
  for (const auto& layer : model_.layers)
    layer->between = [this, perturbed](const at::Tensor& result) { return perturb(result, perturbed); };
  if (program_.recipe != Recipe::None)
    for (size_t i = 0; i < model_.layers.size(); ++i)
      model_.layers[i]->linear = [this, i, perturbed, compressed](
                                     const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
        return quant_.linear(static_cast<int>(i), x, weight, bias, /*noted=*/!perturbed && !compressed,
                             perturbed ? unit_ : 0);
      };
  at::Tensor x = perturb(model_.embed(batch), perturbed);
  for (int i = 0; i < static_cast<int>(program_.layers.size()); ++i) {
    const double unit = compressed ? compression_of_layer(program_, i) : 0;
    if (unit > 0) {
      // Forward as it is; the derivative at a point that is off by what the compression may do. A norm's
      // statistics are saved beside its compressed input and do not follow it, so what cancels here, as the
      // gradient along the input, does not cancel there: the gradient that leaves is off as well. And the one
      // that enters: what is saved inside, as attention's weights, which then no longer add to 1, multiplies
      // it.
      const at::Tensor near = x * noise_like(x, unit, random_);
      const at::Tensor off = model_.layer(i, near);
      for (const at::Tensor& passed : {near, off})
        if (passed.requires_grad())
          passed.register_hook(
              [this, unit](const at::Tensor& grad) { return grad * noise_like(grad, unit, random_); });
      at::NoGradGuard no_grad_for_value;
      const at::Tensor value = model_.layer(i, x) - off;
      at::AutoGradMode grad(true);
      x = off + value;
    } else {
      if (!perturbed) note_norm_error(i, x);
      x = model_.layer(i, x);
    }
    x = perturb(x, perturbed);
  }
  return perturb(model_.head(x), perturbed);
}

Expected GradientOracle::gradients(const Snapshot& present, const std::vector<MicroBatch>& micro_batches,
                                   int samples) {
  Expected expected;
  const size_t count = parameters_.size();
  expected.sensitivity.assign(count, 0);
  expected.compression.assign(count, 0);
  expected.magnitude.assign(count, 0);
  expected.engine_error.assign(count, 0);
  expected.buffer_engine_error.assign(buffers_.size(), 0);
  const double share = 1.0 / static_cast<double>(micro_batches.size());

  bool notes_result = true;  // the first run; the others are only compared with it
  const auto run = [&](bool perturbed, bool compressed) {
    load(present);
    if (perturbed) {
      torch::NoGradGuard no_grad;
      for (auto& [name, parameter] : parameters_) parameter.mul_(noise_like(parameter, unit_, random_));
    }
    model_.train();
    std::vector<at::Tensor> sums_before(count);
    for (const MicroBatch& micro : micro_batches) {
      Batch batch = micro.batch;
      if (!program_.tokens) batch.input = batch.input.to(type_);
      if (batch.target.is_floating_point()) batch.target = batch.target.to(type_);
      model_.replay_masks(micro.masks);
      std::vector<at::Tensor> before;
      for (const auto& [name, buffer] : buffers_) before.push_back(buffer.clone());
      const at::Tensor loss = model_.loss(forward(batch, perturbed, compressed), batch, false);
      (loss * micro.loss_factor * share).backward();
      if (!notes_result) continue;
      for (size_t i = 0; i < count; ++i) {
        const at::Tensor& sum = parameters_[i].second.grad();
        if (!sum.defined()) continue;
        expected.magnitude[i] +=
            (sums_before[i].defined() ? sum - sums_before[i] : sum).norm().item<double>();
        sums_before[i] = sum.clone();
      }
      // Statistics after k runs of the same forward: each moves them by the same share towards those of the
      // batch, s = old + (new - old) / momentum; LibTorch's momentum is 0.1.
      for (size_t b = 0; b < buffers_.size(); ++b) {
        auto& by_runs = expected.buffers[b];
        const at::Tensor& after = buffers_[b].second;
        for (size_t runs = 1; runs <= by_runs.size(); ++runs) {
          if (!after.is_floating_point()) {
            by_runs[runs - 1] = by_runs[runs - 1] + (after - before[b]) * static_cast<int64_t>(runs);
            continue;
          }
          const at::Tensor batch_statistic = before[b] + (after - before[b]) / 0.1;
          by_runs[runs - 1] = batch_statistic + (by_runs[runs - 1] - batch_statistic) *
                                                    std::pow(0.9, static_cast<double>(runs));
        }
      }
    }
    std::vector<at::Tensor> grads;
    for (auto& [name, parameter] : parameters_) grads.push_back(parameter.grad());
    return grads;
  };

  for (const auto& [name, buffer] : buffers_) {
    const int depth = checkpoint_depth(program_, layer_of(name));
    const at::Tensor start = present.buffers[expected.buffers.size()];
    expected.buffers.emplace_back(size_t{1} << depth,
                                  start.is_floating_point() ? start.to(at::kDouble) : start.clone());
  }
  largest_ = largest_activation_ = norm_error_ = 0;
  expected.grads = run(false, false);
  notes_result = false;
  expected.largest = largest_;
  expected.largest_activation = largest_activation_;
  expected.norm_error = norm_error_;
  for (const at::Tensor& grad : expected.grads)
    if (grad.defined()) {
      expected.finite = expected.finite && grad.isfinite().all().item<bool>();
      expected.largest = std::max(expected.largest, grad.abs().max().item<double>());
    }
  for (const auto& [name, parameter] : parameters_) expected.weights.push_back(parameter.detach().clone());
  if (!expected.finite) return expected;

  // Each in proportion to the gradient, and the largest of all steps so far. A gradient that cancels to
  // exactly 0, as that of a bias before a norm that takes the mean away, has no proportion: there, the
  // samples' own size.
  const auto norm_of = [&](size_t i) {
    return expected.grads[i].defined() ? expected.grads[i].norm().item<double>() : 0;
  };
  const auto widen = [&](const std::vector<at::Tensor>& grads, std::vector<double>& relative,
                         std::vector<double>& absolute) {
    for (size_t i = 0; i < count; ++i) {
      if (!grads[i].defined() || !expected.grads[i].defined()) continue;
      const double norm = norm_of(i), off = (grads[i] - expected.grads[i]).norm().item<double>();
      double& widest = norm > 0 ? relative[i] : absolute[i];
      widest = std::max(widest, norm > 0 ? off / norm : off);
    }
  };
  for (int i = 0; i < samples; ++i) {
    widen(run(true, false), sensitivity_, expected.sensitivity);
    for (size_t b = 0; b < buffers_.size(); ++b)
      if (buffers_[b].second.is_floating_point())
        buffer_sensitivity_[b] = std::max(
            buffer_sensitivity_[b], (buffers_[b].second - expected.buffers[b][0]).norm().item<double>());
    if (any_compression(program_)) widen(run(false, true), compression_, expected.compression);
  }
  for (size_t i = 0; i < count; ++i) {
    expected.sensitivity[i] += sensitivity_[i] * norm_of(i);
    expected.compression[i] += compression_[i] * norm_of(i);
  }
  expected.buffer_sensitivity = buffer_sensitivity_;

  if (program_.compute != Compute::Fp32 || samples < 2) return expected;
  compute_in(at::kFloat);
  const std::vector<at::Tensor> grads = run(false, false);
  for (size_t i = 0; i < count; ++i)
    if (grads[i].defined() && expected.grads[i].defined())
      expected.engine_error[i] = (grads[i].to(at::kDouble) - expected.grads[i]).norm().item<double>();
  for (size_t b = 0; b < buffers_.size(); ++b)
    if (buffers_[b].second.is_floating_point())
      expected.buffer_engine_error[b] =
          (buffers_[b].second.to(at::kDouble) - expected.buffers[b][0]).norm().item<double>();
  compute_in(at::kDouble);
  return expected;
}

GradientOracle::Logits GradientOracle::evaluate(const Snapshot& present, const Batch& given, int samples) {
  torch::NoGradGuard no_grad;
  Batch batch = given;
  if (!program_.tokens) batch.input = batch.input.to(at::kDouble);
  load(present);
  model_.eval();
  model_.replay_masks({});
  largest_activation_ = 0;
  Logits logits{.values = forward(batch, false, false)};
  logits.largest_activation = largest_activation_;
  for (int i = 0; i < samples; ++i) {
    load(present);
    for (auto& [name, parameter] : parameters_) parameter.mul_(noise_like(parameter, unit_, random_));
    logits.sensitivity =
        std::max(logits.sensitivity, (forward(batch, true, false) - logits.values).norm().item<double>());
  }
  if (program_.compute != Compute::Fp32 || samples < 2) return logits;
  compute_in(at::kFloat);
  load(present);
  if (!program_.tokens) batch.input = batch.input.to(type_);
  logits.engine_error = (forward(batch, false, false).to(at::kDouble) - logits.values).norm().item<double>();
  compute_in(at::kDouble);
  return logits;
}

double learning_rate(const Program& program, size_t index, size_t parameter_count) {
  const double lr = program.optimizer == Optimizer::AdamW ? 0.01 : 0.1;
  return program.two_groups && index >= parameter_count / 2 ? lr / 4 : lr;
}

double weight_decay(const Program& program) { return program.weight_decay ? 0.1 : 0; }

UpdateOracle::UpdateOracle(const Program& program, size_t parameter_count)
    : program_(program), states_(parameter_count) {}

void UpdateOracle::adopt(size_t parameter, const at::Tensor& full) {
  State& state = states_[parameter];
  state.weight = full.to(at::kDouble);
  state.bound = at::zeros_like(state.weight);
  if (state.first.defined()) return;
  for (at::Tensor* tensor : {&state.first, &state.first_bound, &state.second, &state.second_bound})
    *tensor = at::zeros_like(state.weight);
}

void UpdateOracle::step(const std::vector<at::Tensor>& grads, double multiplier) {
  for (size_t i = 0; i < states_.size(); ++i) {
    if (!grads[i].defined()) continue;
    ++states_[i].steps;
    const at::Tensor grad = grads[i].to(at::kDouble) * multiplier;
    const double lr = learning_rate(program_, i, states_.size());
    program_.optimizer == Optimizer::AdamW ? adamw(states_[i], grad, lr) : sgd(states_[i], grad, lr);
  }
}

namespace {

// Halfstep computes a step in FP32. A few operations, each within 2^-24 of its result, on constants that are
// FP32 themselves: 2^-21 covers eight of them.
constexpr double kStepUnit = 0x1p-21;

/// The largest magnitude in each block of 256 elements in memory, for each element.
at::Tensor block_largest(const at::Tensor& values) {
  const at::Tensor flat = values.abs().flatten();
  const int64_t count = flat.numel(), blocks = (count + 255) / 256;
  const at::Tensor padded = at::constant_pad_nd(flat, {0, blocks * 256 - count});
  return std::get<0>(padded.view({blocks, 256}).max(1, true))
      .expand({blocks, 256})
      .flatten()
      .slice(0, 0, count)
      .view(values.sizes());
}

/// How far a moment that was stored may be from what was computed. BF16: rounded up or down, one unit of
/// 2^-7, or of 2^-133 below the normal numbers. Eight bits: 3 bits of significand in the first and 4 in the
/// second; below the codes' normal range a unit of 2^-17 or 2^-18 of the block's scale, which is at most
/// twice the block's largest.
at::Tensor moment_rounding(Moments storage, const at::Tensor& moment, bool second) {
  switch (storage) {
    case Moments::Fp32:
      return at::zeros_like(moment);
    case Moments::Bf16:
      return moment.abs() * 0x1p-7 + 0x1p-133;
    case Moments::Blockwise8:
      return at::maximum(moment.abs() * (second ? 0x1p-4 : 0x1p-3),
                         block_largest(moment) * (second ? 0x1p-17 : 0x1p-16));
  }
  return {};
}

}  // namespace

void UpdateOracle::store(State& state, const at::Tensor& next, const at::Tensor& error) {
  const double unit = rounding_unit(program_.compute);
  // Below the normal range numbers go in steps: of 2^-24 in FP16, 2^-133 in BF16, 2^-149 in FP32. A weight
  // that was zeroed under a split master is such a number; a step makes at most eight FP32 operations with
  // it.
  const double smallest = program_.compute == Compute::Fp16 ? 0x1p-24 : 0x1p-133;
  double relative = 0, absolute = 8 * 0x1p-149;
  switch (program_.weights) {
    case Weights::Fp32:
    case Weights::Fp32Master:
    case Weights::SplitMaster:
      relative = 0x1p-23;
      break;
    case Weights::Kahan:  // a compensation of at most a unit, itself within a unit of its own
      relative = 4 * unit * unit;
      absolute = smallest;
      break;
    case Weights::Stochastic:  // one unit up or down: twice half a unit
      relative = 2 * unit;
      absolute = smallest;
      break;
    case Weights::Nearest:
      relative = unit;
      absolute = smallest;
      break;
  }
  // The weight that is kept, hence rounded, is itself off by the bound so far.
  const at::Tensor bound = state.bound + error;
  state.bound = bound * (1 + relative) + next.abs() * relative + absolute;
  state.last_update = next - state.weight;
  state.weight = next;
}

namespace {

/// With Kahan's compensation the decay is of the working copy, which is half a unit off.
double decayed_unit(const Program& program) {
  return program.weights == Weights::Kahan ? 2 * rounding_unit(program.compute) : 0;
}

}  // namespace

void UpdateOracle::adamw(State& state, const at::Tensor& grad, double lr) {
  constexpr double beta1 = 0.9, beta2 = 0.99, eps = 1e-8;
  const at::Tensor grad_bound = grad.abs() * kStepUnit;
  const at::Tensor first = state.first * beta1 + grad * (1 - beta1);
  const at::Tensor first_bound = state.first_bound * beta1 + grad_bound * (1 - beta1) +
                                 (state.first.abs() * beta1 + grad.abs() * (1 - beta1)) * kStepUnit;
  const at::Tensor second = state.second * beta2 + grad * grad * (1 - beta2);
  const at::Tensor second_bound =
      state.second_bound * beta2 + grad.abs() * grad_bound * (2 * (1 - beta2)) + second * kStepUnit;
  // This step's share of the second moment is not rounded before it is used.
  const at::Tensor second_low =
      at::maximum(second - second_bound, grad * grad * ((1 - beta2) * (1 - 4 * kStepUnit)));

  const double t = static_cast<double>(state.steps);
  const double rate = lr / (1 - std::pow(beta1, t)), correction = std::sqrt(1 - std::pow(beta2, t));
  const auto denominator = [&](const at::Tensor& moment) { return moment.sqrt() / correction + eps; };
  const at::Tensor magnitude = first.abs() / denominator(second);
  const at::Tensor most = (first.abs() + first_bound) / denominator(second_low);
  const at::Tensor least = (first.abs() - first_bound) / denominator(second + second_bound);
  const at::Tensor off = at::maximum(most - magnitude, magnitude - least);
  const at::Tensor update = first / denominator(second) * rate;
  const double decay = lr * weight_decay(program_);
  store(state, state.weight * (1 - decay) - update,
        off * rate + (update.abs() + state.weight.abs() * decay) * kStepUnit +
            state.weight.abs() * (0x1p-24 + decay * decayed_unit(program_)));
  state.first = first;
  state.first_bound = first_bound + moment_rounding(program_.moments, first, false);
  state.second = second;
  state.second_bound = second_bound + moment_rounding(program_.moments, second, true);
}

void UpdateOracle::sgd(State& state, const at::Tensor& given, double lr) {
  const double momentum = program_.optimizer == Optimizer::Sgd ? 0 : 0.9;
  const double decay = weight_decay(program_);
  const at::Tensor grad = given + state.weight * decay;
  // The decayed weight is the kept one, off by its bound.
  const at::Tensor grad_bound = (given.abs() + state.weight.abs() * decay) * kStepUnit +
                                (state.bound + state.weight.abs() * decayed_unit(program_)) * decay;
  at::Tensor direction = grad, bound = grad_bound;
  if (momentum > 0) {
    const bool begun = state.steps > 1;
    const at::Tensor moment = begun ? state.first * momentum + grad : grad;
    const at::Tensor moment_bound = begun ? state.first_bound * momentum + grad_bound +
                                                (state.first.abs() * momentum + grad.abs()) * kStepUnit
                                          : grad_bound;
    const bool nesterov = program_.optimizer == Optimizer::SgdNesterov;
    direction = nesterov ? grad + moment * momentum : moment;
    bound = nesterov ? grad_bound + moment_bound * momentum : moment_bound;
    state.first = moment;
    state.first_bound = moment_bound + moment_rounding(program_.moments, moment, false);
  }
  store(state, state.weight - direction * lr,
        (bound + direction.abs() * kStepUnit) * lr + state.weight.abs() * 0x1p-24);
}

void ScaleRule::advance(bool finite) {
  if (!scaled) return;
  if (!finite) {
    scale /= 2;
    clean = 0;
  } else if (++clean == growth_interval) {
    scale *= 2;
    clean = 0;
  }
}

}  // namespace usage
