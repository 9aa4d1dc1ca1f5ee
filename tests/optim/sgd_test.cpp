// halfstep::SGD against torch::optim::SGD.
#include <gtest/gtest.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include "support/bits.h"
#include "support/error_of.h"

namespace halfstep {
namespace {

using testing::error_of;

// torch::optim::SGD, one FP32 operation after the other:
//   d = g + weight_decay * w;  buf = momentum * buf + (1 - dampening) * d;  d = nesterov ? d + momentum * buf
//   : buf; w -= lr * d.
// Ours does the same in FP32; where one side fuses a multiplication and an addition and the other does not,
// each of the at most four additions of a step may differ by one rounding of a term that is at most |w| +
// |buf| + |d|.
TEST(Sgd, FollowsTorchOptimSgdWithinItsRoundings) {
  for (const SgdOptions& options :
       {SgdOptions{.lr = 0.1}, SgdOptions{.lr = 0.01, .momentum = 0.9},
        SgdOptions{.lr = 0.01, .momentum = 0.9, .weight_decay = 1e-2, .nesterov = true},
        SgdOptions{.lr = 0.05, .momentum = 0.5, .dampening = 0.5, .weight_decay = 1e-3}}) {
    torch::manual_seed(11);
    const auto initial = torch::randn({1000});
    auto theirs = initial.clone().requires_grad_();
    torch::optim::SGD engine({theirs}, torch::optim::SGDOptions(options.lr)
                                           .momentum(options.momentum)
                                           .dampening(options.dampening)
                                           .weight_decay(options.weight_decay)
                                           .nesterov(options.nesterov));
    const Param ours =
        make_param("w", initial.clone().requires_grad_(), WeightStorage::SplitMaster, at::kBFloat16);
    SGD optimizer({ours}, options);
    constexpr int kSteps = 50;
    double largest = 0;
    for (int step = 0; step < kSteps; ++step) {
      const auto grad = torch::randn({1000});
      theirs.mutable_grad() = grad.clone();
      ours.working.mutable_grad() = grad;
      engine.step();
      ASSERT_TRUE(optimizer.step({}).stepped());
      largest = std::max(largest, theirs.detach().abs().max().item<double>());
    }
    // Momentum hands a difference on, 1 / (1 - momentum) times in all.
    const double bound = kSteps * 4 * 0x1p-24 * (largest + 20 * options.lr) / (1 - options.momentum);
    EXPECT_LE((full_precision(ours) - theirs.detach()).abs().max().item<double>(), bound) << options.momentum;
  }
}

TEST(Sgd, WithoutMomentumKeepsNothingForAParameter) {
  const Param param = make_param("w", torch::randn({100}), WeightStorage::Fp32, at::kFloat);
  for (const auto& [name, value] : SGD({param}, {.lr = 0.1}).state_dict())
    EXPECT_FALSE(std::holds_alternative<at::Tensor>(value)) << name;
}

TEST(Sgd, NesterovWithoutMomentumIsRefused) {
  const Param param = make_param("w", torch::randn({4}), WeightStorage::Fp32, at::kFloat);
  EXPECT_NE(error_of([&] { SGD({param}, {.nesterov = true}); }).find("nesterov needs a momentum"),
            std::string::npos);
  EXPECT_NE(error_of([&] { SGD({param}, {.momentum = 1.0}); }).find("momentum is 1"), std::string::npos);
}

}  // namespace
}  // namespace halfstep
