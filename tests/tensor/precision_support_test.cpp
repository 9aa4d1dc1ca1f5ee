#include "tensor/machine_probes.h"

#include <gtest/gtest.h>

namespace halfstep {
namespace {

constexpr bool kWithOneDnn = true;

Support support_of(const std::string& precision, const std::vector<PrecisionSupport>& all) {
  for (const auto& p : all) {
    if (p.precision == precision) return p.support;
  }
  ADD_FAILURE() << "no row for " << precision;
  return Support::Unavailable;
}

std::string reason_for(const std::string& precision, const std::vector<PrecisionSupport>& all) {
  for (const auto& p : all) {
    if (p.precision == precision) return p.reason;
  }
  return "";
}

// Processors as Intel documents them.
const CpuFeatures haswell = {.avx2 = true};
const CpuFeatures skylake = {.avx2 = true, .avx512 = true};
const CpuFeatures cooper_lake = {.avx2 = true, .avx512 = true, .avx512_bf16 = true};
const CpuFeatures sapphire_rapids = {.avx2 = true,
                                     .avx512 = true,
                                     .avx512_bf16 = true,
                                     .avx512_fp16 = true,
                                     .amx_bf16 = true,
                                     .amx_int8 = true};
const CpuFeatures granite_rapids = {.avx2 = true,
                                    .avx512 = true,
                                    .avx512_bf16 = true,
                                    .avx512_fp16 = true,
                                    .amx_bf16 = true,
                                    .amx_int8 = true,
                                    .amx_fp16 = true};

TEST(CpuPrecisions, Bf16IsNativeFromCooperLakeOnAndByTilesFromSapphireRapidsOn) {
  EXPECT_EQ(support_of("BF16", cpu_precisions(haswell, kWithOneDnn)), Support::Emulated);
  EXPECT_EQ(support_of("BF16", cpu_precisions(skylake, kWithOneDnn)), Support::Emulated);
  EXPECT_EQ(support_of("BF16", cpu_precisions(cooper_lake, kWithOneDnn)), Support::Native);
  EXPECT_EQ(reason_for("BF16", cpu_precisions(cooper_lake, kWithOneDnn)).find("AVX512-BF16"), 0u);
  EXPECT_EQ(support_of("BF16", cpu_precisions(sapphire_rapids, kWithOneDnn)), Support::Native);
  EXPECT_EQ(reason_for("BF16", cpu_precisions(sapphire_rapids, kWithOneDnn)).find("AMX-BF16"), 0u);
}

TEST(CpuPrecisions, Fp16IsNativeOnlyWithAmxFp16) {
  EXPECT_EQ(support_of("FP16", cpu_precisions(haswell, kWithOneDnn)), Support::Emulated);
  EXPECT_EQ(support_of("FP16", cpu_precisions(sapphire_rapids, kWithOneDnn)), Support::Emulated);
  EXPECT_EQ(support_of("FP16", cpu_precisions(granite_rapids, kWithOneDnn)), Support::Native);
}

TEST(CpuPrecisions, WithoutOneDnnNothingBelowFp32IsNative) {
  const auto all = cpu_precisions(granite_rapids, !kWithOneDnn);
  EXPECT_EQ(support_of("FP32", all), Support::Native);
  EXPECT_EQ(support_of("TF32", all), Support::Unavailable);
  EXPECT_EQ(support_of("BF16", all), Support::Emulated);
  EXPECT_EQ(support_of("FP16", all), Support::Emulated);
}

// CUDA C++ Programming Guide: FP16 arithmetic from 5.3, FP16 tensor cores from 7.0, BF16 and TF32 from 8.0.
TEST(CudaPrecisions, FollowTheComputeCapability) {
  struct Row {
    int major, minor;
    Support tf32, bf16, fp16;
  };
  for (const Row& row : {
           Row{5, 2, Support::Unavailable, Support::Emulated, Support::Emulated},
           Row{5, 3, Support::Unavailable, Support::Emulated, Support::Native},
           Row{6, 1, Support::Unavailable, Support::Emulated, Support::Native},
           Row{7, 5, Support::Unavailable, Support::Emulated, Support::Native},
           Row{8, 0, Support::Native, Support::Native, Support::Native},
           Row{9, 0, Support::Native, Support::Native, Support::Native},
           Row{12, 0, Support::Native, Support::Native, Support::Native},
       }) {
    const auto all = cuda_precisions(row.major, row.minor);
    EXPECT_EQ(support_of("FP32", all), Support::Native) << row.major << '.' << row.minor;
    EXPECT_EQ(support_of("TF32", all), row.tf32) << row.major << '.' << row.minor;
    EXPECT_EQ(support_of("BF16", all), row.bf16) << row.major << '.' << row.minor;
    EXPECT_EQ(support_of("FP16", all), row.fp16) << row.major << '.' << row.minor;
  }
  EXPECT_EQ(reason_for("FP16", cuda_precisions(7, 0)), "tensor cores");
  EXPECT_NE(reason_for("FP16", cuda_precisions(6, 1)), "tensor cores");
}

}  // namespace
}  // namespace halfstep
