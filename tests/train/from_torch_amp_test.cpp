// The right columns of docs/from-torch-amp.md, run. The page is read here, too: a line of it that no test has
// is a fault.
#include <gtest/gtest.h>
#include <halfstep/halfstep.h>
#include <torch/torch.h>

#include <fstream>
#include <regex>
#include <sstream>

namespace halfstep::testing::from_torch_amp_test {

struct Net : torch::nn::Module {
  Net()
      : first(register_module("first", torch::nn::Linear(16, 32))),
        middle(register_module("middle", torch::nn::Linear(32, 32))),
        other(register_module("other", torch::nn::Linear(32, 32))),
        last(register_module("last", torch::nn::Linear(32, 16))) {}
  at::Tensor forward(const at::Tensor& x) {
    return last(at::gelu(other(at::gelu(middle(at::gelu(first(x)))))));
  }
  torch::nn::Linear first, middle, other, last;
};

std::string text_of(const std::string& path) {
  std::ifstream file(std::string(HALFSTEP_SOURCE_DIR "/") + path);
  EXPECT_TRUE(file) << path;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(FromTorchAmp, EveryLineOfThePageIsRunHere) {
  const std::string page = text_of("docs/from-torch-amp.md");
  const std::string source = text_of("tests/train/from_torch_amp_test.cpp");
  const std::regex row(R"(\| `[^|]*` \| `([^|]*)` \|\n)");
  int rows = 0;
  for (std::sregex_iterator found(page.begin(), page.end(), row), end; found != end; ++found, ++rows) {
    const std::string code = (*found)[1];
    // Spaces aside: the formatter breaks lines.
    std::string squeezed_code, squeezed_source;
    for (const char c : code)
      if (!std::isspace(static_cast<unsigned char>(c))) squeezed_code += c;
    for (const char c : source)
      if (!std::isspace(static_cast<unsigned char>(c))) squeezed_source += c;
    EXPECT_NE(squeezed_source.find(squeezed_code), std::string::npos) << code;
  }
  EXPECT_GE(rows, 24);
}

TEST(FromTorchAmp, AScalerAndAScopeOverAnyOptimizer) {
  at::manual_seed(1);
  const auto model = std::make_shared<Net>();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const at::Tensor x = at::randn({8, 16}), y = at::randn({8, 16});
  halfstep::GradScaler scaler;
  double first_loss = 0, last_loss = 0;
  for (int step = 0; step < 30; ++step) {
    at::Tensor loss;
    {
      const halfstep::AutocastScope scope(at::kHalf);
      const at::Tensor output = model->forward(x);
      EXPECT_EQ(output.scalar_type(), at::kHalf);
      const auto off = halfstep::AutocastScope::disabled();
      loss = at::mse_loss(output.to(at::kFloat), y);
    }
    optimizer.zero_grad();
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);
    halfstep::clip_grad_norm_(model->parameters(), 1.0);
    const halfstep::StepReport report = scaler.step(optimizer);
    scaler.update();
    (step == 0 ? first_loss : last_loss) = loss.item<double>();
    EXPECT_TRUE(report.stepped() || step < 10) << report.sentence();
  }
  EXPECT_LT(last_loss, first_loss);
  const halfstep::StateDict saved = scaler.state_dict();
  halfstep::GradScaler resumed;
  resumed.load_state_dict(saved);
  EXPECT_EQ(resumed.state(), scaler.state());
}

TEST(FromTorchAmp, ADelayedRecipeOverAModelOfLinearLayers) {
  at::manual_seed(1);
  const auto model = std::make_shared<Net>();
  const at::Tensor x = at::randn({8, 16}), y = at::randn({8, 16});
  auto precision = halfstep::Precision::fp8_delayed();
  precision.recipe->delayed->history = 16;
  precision.recipe->delayed->take = halfstep::DelayedScaling::Take::MostRecent;
  precision.recipe->delayed->margin = 1;
  precision.recipe->weight_grad.quantised = false;
  precision.keep_high("middle.weight");
  halfstep::MixedPrecision mp(precision, *model);
  halfstep::AdamW optimizer(mp.params(), {.lr = 1e-2});
  double first_loss = 0, last_loss = 0;
  for (int step = 0; step < 30; ++step) {
    const at::Tensor loss = mp.forward([&] { return at::mse_loss(model->forward(x), y); });
    mp.backward(loss);
    const auto grads = mp.inspect_grads();
    EXPECT_TRUE(optimizer.step(grads.clipped_to(1.0)).stepped());
    mp.advance(grads);
    optimizer.zero_grad();
    (step == 0 ? first_loss : last_loss) = loss.item<double>();
  }
  EXPECT_LT(last_loss, first_loss);
  EXPECT_EQ(mp.quantised_uses("other.weight"), 30);
  EXPECT_EQ(mp.quantised_uses("middle.weight"), 0);
}

TEST(FromTorchAmp, EveryOtherRecipe) {
  for (const Precision& precision :
       {halfstep::Precision::fp8_current(), halfstep::Precision::fp8_rowwise(),
        halfstep::Precision::fp8_block(), halfstep::Precision::mxfp8(), halfstep::Precision::nvfp4()}) {
    const auto model = std::make_shared<Net>();
    MixedPrecision mp(precision, *model);
    mp.backward(
        mp.forward([&] { return model->forward(at::randn({8, 16})).to(at::kFloat).square().mean(); }));
    EXPECT_TRUE(mp.inspect_grads().finite()) << precision.name();
    EXPECT_EQ(mp.quantised_uses("other.weight"), 1) << precision.name();
  }
}

}  // namespace halfstep::testing::from_torch_amp_test
