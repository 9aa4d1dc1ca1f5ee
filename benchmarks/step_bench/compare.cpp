#include "compare.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <halfstep/error.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <functional>

#include "support/bandwidth.h"
#include "support/gpt.h"
#include "support/statistics.h"
#include "tails.h"

namespace bench {
namespace {

constexpr double kMaxNorm = 1.0;

// Bytes that a tail must move for one parameter on a split master with FP32 moments: gradients read by the
// inspection and by the update; working copy, remainder and two moments read and written.
constexpr double split_master_bytes(double grad_bytes) { return 2 * grad_bytes + 2 * (2 + 2 + 4 + 4); }

enum Timed {
  SplitFp32Grads,
  SplitBf16Grads,
  MasterFp32Grads,
  MasterBf16Grads,
  EngineFp32Grads,
  EngineBf16Grads,
  TorchOptim,
  TorchOptimStepAlone,
  MemoryPass,
  kTimedCount,
};

/// Everything that is compared, on copies of the same weights.
struct Tails {
  Tails(const Tensors& weights, const TailSettings& settings)
      : split(weights, halfstep::WeightStorage::SplitMaster, settings),
        fp32_master(weights, halfstep::WeightStorage::Fp32Master, settings),
        engine(weights, settings),
        torch_optim(weights, settings) {
    for (const auto& weight : weights) {
      // Large beside max_norm, so that clipping has something to do.
      fp32_grads.push_back(at::randn_like(weight).mul_(1e-2 * settings.loss_scale));
      bf16_grads.push_back(fp32_grads.back().to(at::kBFloat16));
    }
  }

  HalfstepTail split, fp32_master;
  EngineTail engine;
  TorchOptimTail torch_optim;
  Tensors fp32_grads, bf16_grads;
};

/// The largest |a - b|, over what rounding alone may make of it.
double worst_difference(const Tensors& a, const Tensors& b, double lr, int steps) {
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    // A step rounds the weight once (1 ulp between two that round differently, at most 2^-23 of the weight),
    // and its update, which is below 4 lr for these few steps, passes through about 16 roundings of 2^-24.
    const at::Tensor allowed = (b[i].detach().abs() * 0x1p-23 + lr * 4 * 16 * 0x1p-24) * steps;
    worst = std::max(worst, ((a[i] - b[i]).abs_() / allowed).max().item<double>());
  }
  return worst;
}

void check_agreement(double worst, const std::string& who) {
  HALFSTEP_CHECK(worst <= 1, "step_bench: weights of ", who, " are ", worst,
                 " times as far apart as rounding explains; nothing was timed.");
}

/// No farther from the master than the nearest BF16 value; which of two equally near ones is the storage's
/// choice.
void check_working_copy(const halfstep::Param& param) {
  const at::Tensor master = halfstep::full_precision(param);
  const at::Tensor nearest = (master.to(at::kBFloat16).to(at::kFloat) - master).abs_();
  const at::Tensor kept = (param.working.detach().to(at::kFloat) - master).abs_();
  HALFSTEP_CHECK(at::equal(nearest, kept), "step_bench: the working copy of ", param.name,
                 " is not its master, rounded; nothing was timed.");
}

bool workload_is_on_cpu(const Tails& tails) { return tails.fp32_grads[0].is_cpu(); }

double fp64_norm(const Tensors& grads, double loss_scale) {
  double squares = 0;
  for (const auto& grad : grads) {
    const double norm = at::linalg_vector_norm(grad, 2, {}, false, at::kDouble).item<double>() / loss_scale;
    squares += norm * norm;
  }
  return std::sqrt(squares);
}

/// Steps all tails with FP32, then all that can with BF16 gradients, and compares weights, working copies and
/// norms.
///
/// Without clipping: LibTorch 2.13 sums the squares of an FP32 tensor in FP32, and on GPT-2's embedding its
/// norm is 0.2% short, so that clipped updates differ by as much. The norms are compared by themselves, with
/// FP64.
void verify(Tails& tails, const TailSettings& settings, Comparison& found) {
  constexpr std::array<double, 3> kGradFactors = {1, -0.5, 4};  // exact in BF16
  constexpr double kUnclipped = 1e30;
  const double lr = settings.adamw.lr;
  int steps = 0;
  tails.split.use_grads(tails.fp32_grads);
  tails.fp32_master.use_grads(tails.fp32_grads);
  for (const double factor : kGradFactors) {
    at::_foreach_mul_(tails.fp32_grads, factor);
    tails.engine.load_fp32_grads(tails.fp32_grads);
    tails.torch_optim.load_grads(tails.fp32_grads);
    tails.split.step(kUnclipped);
    tails.fp32_master.step(kUnclipped);
    tails.engine.step_from_fp32(kUnclipped);
    tails.torch_optim.step(kUnclipped);
    ++steps;
  }
  const double norm = fp64_norm(tails.fp32_grads, settings.loss_scale);
  found.halfstep_norm_error = tails.split.norm() / norm - 1;
  found.engine_norm_error = tails.engine.last_norm() / norm - 1;
  // In FP64 on a CPU. On any other device LibTorch sums in FP32, in an order of its own: no more can be asked
  // than that the norm is no worse than the engine's, whose operation it is.
  const double allowed =
      workload_is_on_cpu(tails) ? 1e-9 : std::max(0x1p-20, std::abs(found.engine_norm_error));
  HALFSTEP_CHECK(std::abs(found.halfstep_norm_error) <= allowed, "step_bench: Halfstep's norm is off by ",
                 found.halfstep_norm_error, " of the FP64 one; nothing was timed.");
  found.worst_of_allowed =
      worst_difference(tails.torch_optim.full_precision(), tails.engine.full_precision(), lr, steps);
  check_agreement(found.worst_of_allowed, "torch::optim and the engine's fused AdamW");

  tails.split.use_grads(tails.bf16_grads);
  tails.fp32_master.use_grads(tails.bf16_grads);
  for (const double factor : kGradFactors) {
    at::_foreach_mul_(tails.bf16_grads, factor);
    tails.split.step(kUnclipped);
    tails.fp32_master.step(kUnclipped);
    tails.engine.step_from_bf16(tails.bf16_grads, kUnclipped);
    ++steps;
  }
  for (HalfstepTail* tail : {&tails.split, &tails.fp32_master}) {
    const double difference =
        worst_difference(tail->full_precision(), tails.engine.full_precision(), lr, steps);
    check_agreement(difference, "Halfstep and the engine");
    found.worst_of_allowed = std::max(found.worst_of_allowed, difference);
    for (const auto& param : tail->params()) check_working_copy(param);
  }
}

/// Waits until the device has computed what was asked of it.
void finish(at::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

using Samples = std::array<std::vector<double>, kTimedCount>;  // milliseconds a step

Samples time_tails(Tails& tails, ReadModifyWrite& memory_pass, const Workload& workload, int rounds) {
  const int steps = workload.steps_per_sample;
  const at::Device device = workload.weights[0].device();
  struct Sample {
    std::function<void()> prepare, run;
  };
  const auto nothing = [] {};
  const std::array<Sample, kTimedCount> samples = {{
      {[&] { tails.split.use_grads(tails.fp32_grads); }, [&] { tails.split.step(kMaxNorm); }},
      {[&] { tails.split.use_grads(tails.bf16_grads); }, [&] { tails.split.step(kMaxNorm); }},
      {[&] { tails.fp32_master.use_grads(tails.fp32_grads); }, [&] { tails.fp32_master.step(kMaxNorm); }},
      {[&] { tails.fp32_master.use_grads(tails.bf16_grads); }, [&] { tails.fp32_master.step(kMaxNorm); }},
      {[&] { tails.engine.load_fp32_grads(tails.fp32_grads); },
       [&] { tails.engine.step_from_fp32(kMaxNorm); }},
      {nothing, [&] { tails.engine.step_from_bf16(tails.bf16_grads, kMaxNorm); }},
      {[&] { tails.torch_optim.load_grads(tails.fp32_grads); }, [&] { tails.torch_optim.step(kMaxNorm); }},
      {nothing, [&] { tails.torch_optim.step_of_optimizer_alone(); }},
      {nothing, [&] { memory_pass.run(); }},
  }};
  Samples milliseconds;
  for (int round = -1; round < rounds; ++round) {  // the first one warms up
    for (int i = 0; i < kTimedCount; ++i) {
      const int which = (i + round + kTimedCount) % kTimedCount;  // nobody is always first
      double seconds = 0;
      for (int step = 0; step < steps; ++step) {
        samples[which].prepare();
        finish(device);
        const auto start = std::chrono::steady_clock::now();
        samples[which].run();
        finish(device);
        seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      }
      if (round >= 0) milliseconds[which].push_back(1e3 * seconds / steps);
    }
  }
  return milliseconds;
}

Figure figure(const std::vector<double>& values) {
  return {.median = median(values), .error = standard_error_of_median(values)};
}

/// Round by round, `factor` times the time of `slow` over that of `fast`.
Figure ratio(const Samples& samples, Timed slow, Timed fast, double factor = 1) {
  std::vector<double> ratios;
  for (std::size_t round = 0; round < samples[slow].size(); ++round)
    ratios.push_back(factor * samples[slow][round] / samples[fast][round]);
  return figure(ratios);
}

}  // namespace

const std::vector<std::string> kTailNames = {
    "split master, FP32 gradients", "split master, BF16 gradients", "FP32 master, FP32 gradients",
    "FP32 master, BF16 gradients",  "engine, FP32 gradients",       "engine, BF16 gradients",
    "torch::optim::AdamW",          "torch::optim::AdamW, step()",  "values[i] += c"};

Workload gpt2_weights(at::Device device) {
  Workload workload;
  for (const auto& parameter : Gpt(kGpt2).parameters())
    workload.weights.push_back(parameter.detach().to(device));
  return workload;
}

Workload small_weights(at::Device device) {
  constexpr int kLayers = 20;
  Workload workload{.steps_per_sample = 20};
  for (int layer = 0; layer < kLayers; ++layer)
    for (const auto& shape : std::vector<std::vector<std::int64_t>>{{224, 224}, {64}, {64}})
      workload.weights.push_back(at::randn(shape).mul_(0.02).to(device));
  return workload;
}

Comparison compare(const Workload& workload, int rounds) {
  const TailSettings settings;
  Comparison found{.tensors = static_cast<std::int64_t>(workload.weights.size()), .rounds = rounds};
  for (const auto& weight : workload.weights) found.parameters += weight.numel();
  Tails tails(workload.weights, settings);
  verify(tails, settings, found);

  // As large as what the split master's tail writes: working copy, remainder and moments.
  ReadModifyWrite memory_pass(found.parameters * (2 + 2 + 4 + 4), workload.weights[0].device());
  const Samples samples = time_tails(tails, memory_pass, workload, rounds);

  for (const auto& milliseconds : samples) found.milliseconds.push_back(figure(milliseconds));
  found.vs_engine_fp32_grads = ratio(samples, EngineFp32Grads, SplitFp32Grads);
  found.vs_engine_bf16_grads = ratio(samples, EngineBf16Grads, SplitBf16Grads);
  found.fp32_master_vs_engine_fp32_grads = ratio(samples, EngineFp32Grads, MasterFp32Grads);
  found.fp32_master_vs_engine_bf16_grads = ratio(samples, EngineBf16Grads, MasterBf16Grads);
  found.vs_torch_optim = ratio(samples, TorchOptim, SplitFp32Grads);
  found.vs_torch_optim_bf16_grads = ratio(samples, TorchOptim, SplitBf16Grads);
  found.vs_torch_optim_step_alone = ratio(samples, TorchOptimStepAlone, SplitFp32Grads);
  const double parameters = static_cast<double>(found.parameters);
  const double pass_bytes = memory_pass.bytes_moved();
  found.bandwidth_share_fp32_grads =
      ratio(samples, MemoryPass, SplitFp32Grads, split_master_bytes(4) * parameters / pass_bytes);
  found.bandwidth_share_bf16_grads =
      ratio(samples, MemoryPass, SplitBf16Grads, split_master_bytes(2) * parameters / pass_bytes);
  found.read_modify_write_gb_per_second = pass_bytes / found.milliseconds[MemoryPass].median / 1e6;
  return found;
}

}  // namespace bench
