#include "optim/rules.h"

#include <halfstep/error.h>

#include <limits>

namespace halfstep {
namespace {

// Written so that a NaN fails: every comparison with one is false.
void check_rate(const char* whose, const char* name, double value, const char* usual) {
  HALFSTEP_CHECK(value >= 0 && value <= std::numeric_limits<float>::max(), whose, ": ", name, " is ", value,
                 ", expected a number from 0 that FP32 holds; usual is ", usual, ".");
}

void check_fraction(const char* whose, const char* name, double value, const char* usual) {
  HALFSTEP_CHECK(value >= 0 && value < 1, whose, ": ", name, " is ", value,
                 ", expected a number from 0 to below 1; usual is ", usual, ".");
}

}  // namespace

void AdamWOptions::check() const {
  check_rate("AdamW", "lr", lr, "3e-4");
  check_fraction("AdamW", "beta1", betas[0], "0.9");
  check_fraction("AdamW", "beta2", betas[1], "0.999 or, for language models, 0.95");
  // In FP32 a smaller one is 0 or nearly so, and a weight without gradients would become 0 / 0.
  HALFSTEP_CHECK(eps >= std::numeric_limits<float>::min() && eps <= std::numeric_limits<float>::max(),
                 "AdamW: eps is ", eps, ", expected a number from 2^-126 on; usual is 1e-8.");
  check_rate("AdamW", "weight_decay", weight_decay, "0.01 to 0.1");
  schedule.check();
}

void SgdOptions::check() const {
  check_rate("SGD", "lr", lr, "0.1");
  check_fraction("SGD", "momentum", momentum, "0.9");
  check_rate("SGD", "weight_decay", weight_decay, "5e-4");
  HALFSTEP_CHECK(dampening >= 0 && dampening <= 1, "SGD: dampening is ", dampening,
                 ", expected a number from 0 to 1; usual is 0.");
  HALFSTEP_CHECK(!nesterov || (momentum > 0 && dampening == 0),
                 "SGD: nesterov needs a momentum above 0 (it is ", momentum, ") and no dampening (it is ",
                 dampening, ").");
  schedule.check();
}

namespace optim {

AdamWStep Rule<AdamWOptions>::constants(const AdamWOptions& options, double learning_rate,
                                        double grad_multiplier, int64_t step, StochasticKey random) {
  AdamWStep constants = adamw_step({.learning_rate = learning_rate,
                                    .beta1 = options.betas[0],
                                    .beta2 = options.betas[1],
                                    .eps = options.eps,
                                    .weight_decay = options.weight_decay},
                                   step);
  constants.grad_multiplier = static_cast<float>(grad_multiplier);
  constants.random = random;
  return constants;
}

SgdStep Rule<SgdOptions>::constants(const SgdOptions& options, double learning_rate, double grad_multiplier,
                                    int64_t step, StochasticKey random) {
  return {.grad_multiplier = static_cast<float>(grad_multiplier),
          .learning_rate = learning_rate,
          .momentum = options.momentum,
          .dampening = options.dampening,
          .weight_decay = options.weight_decay,
          .nesterov = options.nesterov,
          .first = step == 1,
          .random = random};
}

}  // namespace optim
}  // namespace halfstep
