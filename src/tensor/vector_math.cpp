#include "tensor/vector_math.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/erf.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log.h>
#include <ATen/ops/tanh.h>

#include <mutex>

namespace halfstep {

void settle_vector_math() {
  static std::once_flag once;
  std::call_once(once, [] {
    const at::NoGradGuard no_grad;
    const at::Tensor few = at::full({16}, 0.5, at::kFloat);  // too few for a second thread
    for (const at::Tensor& result : {at::exp(few), at::log(few), at::tanh(few), at::erf(few)}) (void)result;
  });
}

}  // namespace halfstep
