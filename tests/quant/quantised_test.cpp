// Quantised matrices and their products beside FP64 arithmetic.
#include "quant/quantised.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

namespace halfstep::testing {
namespace {

std::vector<Recipe> all_recipes() {
  return {Recipe::fp8_delayed(), Recipe::fp8_current(), Recipe::fp8_rowwise(),
          Recipe::fp8_block(),   Recipe::mxfp8(),       Recipe::mxfp8(ScaleRule::E8m0Floor),
          Recipe::nvfp4()};
}

Quantised quantised_as(const at::Tensor& matrix, const OperandRule& rule, bool sums_over_rows,
                       std::uint32_t tensor) {
  QuantiseCounts counts;
  return quantised(
      matrix,
      {.rule = rule, .sums_over_rows = sums_over_rows, .random = {.seed = 5, .tensor = tensor, .cast = 1}},
      counts);
}

/// Values of one matrix that a product sees, in FP64: code x scale x outer scale, all exact there.
at::Tensor exact_values(const Quantised& matrix) {
  Quantised without_outer = matrix;
  without_outer.outer_scale = 1;
  if (matrix.rule.scale != ScaleRule::Fp32 || !matrix.scales.defined())
    return decoded(without_outer).to(at::kDouble) * double{matrix.outer_scale};
  without_outer.scales = at::Tensor();
  const at::Tensor scales =
      matrix.scales.to(at::kDouble);  // [n, 1] or [1, n]: one for each row across the sum
  return decoded(without_outer).to(at::kDouble) * scales * double{matrix.outer_scale};
}

struct Shape {
  std::int64_t tokens, in, out;
};

void check_product(const Quantised& left, const Quantised& right, at::ScalarType output,
                   const std::string& what) {
  const at::Tensor a = left.sums_over_rows ? exact_values(left).t() : exact_values(left);
  const at::Tensor b = right.sums_over_rows ? exact_values(right) : exact_values(right).t();
  const at::Tensor expected = a.mm(b), sum_of_sizes = a.abs().mm(b.abs());
  const at::Tensor found = product(left, right, {}, output).to(at::kDouble);
  // Each of n products is exact; n additions in FP32 round by 2^-24 each; then at most three factors and one
  // rounding to the output.
  const double n = static_cast<double>(a.size(1));
  const double unit = output == at::kBFloat16 ? 0x1p-8 : output == at::kHalf ? 0x1p-11 : 0;
  const at::Tensor bound =
      sum_of_sizes * ((n + 3) * 0x1p-24) + expected.abs() * (unit * (1 + 0x1p-8)) + 1e-30;
  const double worst = ((found - expected).abs() / bound).max().item<double>();
  EXPECT_LE(worst, 1) << what;
}

TEST(QuantisedProducts, AreThoseOfTheDecodedOperandsWithinTheErrorOfFp32Sums) {
  at::manual_seed(1);
  for (const Shape& shape : {Shape{64, 96, 48}, Shape{33, 77, 50}, Shape{1, 16, 1}, Shape{130, 260, 131}})
    for (const Recipe& recipe : all_recipes())
      for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
        const std::string what =
            recipe.name + " " + std::to_string(shape.tokens) + " x " + std::to_string(shape.in);
        at::Tensor x = at::randn({shape.tokens, shape.in});
        x.select(1, shape.in / 2).mul_(300);  // an outlier channel
        x = x.to(type);
        const at::Tensor w = (at::randn({shape.out, shape.in}) * 0.05).to(type);
        const at::Tensor dy = (at::randn({shape.tokens, shape.out}) * 1e-4).to(type);
        check_product(quantised_as(x, recipe.forward.left, false, 1),
                      quantised_as(w, recipe.forward.right, false, 2), at::kBFloat16, what + " forward");
        check_product(quantised_as(dy, recipe.input_grad.left, false, 3),
                      quantised_as(w, recipe.input_grad.right, true, 2), at::kBFloat16,
                      what + " input gradient");
        check_product(quantised_as(dy, recipe.weight_grad.left, true, 3),
                      quantised_as(x, recipe.weight_grad.right, true, 1), at::kFloat,
                      what + " weight gradient");
        // A weight of [in, out], as GPT-2 has it.
        check_product(quantised_as(x, recipe.forward.left, false, 1),
                      quantised_as(w.t().contiguous(), recipe.forward.right, true, 2), at::kHalf,
                      what + " [in, out]");
      }
}

TEST(QuantisedProducts, AddTheBiasInFp32AndRoundOnce) {
  at::manual_seed(2);
  const at::Tensor x = at::randn({8, 32}), w = at::randn({16, 32}), bias = at::randn({16});
  const OperandRule rule{};
  const Quantised a = quantised_as(x, rule, false, 1), b = quantised_as(w, rule, false, 2);
  const at::Tensor in_fp32 = product(a, b, {}, at::kFloat) + bias;
  EXPECT_TRUE(at::equal(product(a, b, bias, at::kBFloat16), in_fp32.to(at::kBFloat16)));
}

TEST(QuantisedMatrices, AreTheSameForEveryLayoutAndNumberOfThreads) {
  at::manual_seed(3);
  const at::Tensor x = at::randn({257, 384});
  const int threads = at::get_num_threads();
  for (const Recipe& recipe : all_recipes())
    for (const OperandRule& rule : {recipe.forward.left, recipe.forward.right, recipe.weight_grad.left})
      for (const bool over_rows : {false, true}) {
        at::set_num_threads(1);
        const Quantised one = quantised_as(x, rule, over_rows, 1);
        at::set_num_threads(2);
        const Quantised two = quantised_as(x, rule, over_rows, 1);
        const Quantised strided = quantised_as(at::cat({x, x}, 1).narrow(1, 0, 384), rule, over_rows, 1);
        const Quantised transposed = quantised_as(x.t().contiguous().t(), rule, over_rows, 1);
        for (const Quantised* other : {&two, &strided, &transposed}) {
          EXPECT_TRUE(at::equal(one.codes, other->codes)) << recipe.name;
          EXPECT_EQ(one.scales.defined(), other->scales.defined());
          if (one.scales.defined()) {
            EXPECT_TRUE(at::equal(one.scales, other->scales)) << recipe.name;
          }
          EXPECT_EQ(one.outer_scale, other->outer_scale);
        }
      }
  at::set_num_threads(threads);
}

TEST(QuantisedProducts, OfScalesThatTogetherLeaveFp32AreStillRight) {
  const OperandRule row{.scale = ScaleRule::Fp32, .block_across = 1};
  for (const OperandRule& rule : {row, OperandRule{.scale = ScaleRule::Fp32}}) {
    QuantiseCounts counts;
    const at::Tensor x = at::full({4, 16}, 2.5e38f), w = at::full({8, 16}, 1e-10f);
    const at::Tensor y =
        product(quantised(x, {.rule = rule}, counts), quantised(w, {.rule = rule}, counts), {}, at::kFloat);
    EXPECT_NEAR(y.min().item<double>(), 16 * 2.5e28, 1e24);
    EXPECT_NEAR(y.max().item<double>(), 16 * 2.5e28, 1e24);
    // Without rows, and with nothing to sum.
    const at::Tensor none = at::empty({0, 16}), flat = at::empty({4, 0}), thin = at::empty({8, 0});
    EXPECT_EQ(
        product(quantised(none, {.rule = rule}, counts), quantised(w, {.rule = rule}, counts), {}, at::kFloat)
            .numel(),
        0);
    EXPECT_EQ(product(quantised(flat, {.rule = rule}, counts), quantised(thin, {.rule = rule}, counts), {},
                      at::kFloat)
                  .abs()
                  .max()
                  .item<float>(),
              0);
  }
}

TEST(QuantisedMatrices, AStochasticCastWithOneScaleIsStochastic) {
  QuantiseCounts counts;
  const OperandRule rule{.format = Format::E5M2, .stochastic = true};
  at::Tensor x = at::full({1, 4096}, 1.1f);
  x[0][0] = 57344;
  const at::Tensor values =
      decoded(quantised(x, {.rule = rule, .random = {.seed = 3, .tensor = 0, .cast = 0}}, counts))
          .narrow(1, 1, 4095);
  // Values of 1 and 1.25; a mean of 4,095 is off by 0.122 / 64 on average: five times that.
  EXPECT_NEAR(values.mean().item<double>(), 1.1, 0.01);
}

TEST(QuantisedMatrices, WithoutElementsHaveProducts) {
  for (const Recipe& recipe : all_recipes()) {
    const Quantised none = quantised_as(at::empty({0, 32}), recipe.forward.left, false, 1);
    const Quantised w = quantised_as(at::randn({16, 32}), recipe.forward.right, false, 2);
    EXPECT_EQ(product(none, w, {}, at::kBFloat16).sizes(), (std::vector<std::int64_t>{0, 16})) << recipe.name;
  }
}

TEST(Hadamard, IsOrthogonalAndCancelsInAProduct) {
  at::manual_seed(4);
  for (const std::int64_t tokens : {16, 48, 50, 7}) {
    const at::Tensor a = at::randn({tokens, 20}), b = at::randn({tokens, 12});
    const at::Tensor turned = hadamard(a, true, 9).t().mm(hadamard(b, true, 9));
    // 16 products of 2^-24 each, three times over.
    const at::Tensor bound = a.abs().t().mm(b.abs()) * (64 * 0x1p-24);
    EXPECT_TRUE(((turned - a.t().mm(b)).abs() <= bound * 4).all().item<bool>()) << tokens;
    EXPECT_TRUE(at::equal(hadamard(a.t(), false, 9), hadamard(a, true, 9).t()));
    EXPECT_EQ(at::equal(hadamard(a, true, 10), hadamard(a, true, 9)), tokens < 16)
        << "another seed, other signs";
  }
}

TEST(StochasticGrads, HaveTheMeanOfWhatWasRounded) {
  at::manual_seed(6);
  const at::Tensor dy = at::randn({16, 64});
  OperandRule rule = Recipe::nvfp4().input_grad.left;
  at::Tensor sum = at::zeros({16, 64}, at::kDouble);
  constexpr int kCasts = 4000;
  QuantiseCounts counts;
  for (std::uint32_t cast = 0; cast < kCasts; ++cast)
    sum += decoded(quantised(dy, {.rule = rule, .random = {.seed = 1, .tensor = 2, .cast = cast}}, counts));
  // The widest step of E2M1 is 2 of 6 units of a block's amax, |dy| <= 4.2: a deviation of at most half a
  // step, over sqrt(4000); six deviations. The scale itself is E4M3, to nearest, and may saturate by 2^-4.
  const at::Tensor off = (sum / kCasts - dy.to(at::kDouble)).abs();
  const double amax = dy.abs().max().item<double>();
  const at::Tensor saturated = dy.abs().to(at::kDouble) * 0x1p-4;
  EXPECT_TRUE((off <= 6 * (amax / 6 * 1.0625) / std::sqrt(kCasts) + saturated).all().item<bool>());
}

}  // namespace
}  // namespace halfstep::testing
