// A TorchScript module that Python made, and parameters without a module, beside Python's torch.amp.
#include <gtest/gtest.h>
#include <halfstep/train_step.h>
#include <torch/script.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/bits.h"
#include "support/error_of.h"
#include "support/python.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

constexpr int kSteps = 40;
const TrainStepOptions kHere{.precision = {.autocast = testing::kAnyMachine}};

Precision precision_of(const std::string& type) {
  if (type == "bfloat16") return Precision::bf16();
  Precision precision = Precision::fp16();
  precision.loss_scaling->initial = 0x1p10;
  return precision;
}

struct Batch {
  at::Tensor x, target;
};

/// As script_module.py makes it.
Batch batch_of(int step) {
  torch::manual_seed(100 + step % 4);
  const at::Tensor x = torch::randn({32, 20});
  return {x, torch::randint(10, {32})};
}

std::vector<double> losses_of(torch::jit::Module& module, TrainStep<AdamWOptions>& step) {
  std::vector<double> losses;
  for (int i = 0; i < kSteps; ++i) {
    const auto [x, target] = batch_of(i);
    EXPECT_TRUE(
        step([&] { return at::cross_entropy_loss(module.forward({x}).toTensor(), target); }).stepped());
    losses.push_back(step.loss().item<double>());
  }
  return losses;
}

TEST(ScriptModule, TrainsAsInTorchAmp) {
  for (const std::string type : {"bfloat16", "half"}) {
    const testing::ScratchFolder scratch;
    const std::string file = scratch / "module.pt";
    const auto expected = testing::ask_python(
        "tests/train/script_module.py", {{"file", file}, {"type", type}, {"steps", kSteps}, {"samples", 8}});
    torch::jit::Module module = torch::jit::load(file), listed = torch::jit::load(file);
    const AdamWOptions options{.lr = 3e-3, .weight_decay = 1e-2};
    TrainStep step(precision_of(type), module, options, kHere);
    const std::vector<double> losses = losses_of(module, step);
    // One more rounding of each weight is the sample; a step has about as many of each activation and
    // gradient, eight tensors on the way through: 1 + sqrt(8) of the samples' largest, and what came before.
    double spread = 0, largest = 0;
    for (int i = 0; i < kSteps; ++i) {
      spread = std::max(spread, expected["spread"][i].get<double>());
      const double bound = 4 * spread, off = std::abs(losses[i] - expected["losses"][i].get<double>());
      EXPECT_LE(off, bound) << type << " step " << i;
      largest = std::max(largest, off / bound);
    }
    EXPECT_LT(losses.back(), 0.6 * losses.front());
    std::printf("%s: %.2f of the bound, which is %.4f at the end\n", type.c_str(), largest, 4 * spread);

    // The same parameters as a plain list.
    std::vector<NamedParameter> parameters;
    for (const auto& item : listed.named_parameters()) parameters.push_back({item.name, item.value});
    TrainStep list_step(precision_of(type), parameters, options, kHere);
    EXPECT_EQ(losses_of(listed, list_step), losses);
    for (std::size_t i = 0; i < parameters.size(); ++i)
      EXPECT_TRUE(testing::bit_equal(full_precision(step.mixed_precision().params()[i]),
                                     full_precision(list_step.mixed_precision().params()[i])));
  }
}

TEST(ScriptModule, SkippedStepPutsItsBuffersBack) {
  const testing::ScratchFolder scratch;
  const std::string file = scratch / "module.pt";
  (void)testing::ask_python("tests/train/script_module.py",
                            {{"file", file}, {"type", "half"}, {"steps", 1}, {"samples", 0}});
  torch::jit::Module module = torch::jit::load(file);
  TrainStep step(precision_of("half"), module, AdamWOptions{}, kHere);
  const at::Tensor mean = module.attr("1").toModule().buffers().begin().operator*().clone();
  auto [x, target] = batch_of(0);
  x[0][0] = INFINITY;
  const auto report = step([&] { return at::cross_entropy_loss(module.forward({x}).toTensor(), target); });
  EXPECT_EQ(report.outcome(), StepOutcome::SkippedNonFinite);
  EXPECT_EQ(step.mixed_precision().loss_scale(), 0x1p9);
  for (const at::Tensor& buffer : module.buffers())
    EXPECT_TRUE(!buffer.is_floating_point() || buffer.isfinite().all().item<bool>());
  EXPECT_TRUE(testing::bit_equal(module.attr("1").toModule().buffers().begin().operator*(), mean));
}

TEST(ScriptModule, BuffersThatForwardAssignsAreSavedAndPutBack) {
  const testing::ScratchFolder scratch;
  const std::string file = scratch / "module.pt";
  (void)testing::ask_python(
      "tests/train/script_module.py",
      {{"file", file}, {"type", "half"}, {"steps", 0}, {"samples", 0}, {"remembers", true}});
  torch::jit::Module module = torch::jit::load(file), other = torch::jit::load(file);
  TrainStep step(precision_of("half"), module, AdamWOptions{}, kHere);
  const auto loss_of = [](torch::jit::Module& model, const Batch& batch) {
    return at::cross_entropy_loss(model.forward({batch.x}).toTensor(), batch.target);
  };
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(step([&] { return loss_of(module, batch_of(i)); }).stepped());
  const StateDict saved = step.mixed_precision().state_dict();
  EXPECT_EQ(saved.tensor("buffer.calls").item<int64_t>(), 3);
  EXPECT_TRUE(testing::bit_equal(saved.tensor("buffer.mean"), module.attr("mean").toTensor()));

  Batch bad = batch_of(3);
  bad.x[0][0] = INFINITY;
  EXPECT_FALSE(step([&] { return loss_of(module, bad); }).stepped());
  EXPECT_EQ(module.attr("calls").toTensor().item<int64_t>(), 3);
  EXPECT_TRUE(testing::bit_equal(module.attr("mean").toTensor(), saved.tensor("buffer.mean")));

  TrainStep resumed(precision_of("half"), other, AdamWOptions{}, kHere);
  ASSERT_TRUE(resumed([&] { return loss_of(other, batch_of(0)); }).stepped())
      << "its buffers are others by now";
  resumed.mixed_precision().load_state_dict(saved);
  EXPECT_EQ(other.attr("calls").toTensor().item<int64_t>(), 3);
  EXPECT_TRUE(testing::bit_equal(other.attr("mean").toTensor(), saved.tensor("buffer.mean")));
}

TEST(ParameterList, RefusesWhatIsNoParameter) {
  EXPECT_NE(testing::error_of([] {
              const at::Tensor computed = torch::ones({3}).requires_grad_() * 0.1;
              MixedPrecision(Precision::bf16(), std::vector<NamedParameter>{{"w", computed}},
                             {.autocast = testing::kAnyMachine});
            }).find("'w' was computed from other tensors"),
            std::string::npos);
  EXPECT_NE(testing::error_of([] {
              MixedPrecision(Precision::fp32(), std::vector<NamedParameter>{{"w", at::Tensor()}});
            }).find("'w' is an undefined tensor"),
            std::string::npos);
  EXPECT_NE(testing::error_of([] {
              MixedPrecision(Precision::fp32(), std::vector<NamedParameter>{});
            }).find("has no parameters"),
            std::string::npos);
  const at::Tensor a = torch::ones({3}), b = torch::ones({3});
  EXPECT_NE(testing::error_of([&] {
              MixedPrecision(Precision::fp32(), std::vector<NamedParameter>{{"w", a}, {"w", b}});
            }).find("two tensors are called 'w'"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep
