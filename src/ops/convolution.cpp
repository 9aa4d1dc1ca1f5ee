// Convolutions of BF16 or FP16 on the CPU whose outputs are narrow images, as one matrix product: the last
// stages of a network, a few pixels and hundreds of channels, for which LibTorch's convolutions take longer
// in BF16 than in FP32. Wider images are LibTorch's, whose convolutions of them are the faster ones.
//
// Backward keeps what LibTorch's keeps: the input and the weight, low. The matrix of windows, as many times
// as large as the input as a window has pixels, is made anew.
#include <ATen/Parallel.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <optional>
#include <type_traits>
#include <vector>

#include "ops/low_product.h"
#include "ops/own_ops.h"
#include "tensor/update_path.h"

namespace halfstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Of an image, before and behind. LibTorch's convolutions of wider ones are as fast.
constexpr int64_t kMostPixels = 16;
/// Of a matrix of windows, which is there while a product is made.
constexpr int64_t kMostBytes = int64_t{128} << 20;

/// A convolution as a product: a row for each pixel of the result, with an element for each channel and tap
/// of the weights, in the order that the weights of an output channel have.
struct Windows {
  std::array<int64_t, 2> sizes{};      // of an image of the result
  std::vector<std::int32_t> places{};  // row by row, tap by tap: the pixel of the image, or outside()
  int64_t taps = 0, image_pixels = 0;

  int64_t rows() const { return sizes[0] * sizes[1]; }
  /// The element behind the last one of a channel, which is zero.
  std::int32_t outside() const { return static_cast<std::int32_t>(image_pixels); }
};

struct Geometry {
  std::array<int64_t, 2> input, kernel, stride, padding, dilation, output;

  Geometry(at::IntArrayRef input_sizes, at::IntArrayRef weight_sizes, const std::vector<int64_t>& strides,
           const std::vector<int64_t>& paddings, const std::vector<int64_t>& dilations)
      : input{input_sizes[2], input_sizes[3]},
        kernel{weight_sizes[2], weight_sizes[3]},
        stride{strides[0], strides.back()},
        padding{paddings[0], paddings.back()},
        dilation{dilations[0], dilations.back()} {
    for (std::size_t i = 0; i < 2; ++i) {
      const int64_t room = input[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1;
      output[i] = room < 0 ? 0 : room / stride[i] + 1;
    }
  }

  /// The windows of the input that make the output, or those of the output's gradient that make the input's.
  Windows windows(bool of_input) const {
    const auto &from = of_input ? input : output, &to = of_input ? output : input;
    Windows windows{.sizes = to, .taps = kernel[0] * kernel[1], .image_pixels = from[0] * from[1]};
    for (int64_t row = 0; row < windows.rows(); ++row)
      for (int64_t tap = 0; tap < windows.taps; ++tap) {
        const auto y = place(0, row / to[1], tap / kernel[1], of_input);
        const auto x = place(1, row % to[1], tap % kernel[1], of_input);
        windows.places.push_back(y && x ? static_cast<std::int32_t>(*y * from[1] + *x) : windows.outside());
      }
    return windows;
  }

 private:
  std::optional<int64_t> place(std::size_t side, int64_t at, int64_t tap, bool of_input) const {
    const int64_t ahead = tap * dilation[side] - padding[side];
    const int64_t place = of_input ? at * stride[side] + ahead : at - ahead;
    if (of_input) return place >= 0 && place < input[side] ? std::optional(place) : std::nullopt;
    if (place < 0 || place % stride[side] != 0 || place / stride[side] >= output[side]) return std::nullopt;
    return place / stride[side];
  }
};

/// The elements of an image, channel by channel, with a zero behind each channel.
void read_image(const at::Tensor& images, int64_t image, std::uint16_t* to) {
  const auto* from = static_cast<const std::uint16_t*>(images.const_data_ptr()) + image * images.stride(0);
  for (int64_t c = 0; c < images.size(1); ++c, from += images.stride(1), *to++ = 0)
    for (int64_t y = 0; y < images.size(2); ++y)
      for (int64_t x = 0; x < images.size(3); ++x) *to++ = from[y * images.stride(2) + x * images.stride(3)];
}

/// `loop` with the number of taps as a constant where it is a usual one, so that loops over it are unrolled.
template <typename Loop>
void with_taps(int64_t taps, Loop loop) {
  if (taps == 9) return loop(std::integral_constant<int64_t, 9>());
  if (taps == 1) return loop(std::integral_constant<int64_t, 1>());
  loop(taps);
}

at::Tensor matrix_of(const Windows& windows, const at::Tensor& images) {
  const int64_t channels = images.size(1), columns = channels * windows.taps,
                padded = windows.image_pixels + 1;
  const at::Tensor matrix = at::empty({images.size(0) * windows.rows(), columns}, images.options());
  auto* const all = static_cast<std::uint16_t*>(matrix.mutable_data_ptr());
  at::parallel_for(0, images.size(0), /*grain_size=*/1, [&](int64_t begin, int64_t end) {
    std::vector<std::uint16_t> image(static_cast<std::size_t>(channels * padded));
    for (int64_t i = begin; i < end; ++i) {
      read_image(images, i, image.data());
      std::uint16_t* to = all + i * windows.rows() * columns;
      with_taps(windows.taps, [&](auto taps) {
        for (int64_t row = 0; row < windows.rows(); ++row) {
          const std::int32_t* const places = windows.places.data() + row * taps;
          const std::uint16_t* channel = image.data();
          for (int64_t c = 0; c < channels; ++c, channel += padded, to += taps)
            for (int64_t tap = 0; tap < taps; ++tap) to[tap] = channel[places[tap]];
        }
      });
    }
  });
  return matrix;
}

/// A row for each pixel of each image, with its channels.
at::Tensor rows_of(const at::Tensor& images) {
  return images.permute({0, 2, 3, 1}).reshape({-1, images.size(1)});
}

/// `images` convolved with the columns of `weights`.
at::Tensor convolved(const Windows& windows, const at::Tensor& images, const at::Tensor& weights,
                     const std::optional<at::Tensor>& bias, at::MemoryFormat order) {
  const at::Tensor rows = product_of(matrix_of(windows, images), weights, bias);
  const at::Tensor made = at::empty({images.size(0), weights.size(1), windows.sizes[0], windows.sizes[1]},
                                    images.options().memory_format(order));
  made.permute({0, 2, 3, 1}).copy_(rows.view({images.size(0), windows.sizes[0], windows.sizes[1], -1}));
  return made;
}

at::MemoryFormat order_of(const at::Tensor& input, const at::Tensor& weight) {
  const auto last = at::MemoryFormat::ChannelsLast;
  const bool is_last = input.suggest_memory_format() == last || weight.suggest_memory_format() == last;
  return is_last ? last : at::MemoryFormat::Contiguous;  // as LibTorch decides
}

class NarrowConvolution : public torch::autograd::Function<NarrowConvolution> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, std::vector<int64_t> stride,
                            std::vector<int64_t> padding, std::vector<int64_t> dilation) {
    const Geometry geometry(input.sizes(), weight.sizes(), stride, padding, dilation);
    context->save_for_backward({input, weight});
    context->saved_data["stride"] = std::move(stride);
    context->saved_data["padding"] = std::move(padding);
    context->saved_data["dilation"] = std::move(dilation);
    context->saved_data["has_bias"] = bias.has_value();
    return convolved(geometry.windows(/*of_input=*/true), input, weight.reshape({weight.size(0), -1}).t(),
                     bias, order_of(input, weight));
  }

  static variable_list backward(AutogradContext* context, const variable_list& output_grads) {
    // Where backward runs inside the scope, its products are ours all the same.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &grad = output_grads[0];
    const auto ints = [&](const char* name) { return context->saved_data[name].toIntVector(); };
    const auto stride = ints("stride"), padding = ints("padding"), dilation = ints("dilation");
    const bool wants_input = context->needs_input_grad(0), wants_weight = context->needs_input_grad(1),
               wants_bias = context->saved_data["has_bias"].toBool() && context->needs_input_grad(2);
    if (at::GradMode::is_enabled() || !is_plain(grad)) {
      // In an operation that can be differentiated again.
      auto [x, w, b] = at::convolution_backward(grad, input, weight, at::IntArrayRef{weight.size(0)}, stride,
                                                padding, dilation, /*transposed=*/false,
                                                /*output_padding=*/{0, 0}, /*groups=*/1,
                                                {wants_input, wants_weight, wants_bias});
      return {x, w, b, {}, {}, {}};
    }
    const Geometry geometry(input.sizes(), weight.sizes(), stride, padding, dilation);
    at::Tensor input_grad, weight_grad, bias_grad;
    if (wants_input)
      input_grad = convolved(geometry.windows(/*of_input=*/false), grad,
                             weight.permute({0, 2, 3, 1}).reshape({-1, weight.size(1)}), std::nullopt,
                             order_of(input, weight));
    if (!wants_weight && !wants_bias) return {input_grad, {}, {}, {}, {}, {}};
    const at::Tensor rows = rows_of(grad);
    if (wants_weight)
      weight_grad =
          product_of(rows.t(), matrix_of(geometry.windows(/*of_input=*/true), input)).view(weight.sizes());
    if (wants_bias) bias_grad = rows.sum({0}, /*keepdim=*/false, at::kFloat).to(grad.scalar_type());
    return {input_grad, weight_grad, bias_grad, {}, {}, {}};
  }
};

bool is_operand(const at::Tensor& tensor) {
  return is_low(tensor) && kernels_serve(tensor) && !tensor.is_nested() && is_plain(tensor);
}

bool is_one_or_two(const std::vector<int64_t>& values, int64_t least) {
  return (values.size() == 1 || values.size() == 2) && std::ranges::min(values) >= least;
}

/// The arguments of aten::conv2d, of which sizes that do not fit are LibTorch's to refuse.
bool takes(OpArguments given, const OpContext& context) {
  const at::Tensor &input = given[0].toTensor(), &weight = given[1].toTensor();
  const auto bias = given_tensor(given[2]);
  if (context.products_in_fp32 || !is_operand(input) || !is_operand(weight) || (bias && !is_operand(*bias)))
    return false;
  if (input.dim() != 4 || weight.dim() != 4 || input.numel() == 0 || weight.numel() == 0 ||
      input.size(1) != weight.size(1) || given[6].toInt() != 1 ||
      (bias && (bias->dim() != 1 || bias->size(0) != weight.size(0))))
    return false;
  const auto stride = given[3].toIntVector(), padding = given[4].toIntVector(),
             dilation = given[5].toIntVector();
  if (!is_one_or_two(stride, 1) || !is_one_or_two(padding, 0) || !is_one_or_two(dilation, 1)) return false;
  const Geometry geometry(input.sizes(), weight.sizes(), stride, padding, dilation);
  const int64_t from = geometry.input[0] * geometry.input[1], to = geometry.output[0] * geometry.output[1];
  if (from > kMostPixels || to <= 0 || to > kMostPixels) return false;
  // Forward has windows of the input, backward of the output's gradient.
  const int64_t elements =
      std::max(to * weight.size(1), from * weight.size(0)) * weight.size(2) * weight.size(3);
  return input.size(0) * elements * input.element_size() <= kMostBytes;
}

at::Tensor run(OpArguments given, const OpContext&) {
  return NarrowConvolution::apply(given[0].toTensor(), given[1].toTensor(), given_tensor(given[2]),
                                  given[3].toIntVector(), given[4].toIntVector(), given[5].toIntVector());
}

}  // namespace

OwnOp low_narrow_convolution() {
  return {.op = "conv2d",
          .rule = OpRule::Low,
          .takes = takes,
          .run = run,
          .run_again = nullptr,  // not cheap
          .of_cast_arguments = true};
}

}  // namespace halfstep
