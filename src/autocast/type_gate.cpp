#include "autocast/type_gate.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <halfstep/error.h>

namespace halfstep {

MachineForAutocast machine_for_autocast(c10::DeviceType device) {
  MachineForAutocast machine{.cpu = cpu_features()};
  if (device == c10::DeviceType::CUDA) {
    const auto& cuda = at::detail::getCUDAHooks();
    machine.has_cuda = cuda.hasCUDA() && cuda.deviceCount() > 0;
    // Of the hooks that also exist in a LibTorch without CUDA, this is the one that tells compute capability
    // 8.0 of the current device.
    machine.cuda_has_bf16 = machine.has_cuda && cuda.supportsBFloat16ConvolutionWithCuDNNv8();
  }
  return machine;
}

void check_may_open(c10::ScalarType low, const AutocastOptions& options, const MachineForAutocast& machine) {
  const bool on_cpu = options.device == c10::DeviceType::CPU;
  const bool on_cuda = options.device == c10::DeviceType::CUDA;
  HALFSTEP_CHECK(on_cpu || on_cuda, "AutocastScope: device is ", options.device, ", expected CPU or CUDA.");
  HALFSTEP_CHECK(
      on_cpu || machine.has_cuda,
      "AutocastScope: device is CUDA, but this LibTorch sees no CUDA device. Use a CUDA build of LibTorch "
      "on a machine with a GPU, or at::kCPU.");
  HALFSTEP_CHECK(!c10::isFloat8Type(low) && low != c10::ScalarType::Float4_e2m1fn_x2, "AutocastScope: ", low,
                 " needs a scale for each tensor, which a cast does not have. "
                 "Use at::kBFloat16 or at::kHalf.");
  HALFSTEP_CHECK(low == c10::ScalarType::BFloat16 || low == c10::ScalarType::Half,
                 "AutocastScope: cannot lower to ", low,
                 ". Use at::kBFloat16, or at::kHalf with a GradScaler; for full precision open no scope.");

  if (low != c10::ScalarType::BFloat16 || options.allow_emulated) return;
  constexpr const char* kInstead =
      " Use at::kHalf with a GradScaler, or FP32 without a scope; to study BF16's numerics at any speed, "
      "pass "
      "{.allow_emulated = true}.";
  HALFSTEP_CHECK(
      on_cuda || machine.cpu.amx_bf16 || machine.cpu.avx512_bf16,
      "AutocastScope: this processor has neither AMX-BF16 nor AVX512-BF16, so BF16 would be imitated, more "
      "slowly than FP32.",
      kInstead);
  HALFSTEP_CHECK(on_cpu || machine.cuda_has_bf16,
                 "AutocastScope: this GPU is below compute capability 8.0 and has no BF16 arithmetic.",
                 kInstead);
}

}  // namespace halfstep
