// What the processor can do, asked once.
#pragma once

namespace halfstep {

struct CpuFeatures {
  bool avx2 = false;         // with FMA and F16C, which came together
  bool avx512 = false;       // F, BW, DQ, VL: the set our kernels use
  bool avx512_bf16 = false;  // dot products of BF16 pairs
  bool avx512_fp16 = false;  // arithmetic in FP16
  bool amx_bf16 = false;     // matrix tiles of BF16
  bool amx_int8 = false;     // matrix tiles of INT8
  bool amx_fp16 = false;     // matrix tiles of FP16
};

/// The processor that runs us, and only what its operating system lets us use: wide registers and tiles
/// that the system does not save count as absent. Constant for the life of the process.
const CpuFeatures& cpu_features();

/// Whether this process may multiply BF16 in tiles, with AVX-512 and its BF16 instructions beside them. Linux
/// lets a process use tiles once it has asked; the first call asks, which oneDNN's first BF16 product also
/// does.
bool may_use_amx_bf16();

}  // namespace halfstep
