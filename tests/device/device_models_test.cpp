// Whole models trained on the test accelerator: the bits of the same operations on the CPU, steps of our
// kernels within a bound, no wait, few launches.
#include <gtest/gtest.h>
#include <halfstep/models.h>
#include <halfstep/train_step.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>

#include "support/any_machine.h"
#include "support/bits.h"
#include "support/counting_device.h"
#include "support/python.h"
#include "tensor/update_path.h"

namespace halfstep::testing {
namespace {

using at::Tensor;
namespace functional = torch::nn::functional;

constexpr int64_t kVocabulary = 512, kLength = 32;

Gpt2 gpt_of(int64_t layers) {
  return Gpt2(Gpt2Config{.vocab_size = kVocabulary,
                         .n_positions = kLength,
                         .n_embd = 96,
                         .n_layer = layers,
                         .n_head = 4,
                         .resid_pdrop = 0,
                         .embd_pdrop = 0,
                         .attn_pdrop = 0},
              /*seed=*/1);
}

/// A model, and its loss of the batch of a step.
struct Trained {
  std::shared_ptr<torch::nn::Module> model;
  std::function<Tensor(int step)> loss;
};

Trained gpt_on(at::Device device) {
  Gpt2 model = gpt_of(/*layers=*/3);
  model->to(device);
  const auto loss = [=](int step) mutable {
    torch::manual_seed(1000 + step);
    const Tensor ids = torch::randint(kVocabulary, {2, kLength + 1});
    const Tensor there = ids.to(device, at::kLong, /*non_blocking=*/true);
    return model->loss(there.slice(1, 0, kLength), there.slice(1, 1).contiguous());
  };
  return {model.ptr(), loss};
}

/// Several texts in a row, which do not see one another.
Trained packed_gpt_on(at::Device device) {
  Gpt2 model = gpt_of(/*layers=*/1);
  model->to(device);
  const auto loss = [=](int step) mutable {
    torch::manual_seed(3000 + step);
    const Tensor ids = torch::randint(kVocabulary, {2, kLength}),
                 begins = torch::randint(5, {2, kLength}).eq(0);
    const auto sent = [&](const Tensor& tensor) {
      return tensor.to(device, at::kLong, /*non_blocking=*/true);
    };
    return model->loss(sent(ids), sent(ids.roll(-1, 1)), sent(begins.cumsum(1)));
  };
  return {model.ptr(), loss};
}

Trained resnet_on(at::Device device) {
  ResNet18 model(ResNet18Options{.classes = 10, .channels = 1, .small_images = true}, /*seed=*/1);
  model->to(device);
  const auto loss = [=](int step) mutable {
    torch::manual_seed(2000 + step);
    const Tensor images = torch::randn({4, 1, 8, 8}), classes = torch::randint(10, {4});
    return functional::cross_entropy(model(images.to(device, at::kFloat, true)),
                                     classes.to(device, at::kLong, true));
  };
  return {model.ptr(), loss};
}

Precision fp16_with_overflows() {
  Precision precision = Precision::fp16();
  precision.loss_scaling->initial = 0x1p12;
  precision.loss_scaling->growth_interval = 8;
  return precision;
}

struct Outcome {
  std::vector<std::string> told;
  StateDict state, optimizer;
};

Outcome train(Trained (*make)(at::Device), at::Device device, int steps) {
  const auto [model, loss] = make(device);
  TrainStep step(fp16_with_overflows(), *model, AdamWOptions{.lr = 1e-3},
                 {.max_grad_norm = 1, .precision = {.autocast = low_on_any_machine(at::kHalf)}});
  std::vector<StepReport> reports;
  {
    const NoWaits no_waits;
    for (int i = 0; i < steps; ++i)
      reports.push_back(step([&] { return loss(i) * (i % 20 == 6 ? 1e36 : 1.0); }));
  }
  Outcome outcome{
      .told = {}, .state = step.mixed_precision().state_dict(), .optimizer = step.optimizer().state_dict()};
  for (const StepReport& report : reports) outcome.told.push_back(report.sentence());
  return outcome;
}

void expect_same_bits(const StateDict& found, const StateDict& expected) {
  EXPECT_EQ(found.size(), expected.size());
  for (const auto& [name, value] : expected) {
    if (const auto* tensor = std::get_if<Tensor>(&value)) {
      EXPECT_TRUE(bit_equal(peek(found.tensor(name)), *tensor)) << name;
    } else if (const auto* integer = std::get_if<int64_t>(&value)) {
      EXPECT_EQ(found.integer(name), *integer) << name;
    }
  }
}

/// Convolutions of FP16 can take a second a step backward on a CPU: CI takes 50 of the plain GPT alone. The
/// full form is HALFSTEP_STEPS=50 device_test --gtest_filter='*DeviceModels*'.
int steps_of(Trained (*make)(at::Device)) {
  const char* chosen = std::getenv("HALFSTEP_STEPS");
  return chosen ? std::atoi(chosen) : make == gpt_on ? 50 : 8;
}

class DeviceModels : public ::testing::TestWithParam<Trained (*)(at::Device)> {};

TEST_P(DeviceModels, StepsHaveTheBitsOfTheSameOperationsOnTheCpu) {
  if (GetParam() == packed_gpt_on)
    GTEST_SKIP()
        << "CUDA's flash attention takes no mask: LibTorch takes another operation there than on the CPU";
  if (!on_counting_device()) GTEST_SKIP() << "bits and counts are for the test accelerator";
  const AtenOnCpu twin;
  const int steps = steps_of(GetParam());
  const Outcome here = train(GetParam(), at::kCPU, steps),
                there = train(GetParam(), device_under_test(), steps);
  EXPECT_EQ(there.told, here.told);
  const auto skipped = std::count_if(here.told.begin(), here.told.end(),
                                     [](const auto& line) { return line.find("skipped") != line.npos; });
  EXPECT_GE(skipped, 1);
  EXPECT_LE(skipped, steps - 2);
  expect_same_bits(there.state, here.state);
  expect_same_bits(there.optimizer, here.optimizer);
}

/// Each step from the same state with the same gradients, by the kernels here and by ATen there. The gradient
/// is multiplied by a rounded number or divided by one, AdamW's update is a quotient of sums of it and of its
/// square: 32 x 2^-24 of the largest update, lr x 1.1 x (1 - beta1) / sqrt(1 - beta2) at most. Joint norms
/// are summed in FP64 here and in FP32 there; clipping carries the difference, kNorm, into moments and
/// update.
TEST_P(DeviceModels, StepsOfTheKernelsAreWithinRoundings) {
  const auto [model, loss] = GetParam()(device_under_test());
  const auto [twin, unused] = GetParam()(at::kCPU);
  constexpr double kLr = 1e-3, kLargestUpdate = kLr * 0.1 / 0.0316 + kLr, kNorm = 1e-5;
  const MixedPrecisionOptions options{.autocast = low_on_any_machine(at::kHalf)};
  MixedPrecision there(fp16_with_overflows(), *model, options), here(fp16_with_overflows(), *twin, options);
  AdamW there_optimizer(there.params(), {.lr = kLr}), here_optimizer(here.params(), {.lr = kLr});
  int skipped = 0;
  double worst = 0;
  for (int i = 0; i < steps_of(GetParam()); ++i) {
    here.load_state_dict(there.state_dict());
    here_optimizer.load_state_dict(there_optimizer.state_dict());
    there.backward(there.forward([&] { return loss(i) * (i % 20 == 6 ? 1e36 : 1.0); }));
    for (std::size_t p = 0; p < here.params().size(); ++p)
      here.params()[p].working.mutable_grad() = peek(there.params()[p].working.grad());
    const GradSummary expected = inspect_grads(here.params(), there.loss_scale());
    const GradSummary found = there.inspect_grads();
    ASSERT_EQ(found.finite(), expected.finite()) << i;
    skipped += !expected.finite();
    (void)there_optimizer.step(found.clipped_to(1));
    (void)here_optimizer.step(expected.clipped_to(1));
    for (std::size_t p = 0; p < here.params().size(); ++p) {
      const Tensor wanted = full_precision(here.params()[p]), got = peek(full_precision(there.params()[p]));
      const Tensor bound = kLargestUpdate * (32 * 0x1p-24 + 2 * kNorm) + wanted.abs() * 0x1p-23;
      worst = std::max(worst, ((got - wanted).abs() / bound).max().item<double>());
    }
    there_optimizer.zero_grad();
    here_optimizer.zero_grad();
    there.advance(found);
  }
  EXPECT_GE(skipped, 1);
  EXPECT_LE(skipped, steps_of(GetParam()) - 2);
  EXPECT_LE(worst, 1);
  std::printf("largest difference: %.3f of its bound\n", worst);
}

INSTANTIATE_TEST_SUITE_P(Of, DeviceModels, ::testing::Values(gpt_on, packed_gpt_on, resnet_on),
                         [](const auto& info) {
                           return info.index == 0 ? "Gpt" : info.index == 1 ? "PackedGpt" : "ResNet18";
                         });

struct Launches {
  int64_t forward = 0, backward = 0, step = 0, waits = 0;
};

/// Of the fourth step, which finds everything made that the first ones make.
Launches launches_of(Precision precision) {
  Gpt2 model = gpt_of(/*layers=*/12);
  model->to(device_under_test());
  if (precision.loss_scaling) precision.loss_scaling->initial = 64;
  MixedPrecision mp(precision, *model, {.autocast = kAnyMachine});
  std::vector<ParamGroup<AdamWOptions>> groups = {{{}, {.lr = 1e-3, .weight_decay = 0.1}},
                                                  {{}, {.lr = 1e-3, .weight_decay = 0}}};
  for (const Param& param : mp.params()) groups[param.working.dim() >= 2 ? 0 : 1].params.push_back(param);
  AdamW optimizer(groups);
  const Tensor ids = torch::randint(kVocabulary, {2, kLength}).to(device_under_test());
  Launches launches;
  for (int i = 0; i < 4; ++i) {
    launches = {};
    const auto count = [&](int64_t& part) {
      part = device_counts().launches;
      launches.waits += device_counts().waits;
      reset_device_counts();
    };
    optimizer.zero_grad();
    reset_device_counts();
    const Tensor loss = mp.forward([&] { return model->loss(ids, ids); });
    count(launches.forward);
    mp.backward(loss);
    count(launches.backward);
    const GradSummary grads = mp.inspect_grads();
    const auto report = optimizer.step(grads.clipped_to(1.0));
    mp.advance(grads);
    count(launches.step);
    EXPECT_TRUE(report.stepped());
  }
  return launches;
}

/// Operations that the host starts, of a GPT-2 with 12 layers and 148 tensors; Python's torch.amp with fused
/// AdamW on the same accelerator beside it.
TEST(DeviceLaunches, OfAStepAreFew) {
  if (!on_counting_device()) GTEST_SKIP() << "bits and counts are for the test accelerator";
  Precision fp16 = Precision::fp16(WeightStorage::Fp32Master);
  const Launches master = launches_of(fp16), bf16 = launches_of(Precision::bf16(WeightStorage::Fp32Master)),
                 split = launches_of(Precision::bf16(WeightStorage::SplitMaster));
  const auto amp = ask_python("tests/device/amp_launches.py", {{"library", COUNTING_DEVICE_AMP}});
  std::printf("%-30s forward %4ld backward %4ld step %4ld waits %ld\n", "Python's torch.amp, FP16",
              amp["forward"].get<long>(), amp["backward"].get<long>(), amp["step"].get<long>(),
              amp["waits"].get<long>());
  const auto print = [](const char* what, const Launches& of) {
    std::printf("%-30s forward %4ld backward %4ld step %4ld waits %ld\n", what, long(of.forward),
                long(of.backward), long(of.step), long(of.waits));
  };
  print("Halfstep, FP16, FP32 master", master);
  print("Halfstep, BF16, FP32 master", bf16);
  print("Halfstep, BF16, split master", split);
  for (const Launches& of : {master, bf16, split}) {
    EXPECT_LE(of.forward, 130);
    EXPECT_LE(of.backward, 260);
    EXPECT_EQ(of.waits, 0);
  }
  EXPECT_LE(master.step, 16);
  EXPECT_LE(bf16.step, 16);
}

}  // namespace
}  // namespace halfstep::testing
