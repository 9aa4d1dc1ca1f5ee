// Saved and resumed between steps: the rest of the run has the bits of the uninterrupted one.
#include <gtest/gtest.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/error_of.h"
#include "support/small_models.h"
#include "support/states.h"

namespace halfstep {
namespace {

using testing::error_of;
using testing::Mlp;

struct Training {
  explicit Training(const Precision& precision, int seed)
      : model((torch::manual_seed(seed), std::make_shared<Mlp>(12, 24, 5))),
        mp(precision, *model, {.autocast = testing::kAnyMachine}),
        optimizer(mp.params(), {.lr = 1e-2}) {}

  void train(int from, int to) {
    for (int step = from; step < to; ++step) {
      torch::manual_seed(500 + step);
      const auto x = torch::randn({16, 12}), target = torch::randint(5, {16});
      mp.backward(mp.forward([&] { return model->loss(x, target); }));
      const auto grads = mp.inspect_grads();
      (void)optimizer.step(grads.clipped_to(0.5));
      mp.advance(grads);
      optimizer.zero_grad();
    }
  }

  std::shared_ptr<Mlp> model;
  MixedPrecision mp;
  AdamW optimizer;
};

TEST(MixedPrecisionState, ResumedRunFollowsTheUninterruptedOne) {
  auto fp16 = Precision::fp16();
  fp16.loss_scaling->growth_interval = 3;  // so that the scale moves within the test
  for (const auto& precision : {Precision::fp32(), Precision::bf16(), Precision::bf16(WeightStorage::Kahan),
                                Precision::bf16(WeightStorage::Fp32), fp16}) {
    Training whole(precision, 1), first(precision, 1), second(precision, 2);
    whole.train(0, 12);
    first.train(0, 5);
    second.mp.load_state_dict(first.mp.state_dict());
    second.optimizer.load_state_dict(first.optimizer.state_dict());
    second.train(5, 12);
    testing::expect_same_state(whole.mp.state_dict(), second.mp.state_dict());
  }
}

TEST(MixedPrecisionState, ThatDoesNotFitIsRefusedWholeWithAllFaults) {
  Training run(Precision::bf16(), 1), other(Precision::bf16(), 2);
  StateDict bad = other.mp.state_dict();
  bad.set("working.body.0.weight", torch::zeros({3}));
  bad.set("master.body.0.bias", torch::zeros({24}, at::kFloat));
  const auto before = run.mp.state_dict();
  const auto message = error_of([&] { run.mp.load_state_dict(bad); });
  for (const char* part :
       {"'working.body.0.weight' is Float of shape [3], expected BFloat16 of shape [24, 12]",
        "'master.body.0.bias' is Float"})
    EXPECT_NE(message.find(part), std::string::npos) << message;
  testing::expect_same_state(before, run.mp.state_dict());
}

// Their names differ too, and a list of those would not say why.
TEST(MixedPrecisionState, OfAnotherPrecisionOrStorageIsRefusedByThat) {
  Training run(Precision::bf16(), 1);
  const auto refusal = [&](const Precision& other) {
    return error_of([&] { run.mp.load_state_dict(Training(other, 1).mp.state_dict()); });
  };
  EXPECT_NE(refusal(Precision::fp16()).find("is of precision FP16, this one is BF16"), std::string::npos);
  EXPECT_NE(refusal(Precision::fp32()).find("is of precision FP32, this one is BF16"), std::string::npos);
  EXPECT_NE(refusal(Precision::bf16(WeightStorage::Fp32Master)).find("fp32 master, this one is split master"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              SGD(run.mp.params()).load_state_dict(run.optimizer.state_dict());
            }).find("SGD: the saved state is of AdamW"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep
