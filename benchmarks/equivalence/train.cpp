#include "train.h"

#include <halfstep/mixed_precision.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "support/gpt.h"
#include "support/text.h"

namespace bench {
namespace {

constexpr double kMaxNorm = 1.0;
constexpr std::int64_t kSequences = 8, kHeldOutSequences = 256;
constexpr std::int64_t kHeldOutBytes = 100'000;  // the last of the text

halfstep::AdamWOptions adamw_options(const Scheme& scheme, std::int64_t steps) {
  // With this rate and its decay to a tenth, pure BF16 loses more than 1% in 300 steps: the run can see harm.
  return {.lr = 1e-3,
          .weight_decay = 0.1,
          .moments = scheme.moments,
          .schedule =
              halfstep::Schedule::cosine({.warmup_steps = 20, .total_steps = steps, .final_fraction = 0.1})};
}

/// Training text, one batch after another.
class Batches {
 public:
  explicit Batches(std::uint64_t seed) : generator_(at::detail::createCPUGenerator(seed)) {
    const at::Tensor text = tiny_shakespeare();
    training_ = text.narrow(0, 0, text.numel() - kHeldOutBytes);
    held_out_ = text.narrow(0, training_.numel(), kHeldOutBytes);
  }

  Batch next() { return random_batch(training_, kSequences, kByteGpt.context, generator_); }
  Batch held_out() const { return even_batch(held_out_, kHeldOutSequences, kByteGpt.context); }

 private:
  at::Generator generator_;
  at::Tensor training_, held_out_;
};

/// FP32 by LibTorch alone; only the learning rate of a step is asked from Halfstep.
void train_without_halfstep(Gpt& model, Batches& batches, const halfstep::AdamWOptions& options,
                            std::int64_t steps) {
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(options.lr)
                                                        .betas({options.betas[0], options.betas[1]})
                                                        .eps(options.eps)
                                                        .weight_decay(options.weight_decay));
  for (std::int64_t step = 0; step < steps; ++step) {
    const Batch batch = batches.next();
    model.loss(batch.tokens, batch.targets).backward();
    torch::nn::utils::clip_grad_norm_(model.parameters(), kMaxNorm);
    for (auto& group : optimizer.param_groups())
      group.options().set_lr(options.lr * options.schedule.factor(step));
    optimizer.step();
    optimizer.zero_grad();
  }
}

void put_one_weight_one_ulp_up(Gpt& model) {
  const torch::NoGradGuard no_grad;
  at::Tensor first = model.parameters().front().view(-1)[0];
  first.fill_(std::nextafter(first.item<float>(), std::numeric_limits<float>::infinity()));
}

double held_out_loss(Gpt& model, const Batches& batches) {
  const torch::NoGradGuard no_grad;
  const Batch batch = batches.held_out();
  return model.loss(batch.tokens, batch.targets).item<double>();
}

/// Returns the number of skipped steps, and leaves the full values of the trained weights in `full`.
///
/// A batch whose step was skipped is taken again, with the smaller loss scale: the pair has then seen the
/// same batches in the same number of updates, and differs in precision alone.
std::int64_t train_with_halfstep(Gpt& model, Batches& batches, const Scheme& scheme,
                                 const halfstep::AdamWOptions& options, std::uint64_t seed,
                                 std::int64_t steps, Gpt& full) {
  halfstep::MixedPrecision mp(*scheme.precision, model, {.autocast = {.allow_emulated = true}});
  halfstep::AdamW optimizer(mp.params(), options, seed);
  std::int64_t skipped = 0;
  Batch batch = batches.next();
  while (optimizer.steps() < steps) {
    mp.backward(mp.forward([&] { return model.loss(batch.tokens, batch.targets); }));
    const auto grads = mp.inspect_grads();
    auto multiplier = grads.clipped_to(kMaxNorm);
    if (scheme.flaw == Flaw::UnscaledTwice) multiplier = multiplier.times(1 / grads.loss_scale());
    const bool stepped = optimizer.step(multiplier).stepped();
    mp.advance(grads);
    optimizer.zero_grad();
    if (stepped) {
      batch = batches.next();
    } else {
      ++skipped;
    }
  }
  const torch::NoGradGuard no_grad;
  auto named = full.named_parameters();
  for (const auto& param : mp.params()) named[param.name].copy_(halfstep::full_precision(param));
  return skipped;
}

}  // namespace

RunResult train(const Scheme& scheme, std::uint64_t seed, std::int64_t steps) {
  at::manual_seed(seed);
  Gpt model(kByteGpt);
  Batches batches(seed);
  const auto options = adamw_options(scheme, steps);
  if (!scheme.precision) {
    if (scheme.flaw == Flaw::OneUlp) put_one_weight_one_ulp_up(model);
    train_without_halfstep(model, batches, options, steps);
    return {.loss = held_out_loss(model, batches)};
  }
  Gpt full(kByteGpt);
  const auto skipped = train_with_halfstep(model, batches, scheme, options, seed, steps, full);
  return {.loss = held_out_loss(full, batches), .skipped_steps = skipped};
}

}  // namespace bench
