#include "autocast/type_gate.h"

#include <halfstep/error.h>

#include <algorithm>

namespace halfstep {
namespace {

const PrecisionSupport& bf16_of(const std::vector<PrecisionSupport>& precisions) {
  return *std::find_if(precisions.begin(), precisions.end(),
                       [](const PrecisionSupport& support) { return support.precision == "BF16"; });
}

}  // namespace

PrecisionSupport bf16_support(const Machine& machine) {
  if (machine.cuda.devices.empty()) return bf16_of(machine.cpu.precisions);
  const auto least_able = std::max_element(
      machine.cuda.devices.begin(), machine.cuda.devices.end(), [](const CudaDevice& a, const CudaDevice& b) {
        return bf16_of(a.precisions).support < bf16_of(b.precisions).support;  // native is the lowest
      });
  return bf16_of(least_able->precisions);
}

void check_may_open(c10::ScalarType low, const AutocastOptions& options, const PrecisionSupport& bf16) {
  HALFSTEP_CHECK(!c10::isFloat8Type(low) && low != c10::ScalarType::Float4_e2m1fn_x2, "AutocastScope: ", low,
                 " needs a scale for each tensor, which a cast does not have. "
                 "Use at::kBFloat16 or at::kHalf.");
  HALFSTEP_CHECK(low == c10::ScalarType::BFloat16 || low == c10::ScalarType::Half,
                 "AutocastScope: cannot lower to ", low,
                 ". Use at::kBFloat16, or at::kHalf with a GradScaler; for full precision open no scope.");
  if (low != c10::ScalarType::BFloat16 || options.allow_emulated) return;
  HALFSTEP_CHECK(
      bf16.support == Support::native, "AutocastScope: BF16 is ", to_string(bf16.support), " here (",
      bf16.reason,
      "), so it would be slower than FP32. Use at::kHalf with a GradScaler, or FP32 without a scope; "
      "to study BF16's numerics at any speed, pass {.allow_emulated = true}.");
}

}  // namespace halfstep
