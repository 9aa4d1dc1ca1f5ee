#include "base/cpu_features.h"

#include <cpuid.h>

namespace halfstep {
namespace {

struct Cpuid {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Cpuid cpuid(unsigned leaf, unsigned subleaf) {
  Cpuid r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool bit(unsigned word, int position) { return (word >> position) & 1u; }

CpuFeatures detect() {
  // __builtin_cpu_supports also asks the operating system whether it saves the wide registers.
  __builtin_cpu_init();
  CpuFeatures f;
  f.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && bit(cpuid(1, 0).ecx, 29);
  f.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  // Bits of leaf 7, Intel SDM vol. 2A, table 3-8; the builtin of gcc 12 does not know them all.
  const Cpuid features = cpuid(7, 0), more = cpuid(7, 1);
  f.avx512_bf16 = f.avx512 && bit(more.eax, 5);
  f.avx512_fp16 = f.avx512 && bit(features.edx, 23);
  const bool tiles = bit(features.edx, 24);
  f.amx_bf16 = tiles && bit(features.edx, 22);
  f.amx_int8 = tiles && bit(features.edx, 25);
  return f;
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

}  // namespace halfstep
