#include "autocast/type_gate.h"

#include <halfstep/error.h>

#include <algorithm>
#include <map>

namespace halfstep {
namespace {

const PrecisionSupport& support_of(const std::string& precision,
                                   const std::vector<PrecisionSupport>& precisions) {
  return *std::find_if(precisions.begin(), precisions.end(),
                       [&](const PrecisionSupport& support) { return support.precision == precision; });
}

void check_bf16_is_native_on(const std::string& device, const std::vector<PrecisionSupport>& precisions) {
  const PrecisionSupport& bf16 = support_of("BF16", precisions);
  const bool has_fp16 = support_of("FP16", precisions).support == Support::Native;
  HALFSTEP_CHECK(bf16.support == Support::Native, "AutocastScope: BF16 is ", to_string(bf16.support), " on ",
                 device, " (", bf16.reason, "), so it would be slower than FP32. Use ",
                 has_fp16 ? "at::kHalf with a GradScaler, or " : "", "FP32: Precision::fp32(), or no scope",
                 has_fp16 ? "" : " (FP16 is not native here either)",
                 "; to study BF16's numerics at any speed, set allow_emulated in AutocastOptions, which is "
                 "MixedPrecisionOptions::autocast in a training loop.");
}

const std::string& name_of(c10::ScalarType compute) {
  static const std::string fp32 = "FP32", bf16 = "BF16", fp16 = "FP16";
  if (compute == c10::ScalarType::Float) return fp32;
  if (compute == c10::ScalarType::BFloat16) return bf16;
  HALFSTEP_CHECK(compute == c10::ScalarType::Half, "precision_support: asked for ", compute,
                 ". Ask for at::kFloat, at::kBFloat16 or at::kHalf.");
  return fp16;
}

}  // namespace

const Machine& this_machine() {
  static const Machine machine = inspect_machine();
  return machine;
}

PrecisionSupport worst_support(const Machine& machine, const std::string& precision) {
  if (machine.cuda.devices.empty()) return support_of(precision, machine.cpu.precisions);
  const auto on = [&](const CudaDevice& gpu) { return support_of(precision, gpu.precisions); };
  const auto& gpus = machine.cuda.devices;
  return on(*std::max_element(gpus.begin(), gpus.end(), [&](const CudaDevice& a, const CudaDevice& b) {
    return on(a).support < on(b).support;  // Native, Emulated, Unavailable
  }));
}

const PrecisionSupport& precision_support(c10::ScalarType compute) {
  static const std::map<std::string, PrecisionSupport> found = [] {
    std::map<std::string, PrecisionSupport> all;
    for (const char* precision : {"FP32", "BF16", "FP16"}) {
      all[precision] = worst_support(this_machine(), precision);
    }
    return all;
  }();
  return found.at(name_of(compute));
}

void check_can_be_low(c10::ScalarType low) {
  HALFSTEP_CHECK(!c10::isFloat8Type(low) && low != c10::ScalarType::Float4_e2m1fn_x2, "AutocastScope: ", low,
                 " needs a scale for each tensor, which a cast does not have. "
                 "Use at::kBFloat16 or at::kHalf.");
  HALFSTEP_CHECK(low == c10::ScalarType::BFloat16 || low == c10::ScalarType::Half,
                 "AutocastScope: cannot lower to ", low,
                 ". Use at::kBFloat16, or at::kHalf with a GradScaler; for full precision open no scope.");
}

void check_bf16_is_native(const Machine& machine) {
  if (machine.cuda.devices.empty()) check_bf16_is_native_on("this CPU", machine.cpu.precisions);
  for (const CudaDevice& gpu : machine.cuda.devices) check_bf16_is_native_on(gpu.name, gpu.precisions);
}

}  // namespace halfstep
