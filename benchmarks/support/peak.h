// How many products and sums the processor computes when it does nothing else.
#pragma once

namespace bench {

/// Multiplications and additions a second, of FP32 by the widest vectors that there are, from registers: the
/// best of several short bursts, in which `threads` threads compute at once.
double fp32_peak(int threads);

/// The same of BF16 in AMX's tiles. Only where Halfstep's kernels are "amx".
double amx_bf16_peak(int threads);

}  // namespace bench
