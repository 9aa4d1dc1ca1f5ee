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
  EXPECT_GE(rows, 60);
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

TEST(FromTorchAmp, ASwitchForBothAndAQuestion) {
  const at::Tensor x = at::randn({2, 4}), w = at::randn({4, 4});
  for (const bool use_amp : {true, false}) {
    const halfstep::AutocastScope maybe(at::kHalf, halfstep::OpPolicy::standard(), {.enabled = use_amp});
    EXPECT_EQ(at::matmul(x, w).scalar_type(), use_amp ? at::kHalf : at::kFloat);
  }
  const halfstep::PrecisionSupport& support = halfstep::precision_support(at::kHalf);
  EXPECT_NE(support.support, halfstep::Support::Unavailable) << support.reason;
}

/// custom_fwd with cast_inputs, and custom_bwd.
struct Squared : torch::autograd::Function<Squared> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    const auto full = halfstep::AutocastScope::disabled();
    const at::Tensor wide = x.to(at::kFloat);
    context->save_for_backward({wide});
    return at::matmul(wide, wide);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const halfstep::AutocastScope again(at::kHalf);
    const at::Tensor wide = context->get_saved_variables()[0].t();
    const at::Tensor grad = at::matmul(grads[0], wide) + at::matmul(wide, grads[0]);
    EXPECT_EQ(grad.scalar_type(), at::kHalf);
    return {grad};
  }
};

TEST(FromTorchAmp, AFunctionThatChoosesItsTypes) {
  const at::Tensor x = at::randn({4, 4}).requires_grad_();
  at::Tensor output;
  {
    const halfstep::AutocastScope scope(at::kHalf);
    output = Squared::apply(x);
  }
  EXPECT_EQ(output.scalar_type(), at::kFloat);
  output.sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
}

TEST(FromTorchAmp, AScalerWithRulesOfItsOwn) {
  halfstep::LossScaling scaling;
  scaling.initial = 1024.0;
  scaling.growth_factor = 4.0;
  scaling.backoff_factor = 0.25;
  scaling.growth_interval = 100;
  for (const bool use_amp : {true, false}) {
    halfstep::GradScaler chosen(scaling, {.enabled = use_amp});
    EXPECT_EQ(chosen.get_scale(), use_amp ? 1024 : 1);
  }
  halfstep::GradScaler scaler(scaling);
  scaler.update(512.0);
  EXPECT_EQ(scaler.get_scale(), 512);
  EXPECT_EQ(scaler.options().growth_factor, 4);
  EXPECT_EQ(scaler.options().backoff_factor, 0.25);
  EXPECT_EQ(scaler.options().growth_interval, 100);
  EXPECT_TRUE(scaler.is_enabled());

  const auto model = std::make_shared<Net>();
  halfstep::MixedPrecision mp(halfstep::Precision::fp16(), *model);
  mp.set_loss_scaling(scaling);
  EXPECT_EQ(mp.precision().loss_scaling->growth_interval, 100);
}

TEST(FromTorchAmp, WhatFsdpSaysOfOneRank) {
  at::manual_seed(1);
  const auto model = std::make_shared<Net>();
  const at::Tensor x = at::randn({8, 16}), y = at::randn({8, 16});
  auto precision = halfstep::Precision::bf16();
  precision.keep("last.*", halfstep::WeightStorage::Fp32);
  halfstep::MixedPrecisionOptions options{.autocast = {.allow_emulated = true}};
  options.accumulation = halfstep::Accumulation::Fp32;
  options.reduction.type = at::kFloat;
  halfstep::MixedPrecision mp(precision, *model, options);
  halfstep::SGD optimizer(mp.params(), {.lr = 0.1});
  EXPECT_EQ(model->middle->weight.scalar_type(), at::kBFloat16);
  EXPECT_EQ(model->last->weight.scalar_type(), at::kFloat);
  const int ranks = 2;  // both of which found this
  for (int rank = 0; rank < ranks; ++rank)
    mp.backward(mp.forward([&] { return at::mse_loss(model->forward(x), y); }));
  mp.close_sum();
  const auto grads = mp.inspect_grads();
  EXPECT_EQ(grads.clipped_to(1e9).times(1.0 / ranks).value(), 0.5);
  EXPECT_TRUE(optimizer.step(grads.clipped_to(1.0).times(1.0 / ranks)).stepped());
  mp.advance(grads);
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

void expect_trains(halfstep::Precision precision) {
  const auto model = std::make_shared<Net>();
  precision.quantise("middle.weight");
  MixedPrecision mp(precision, *model);
  mp.backward(mp.forward([&] { return model->forward(at::randn({8, 16})).to(at::kFloat).square().mean(); }));
  EXPECT_TRUE(mp.inspect_grads().finite()) << precision.name();
}

TEST(FromTorchAmp, FieldsOfRecipes) {
  auto precision = halfstep::Precision::fp8_delayed();
  precision.recipe->input_grad.left.format = precision.recipe->weight_grad.left.format =
      halfstep::Format::E4M3;
  expect_trains(precision);
  auto rowwise = halfstep::Precision::fp8_rowwise();
  rowwise.recipe->weight_grad.quantised = false;
  expect_trains(rowwise);

  const auto changed = [](halfstep::Recipe recipe, const std::function<void(halfstep::Recipe&)>& change) {
    const halfstep::Recipe before = recipe;
    change(recipe);
    EXPECT_NE(recipe, before);
    expect_trains(halfstep::Precision::with_recipe(recipe));
  };
  changed(halfstep::Recipe::fp8_current(),
          [](auto& recipe) { recipe.input_grad.quantised = recipe.weight_grad.quantised = false; });
  changed(halfstep::Recipe::fp8_current(), [](auto& recipe) {
    for (auto* product : {&recipe.forward, &recipe.input_grad, &recipe.weight_grad})
      product->left.scale = product->right.scale = halfstep::ScaleRule::PowerOfTwo;
  });
  changed(halfstep::Recipe::fp8_current(),
          [](auto& recipe) { recipe.forward.left.scale = halfstep::ScaleRule::PowerOfTwo; });
  changed(halfstep::Recipe::fp8_current(), [](auto& recipe) {
    recipe.weight_grad.left.hadamard = recipe.weight_grad.right.hadamard = true;
    recipe.input_grad.left.stochastic = recipe.weight_grad.left.stochastic = true;
  });
  changed(halfstep::Recipe::fp8_block(), [](auto& recipe) {
    recipe.forward.left.block_across = recipe.weight_grad.right.block_across = 128;
  });
  changed(halfstep::Recipe::fp8_block(),
          [](auto& recipe) { recipe.forward.right.block_across = recipe.input_grad.right.block_across = 1; });
  changed(halfstep::Recipe::fp8_block(), [](auto& recipe) {
    recipe.input_grad.left.block_across = recipe.weight_grad.left.block_across = 128;
  });
  changed(halfstep::Recipe::nvfp4(), [](auto& recipe) {
    recipe.weight_grad.left.hadamard = recipe.weight_grad.right.hadamard = false;
    recipe.input_grad.left.stochastic = recipe.weight_grad.left.stochastic = false;
    recipe.forward.right.block_across = recipe.input_grad.right.block_across = 1;
  });
  changed(halfstep::Recipe::mxfp8(), [](auto& recipe) {
    recipe.forward.right.block_across = recipe.input_grad.right.block_across = 16;
  });
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
