// A linear layer and a convolution in a scope, forward and backward: products by LibTorch's low operations
// and by FP32 ones of the same operands. One thread, interleaved in one run.
//
//   product_bench [--rounds N]
//
// Exits with 1 where a scope that is asked for neither takes the slower way by more than a tenth.
#include <halfstep/autocast.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "support/program.h"
#include "support/statistics.h"

namespace {

using at::Tensor;
using halfstep::AutocastScope;

struct Shape {
  const char* name;
  std::vector<int64_t> input, weight;
};

const Shape kShapes[] = {{"linear 256 x 512 -> 1536", {256, 512}, {1536, 512}},
                         {"conv2d 3 x 3, 32 -> 32, 16 x 16", {4, 32, 16, 16}, {32, 32, 3, 3}}};

Tensor step(const Shape& shape, const Tensor& x, const Tensor& w, at::ScalarType low,
            std::optional<bool> in_fp32) {
  Tensor y;
  {
    const AutocastScope scope(low, halfstep::OpPolicy::standard(),
                              {.allow_emulated = true, .products_in_fp32 = in_fp32});
    y = shape.weight.size() == 2 ? at::linear(x, w) : at::conv2d(x, w);
  }
  const auto grads = torch::autograd::grad({y}, {x, w}, {at::ones_like(y)});
  return grads[1];
}

int run(int argc, char** argv) {
  const int rounds = argc == 3 && std::strcmp(argv[1], "--rounds") == 0 ? std::atoi(argv[2]) : 9;
  at::set_num_threads(1);
  bool all_fast = true;
  std::printf("%-34s%-10s%12s%12s%12s%10s\n", "", "", "LibTorch's", "in FP32", "as chosen", "ratio");
  for (const Shape& shape : kShapes)
    for (const at::ScalarType low : {at::kBFloat16, at::kHalf}) {
      at::manual_seed(1);
      const Tensor x = at::randn(shape.input).requires_grad_(), w = at::randn(shape.weight).requires_grad_();
      const std::optional<bool> ways[] = {false, true, std::nullopt};
      const Tensor exact = step(shape, x, w, low, false);
      for (const auto& way : ways) {
        const double off = ((step(shape, x, w, low, way) - exact).norm() / exact.norm()).item<double>();
        if (off > 0x1p-8) {
          std::printf("%s: gradients of the two ways differ by %.2g\n", shape.name, off);
          return 1;
        }
      }
      std::vector<double> milliseconds[3];
      for (int round = 0; round < rounds; ++round)
        for (int i = 0; i < 3; ++i) {
          const auto begin = std::chrono::steady_clock::now();
          step(shape, x, w, low, ways[i]);
          milliseconds[i].push_back(
              std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
        }
      const double stock = bench::median(milliseconds[0]), fp32 = bench::median(milliseconds[1]),
                   chosen = bench::median(milliseconds[2]);
      std::printf("%-34s%-10s%9.2f ms%9.2f ms%9.2f ms%10.2f\n", shape.name, c10::toString(low), stock, fp32,
                  chosen, fp32 / stock);
      all_fast = all_fast && chosen <= 1.1 * std::min(stock, fp32);
    }
  return all_fast ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return bench::exit_code_of(run, argc, argv); }
