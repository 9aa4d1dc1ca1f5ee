// Convolutions of low images of few pixels inside an AutocastScope.
#include <gtest/gtest.h>
#include <halfstep/autocast.h>
#include <torch/torch.h>

#include "support/live_bytes.h"
#include "tensor/update_path.h"

namespace halfstep::testing {
namespace convolution_test {

/// Low products where the processor lacks instructions for them, too.
constexpr AutocastOptions kLowProducts{.allow_emulated = true, .products_in_fp32 = false};

struct Case {
  const char* what;
  std::vector<int64_t> input, weight;
  std::vector<int64_t> stride{1, 1}, padding{1, 1}, dilation{1, 1};
  bool has_bias = false, channels_last = false;
};

const Case kCases[] = {
    {.what = "4 x 4", .input = {3, 40, 4, 4}, .weight = {24, 40, 3, 3}, .has_bias = true},
    {.what = "channels last", .input = {3, 40, 4, 4}, .weight = {24, 40, 3, 3}, .channels_last = true},
    {.what = "2 x 2", .input = {5, 33, 2, 2}, .weight = {7, 33, 3, 3}},
    {.what = "a pixel", .input = {6, 32, 1, 1}, .weight = {9, 32, 3, 3}, .has_bias = true},
    {.what = "halved", .input = {2, 20, 4, 4}, .weight = {6, 20, 3, 3}, .stride = {2, 2}},
    {.what = "halved to a row",
     .input = {2, 20, 2, 8},
     .weight = {6, 20, 2, 8},
     .stride = {3, 2},
     .padding = {0, 3}},
    {.what = "one tap",
     .input = {4, 16, 3, 4},
     .weight = {32, 16, 1, 1},
     .stride = {2, 2},
     .padding = {0, 0}},
    {.what = "one tap, channels last",
     .input = {4, 16, 2, 2},
     .weight = {32, 16, 1, 1},
     .padding = {0, 0},
     .channels_last = true},
    {.what = "spread",
     .input = {2, 12, 3, 5},
     .weight = {5, 12, 3, 2},
     .stride = {2, 1},
     .padding = {1, 0},
     .dilation = {2, 3},
     .has_bias = true},
    {.what = "padded further than the window",
     .input = {2, 8, 1, 2},
     .weight = {5, 8, 1, 2},
     .padding = {1, 1}},
    {.what = "pixels that no window reaches",
     .input = {2, 8, 4, 4},
     .weight = {5, 8, 2, 2},
     .stride = {3, 3},
     .padding = {0, 0}},
};

struct Tensors {
  at::Tensor input, weight, bias{}, output_weights{};

  Tensors to(at::ScalarType type) const {
    const auto leaf = [&](const at::Tensor& of) {
      return of.defined() ? of.detach().to(type).requires_grad_() : at::Tensor();
    };
    return {leaf(input), leaf(weight), leaf(bias), output_weights.to(type)};
  }
};

at::Tensor convolution(const Case& of, const Tensors& tensors) {
  return at::conv2d(tensors.input, tensors.weight, tensors.bias, of.stride, of.padding, of.dilation);
}

Tensors tensors_of(const Case& of, at::ScalarType low) {
  at::manual_seed(11);
  Tensors made{.input = at::randn(of.input).to(low), .weight = at::randn(of.weight).to(low)};
  if (of.channels_last) made.input = made.input.contiguous(at::MemoryFormat::ChannelsLast);
  if (of.has_bias) made.bias = at::randn({of.weight[0]}).to(low);
  made.output_weights = at::randn(convolution(of, made).sizes()).to(low);
  return made;
}

/// The output and the gradients of input, weight and bias.
struct Result {
  std::vector<at::Tensor> tensors;
  bool is_ours;
};

Result result_of(const Case& of, const Tensors& tensors, bool in_scope) {
  at::Tensor output;
  {
    std::optional<AutocastScope> scope;
    if (in_scope) scope.emplace(tensors.input.scalar_type(), OpPolicy::standard(), kLowProducts);
    output = convolution(of, tensors);
  }
  std::vector<at::Tensor> leaves{tensors.input, tensors.weight};
  if (tensors.bias.defined()) leaves.push_back(tensors.bias);
  Result result{.tensors = torch::autograd::grad({output}, leaves, {tensors.output_weights}),
                .is_ours = output.grad_fn()->name().find("NarrowConvolution") != std::string::npos};
  result.tensors.insert(result.tensors.begin(), output.detach());
  return result;
}

// The operands are low numbers, so their products are exact in FP32. The sum of n products, in any order, is
// within n 2^-24 of the sum of their magnitudes, which the same convolution of magnitudes gives; then one
// rounding to the low type, of half a unit, 2^-8 or 2^-11, or of half of FP16's smallest number. A bias is a
// product with 1.
TEST(NarrowConvolution, IsFp64sRoundedOnce) {
  for (const auto low : {at::kBFloat16, at::kHalf}) {
    for (const Case& each : kCases) {
      SCOPED_TRACE(std::string(each.what) + ", " + toString(low));
      const Tensors given = tensors_of(each, low);
      const Result here = result_of(each, given.to(low), true);
      ASSERT_TRUE(here.is_ours);
      const auto exact = result_of(each, given.to(at::kDouble), false).tensors;
      const auto absolute = [](const at::Tensor& of) { return of.defined() ? of.abs() : at::Tensor(); };
      const Tensors magnitudes{absolute(given.input), absolute(given.weight), absolute(given.bias),
                               absolute(given.output_weights)};
      const auto sums = result_of(each, magnitudes.to(at::kDouble), false).tensors;
      const double terms = static_cast<double>(std::max(given.weight.numel(), given.output_weights.numel()));
      const double half_unit = low == at::kBFloat16 ? 0x1p-8 : 0x1p-11;
      for (std::size_t i = 0; i < exact.size(); ++i) {
        EXPECT_EQ(here.tensors[i].scalar_type(), low);
        const at::Tensor bound = exact[i].abs() * half_unit + sums[i] * (terms * 0x1p-24 * 1.01) + 0x1p-25;
        const at::Tensor off = (here.tensors[i].to(at::kDouble) - exact[i]).abs();
        EXPECT_TRUE((off <= bound).all().item<bool>()) << "result " << i << ": " << (off / bound).max();
      }
    }
  }
}

// Programs write to outputs, and take views of them.
TEST(NarrowConvolution, ResultsLieInTheOrderOfLibTorchs) {
  for (const Case& each : kCases) {
    const Tensors given = tensors_of(each, at::kBFloat16).to(at::kBFloat16);
    const Result here = result_of(each, given, true), stock = result_of(each, given, false);
    EXPECT_FALSE(stock.is_ours);
    for (std::size_t i = 0; i < 2; ++i)
      EXPECT_EQ(here.tensors[i].strides(), stock.tensors[i].strides()) << each.what << ", result " << i;
  }
  const Case& first = kCases[0];
  const Tensors given = tensors_of(first, at::kBFloat16).to(at::kBFloat16);
  const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kLowProducts);
  EXPECT_NO_THROW(convolution(first, given).mul_(2).sum().backward());
}

// On as many threads as before: oneDNN divides the sums of a product differently for other numbers of them.
TEST(NarrowConvolution, HasTheSameBitsEachTime) {
  const Case wide{.what = "", .input = {40, 256, 4, 4}, .weight = {192, 256, 3, 3}};
  const Tensors given = tensors_of(wide, at::kBFloat16);
  const Result first = result_of(wide, given.to(at::kBFloat16), true);
  for (int again = 0; again < 3; ++again) {
    const Result other = result_of(wide, given.to(at::kBFloat16), true);
    for (std::size_t i = 0; i < other.tensors.size(); ++i)
      EXPECT_TRUE(at::equal(first.tensors[i], other.tensors[i])) << "result " << i;
  }
}

// Their matrix of windows would have more than 128 MiB; in parts of it a sum of weights would be rounded more
// than once.
TEST(NarrowConvolution, OfVeryManyImagesIsLibTorchs) {
  for (const int64_t images : {1000, 7300}) {
    const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kLowProducts);
    const at::Tensor weight = at::randn({8, 64, 3, 3}).requires_grad_();
    const at::Tensor output = at::conv2d(at::randn({images, 64, 4, 4}), weight, {}, 1, 1);
    EXPECT_EQ(output.grad_fn()->name().find("NarrowConvolution") != std::string::npos, images == 1000);
  }
}

// Views whose numbers are not those in memory, and gradients that have no memory.
TEST(NarrowConvolution, OfOtherTensorsIsRight) {
  const Case& of = kCases[0];
  const Tensors given = tensors_of(of, at::kBFloat16);
  const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kLowProducts);
  const auto run = [&](const at::Tensor& input, const at::Tensor& grad) {
    const at::Tensor leaf = given.weight.detach().requires_grad_();
    const at::Tensor output = at::conv2d(input, leaf, {}, of.stride, of.padding, of.dilation);
    return torch::autograd::grad({output}, {leaf}, {grad})[0];
  };
  const at::Tensor expected = run(given.input, given.output_weights);
  EXPECT_TRUE(at::equal(run(at::_neg_view(given.input), given.output_weights), -expected));
  EXPECT_TRUE(at::equal(run(given.input, at::_neg_view(given.output_weights)), -expected));
  const at::Tensor zero =
      at::_efficientzerotensor(given.output_weights.sizes(), given.output_weights.options());
  EXPECT_EQ(run(given.input, zero).abs().max().item<float>(), 0);
}

TEST(NarrowConvolution, KeepsWhatLibTorchsKeepsAndNoMatrixOfWindows) {
  const Case& of = kCases[0];
  const Tensors given = tensors_of(of, at::kBFloat16);
  const auto kept = [&](bool ours) {
    std::optional<AtenOnCpu> stock;
    if (!ours) stock.emplace();
    const Tensors leaves = given.to(at::kFloat);
    const LiveBytes bytes;
    at::Tensor output;
    {
      const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kLowProducts);
      output = convolution(of, leaves);
    }
    EXPECT_EQ(output.grad_fn()->name().find("NarrowConvolution") != std::string::npos, ours);
    return bytes.live();
  };
  EXPECT_LE(kept(true), kept(false));
}

TEST(NarrowConvolution, BehindASiluItKeepsWhatTheSiluKeepsAlready) {
  const at::Tensor x = at::randn({20, 64, 4, 4}).to(at::kBFloat16);
  const at::Tensor first = at::randn({64, 64, 3, 3}).to(at::kBFloat16).requires_grad_(),
                   second = first.detach().clone().requires_grad_();
  const auto kept = [&](bool repeat) {
    AutocastOptions options = kLowProducts;
    options.repeat_outputs = repeat;
    const LiveBytes bytes;
    at::Tensor output;
    {
      const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), options);
      output = at::conv2d(at::silu(at::conv2d(x, first, {}, 1, 1)), second, {}, 1, 1);
    }
    return bytes.live();
  };
  EXPECT_EQ(kept(false) - kept(true), static_cast<int64_t>(x.nbytes()));
}

TEST(NarrowConvolution, CanBeDifferentiatedTwice) {
  const Case& of = kCases[0];
  const Tensors given = tensors_of(of, at::kHalf);
  const auto second = [&](at::ScalarType type) {
    const Tensors leaves = given.to(type);
    std::optional<AutocastScope> scope;
    if (type == at::kHalf) scope.emplace(type, OpPolicy::standard(), kLowProducts);
    const at::Tensor loss = convolution(of, leaves).to(at::kDouble).square().sum() / 100;
    const auto first = torch::autograd::grad({loss}, {leaves.input}, {}, true, /*create_graph=*/true);
    return torch::autograd::grad({first[0].to(at::kDouble).square().sum() / 100}, {leaves.weight})[0];
  };
  const at::Tensor here = second(at::kHalf), exact = second(at::kDouble);
  // Output, its gradient, the first gradient, its own, and the convolutions of these: at most eight roundings
  // lie on a way from a product to the result.
  EXPECT_LE((here.to(at::kDouble) - exact).norm().item<double>(), 8 * 0x1p-11 * exact.norm().item<double>());
}

}  // namespace convolution_test
}  // namespace halfstep::testing
