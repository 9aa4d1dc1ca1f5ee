// Convolutions of the narrow images in the last stages of ResNet-18, 128 images at a time.
#include "block_bench/block_bench.h"

namespace bench {
namespace {

constexpr int64_t kImages = 128, kSide = 3;

Block convolution_block(int64_t inputs, int64_t outputs, int64_t pixels, int64_t stride) {
  const auto convolution = [stride](const Tensors& given) {
    return at::conv2d(given[0], given[1], /*bias=*/{}, {stride, stride}, {kSide / 2, kSide / 2});
  };
  const int64_t made = (pixels - 1) / stride + 1;
  const double operations = 2.0 * kImages * made * made * inputs * outputs * kSide * kSide;
  const auto leaf = [](at::IntArrayRef sizes) { return at::randn(sizes).to(at::kBFloat16).requires_grad_(); };
  const auto text = [](int64_t number) { return std::to_string(number); };
  return {.name = "convolution",
          .shape = text(inputs) + " to " + text(outputs) + ", " + text(pixels) + "x" + text(pixels) +
                   (stride > 1 ? " halved" : ""),
          .inputs = {leaf({kImages, inputs, pixels, pixels}), leaf({outputs, inputs, kSide, kSide})},
          .ours = convolution,
          .libtorch = convolution,
          .exact = convolution,
          .forward_operations = operations,
          .backward_operations = 2 * operations};
}

}  // namespace

std::vector<Block> convolution_blocks() {
  return {convolution_block(512, 512, 4, 1), convolution_block(128, 128, 4, 1),
          convolution_block(256, 512, 2, 2), convolution_block(256, 256, 2, 1),
          convolution_block(512, 512, 1, 1)};
}

}  // namespace bench
