#include "base/cpu_features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace halfstep {
namespace {

// The compiler's builtin does not know AMX-FP16 before gcc 13: CPUID leaf 7, subleaf 1, EAX bit 21
// (Intel instruction set extensions reference, 319433, table 1-3).
bool cpuid_says_amx_fp16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && ((eax >> 21) & 1u);
}

CpuFeatures detect() {
  // __builtin_cpu_supports also asks the operating system whether it saves the wide registers.
  __builtin_cpu_init();
  CpuFeatures f;
  f.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  f.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  f.avx512_bf16 = f.avx512 && __builtin_cpu_supports("avx512bf16");
  f.avx512_fp16 = f.avx512 && __builtin_cpu_supports("avx512fp16");
  const bool tiles = __builtin_cpu_supports("amx-tile");
  f.amx_bf16 = tiles && __builtin_cpu_supports("amx-bf16");
  f.amx_int8 = tiles && __builtin_cpu_supports("amx-int8");
  f.amx_fp16 = tiles && cpuid_says_amx_fp16();
  return f;
}

// The kernel's numbers (arch/x86/include/uapi/asm/prctl.h, Documentation/arch/x86/xstate.rst): the system
// headers of Debian 12 have them under names of their own.
constexpr long kRequestStatePermission = 0x1023, kTileData = 18;

}  // namespace

bool may_use_amx_bf16() {
  static const bool may = [] {
    const CpuFeatures& f = cpu_features();
    return f.avx512 && f.avx512_bf16 && f.amx_bf16 &&
           syscall(SYS_arch_prctl, kRequestStatePermission, kTileData) == 0;
  }();
  return may;
}

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

}  // namespace halfstep
