// For Python: the lists by which torch.amp casts on CUDA, on the test accelerator's key, and its counts. A
// library that ctypes.CDLL and torch.ops.load_library open; never in one process with Halfstep, which has its
// own policy there.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "support/counting_device.h"

// The lists are LibTorch's and name things as it does inside.
using namespace at;            // NOLINT
using namespace at::autocast;  // NOLINT

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define IN_LOW_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define IN_FP32_BY_ARGUMENT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define IN_THE_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(IN_LOW_PRECISION)
  AT_FORALL_FP32(IN_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(IN_FP32_BY_ARGUMENT)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(IN_THE_WIDEST)
}

extern "C" {

int64_t counting_launches() { return halfstep::testing::device_counts().launches; }
int64_t counting_waits() { return halfstep::testing::device_counts().waits; }
void counting_reset() { halfstep::testing::reset_device_counts(); }
}
