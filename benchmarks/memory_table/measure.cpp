#include "measure.h"

#include <halfstep/error.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include <functional>

namespace bench {
namespace {

using halfstep::MemoryClass;
using halfstep::MomentStorage;
using halfstep::Precision;
using halfstep::WeightStorage;

constexpr double kLearningRate = 3e-4, kMaxNorm = 1.0;

/// A training step in two halves, with a look at the memory between them.
struct Halves {
  std::function<void()> zero_forward_backward;
  std::function<void()> inspect_and_step;
};

MemoryFound measure_second_step(const Gpt& model, const Halves& halves) {
  // Moments are there from the first step on.
  halves.zero_forward_backward();
  halves.inspect_and_step();
  halfstep::reset_memory_peak();
  halves.zero_forward_backward();
  MemoryFound found{.parameters = parameter_count(model), .after_backward = halfstep::memory_report().live};
  for (const auto& parameter : model.parameters())
    if (parameter.requires_grad()) found.trained += parameter.numel();
  halves.inspect_and_step();
  found.at_peak = halfstep::memory_report().at_peak;

  std::size_t working = 0, gradients = 0;
  for (const auto& parameter : model.parameters()) {
    working += parameter.nbytes();
    if (parameter.requires_grad()) gradients += parameter.grad().nbytes();
  }
  HALFSTEP_CHECK(found.after_backward[MemoryClass::Working] == working &&
                     found.after_backward[MemoryClass::Gradient] == gradients,
                 "memory_table: counted ", found.after_backward[MemoryClass::Working],
                 " bytes of working copies and ", found.after_backward[MemoryClass::Gradient],
                 " of gradients; the model's own tensors have ", working, " and ", gradients);
  return found;
}

MemoryFound measure_libtorch_alone(Gpt& model, const at::Tensor& tokens) {
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(kLearningRate));
  return measure_second_step(model,
                             {.zero_forward_backward =
                                  [&] {
                                    optimizer.zero_grad();
                                    const halfstep::MemoryClassScope activations(MemoryClass::Activation);
                                    model.loss(tokens, tokens).backward();
                                    for (const auto& parameter : model.parameters())
                                      halfstep::tag_memory(parameter.grad(), MemoryClass::Gradient);
                                  },
                              .inspect_and_step =
                                  [&] {
                                    torch::nn::utils::clip_grad_norm_(model.parameters(), kMaxNorm);
                                    // The state is made in the first step; what else it allocates is gone
                                    // when it returns.
                                    const halfstep::MemoryClassScope moments(MemoryClass::Moments);
                                    optimizer.step();
                                  }});
}

MemoryFound measure_halfstep(Gpt& model, const at::Tensor& tokens, const MemoryScheme& scheme) {
  halfstep::MixedPrecision mp(*scheme.precision, model, {.autocast = {.allow_emulated = true}});
  halfstep::AdamW optimizer(mp.params(), {.lr = kLearningRate, .moments = scheme.moments});
  return measure_second_step(model,
                             {.zero_forward_backward =
                                  [&] {
                                    optimizer.zero_grad();
                                    mp.backward(mp.forward([&] { return model.loss(tokens, tokens); }));
                                  },
                              .inspect_and_step =
                                  [&] {
                                    const auto grads = mp.inspect_grads();
                                    const auto report = optimizer.step(grads.clipped_to(kMaxNorm));
                                    HALFSTEP_CHECK(report.stepped(), "memory_table: ", report.sentence());
                                    mp.advance(grads);
                                  }});
}

}  // namespace

const std::vector<MemoryScheme>& memory_schemes() {
  static const std::vector<MemoryScheme> all = {
      {.name = "fp32"},
      {.name = "bf16_autocast", .precision = Precision::bf16(WeightStorage::Fp32)},
      {.name = "bf16", .precision = Precision::bf16()},
      {.name = "bf16_fp32_master", .precision = Precision::bf16(WeightStorage::Fp32Master)},
      {.name = "bf16_bf16_moments", .precision = Precision::bf16(), .moments = MomentStorage::Bf16},
      {.name = "bf16_8bit_moments", .precision = Precision::bf16(), .moments = MomentStorage::Blockwise8},
      {.name = "bf16_8bit_moments_checkpointed",
       .precision = Precision::bf16(),
       .moments = MomentStorage::Blockwise8,
       .activations = BlockActivations::ComputedAgain},
      {.name = "bf16_last_block_only", .precision = Precision::bf16(), .last_block_only = true},
  };
  return all;
}

const std::vector<MemoryCase>& memory_cases() {
  static const std::vector<MemoryCase> all = {
      {.name = "gpt2_124m", .shape = kGpt2, .sequences = 1},
      {.name = "gpt_30m", .shape = kGpt30M, .sequences = 8},
  };
  return all;
}

double MemoryFound::bytes_per_parameter() const {
  std::size_t bytes = 0;
  for (const MemoryClass c :
       {MemoryClass::Working, MemoryClass::Master, MemoryClass::Gradient, MemoryClass::Moments})
    bytes += after_backward[c];
  return static_cast<double>(bytes) / static_cast<double>(parameters);
}

MemoryFound measure(const MemoryCase& what, const MemoryScheme& scheme) {
  halfstep::install_cpu_allocator();
  at::manual_seed(1);
  Gpt model = [&] {
    const halfstep::MemoryClassScope working(MemoryClass::Working);
    return Gpt(what.shape, scheme.activations);
  }();
  if (scheme.last_block_only) {
    const std::string last = halfstep::detail::concat("blocks.", what.shape.layers - 1, ".");
    for (auto& item : model.named_parameters()) item.value().requires_grad_(item.key().starts_with(last));
  }
  // What the tokens are is of no account for memory; next-token targets would be one more small tensor.
  const at::Tensor tokens = at::randint(what.shape.vocabulary, {what.sequences, what.shape.context});
  return scheme.precision ? measure_halfstep(model, tokens, scheme) : measure_libtorch_alone(model, tokens);
}

}  // namespace bench
