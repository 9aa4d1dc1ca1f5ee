// Layer norm of BF16 and FP16 rows whose gain and bias are of the same type, where our kernels do not run:
// one launch that reads the rows as they are, instead of a copy of each argument in FP32.
//
// LibTorch's kernels for it compute in FP32 (acc_type in native/cuda/layer_norm_kernel.cu, 2.13): mean,
// variance and product have FP32's bits, and the output is rounded once, as the product behind it would.
#include <ATen/ops/layer_norm.h>

#include "ops/own_ops.h"
#include "tensor/update_path.h"

namespace halfstep {
namespace {

struct LayerNormArguments {
  explicit LayerNormArguments(OpArguments given)
      : input(given[0].toTensor()),
        normalized_shape(given[1].toDimVector()),
        gain(given_tensor(given[2])),
        bias(given_tensor(given[3])),
        eps(given[4].toDouble()) {}

  const at::Tensor& input;
  at::DimVector normalized_shape;
  std::optional<at::Tensor> gain, bias;
  double eps;
};

bool takes(OpArguments given) {
  const LayerNormArguments arguments(given);
  const at::Tensor& input = arguments.input;
  const auto like_input = [&](const std::optional<at::Tensor>& tensor) {
    return !tensor || (is_plain(*tensor) && tensor->scalar_type() == input.scalar_type());
  };
  return is_low(input) && !kernels_serve(input) && is_plain(input) && like_input(arguments.gain) &&
         like_input(arguments.bias);
}

at::Tensor run(OpArguments given) {
  const LayerNormArguments arguments(given);
  return at::layer_norm(arguments.input, arguments.normalized_shape, arguments.gain, arguments.bias,
                        arguments.eps);
}

}  // namespace

OwnOp low_rows_layer_norm() {
  return {.op = "layer_norm",
          .rule = OpRule::Fp32,
          .takes = [](OpArguments given, const OpContext&) { return takes(given); },
          .run = [](OpArguments given, const OpContext&) { return run(given); },
          .run_again = run};
}

}  // namespace halfstep
