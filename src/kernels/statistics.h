// Statistics of raw arrays, in one pass.
#pragma once

#include <halfstep/tensor_stats.h>

#include <cstddef>

#include "kernels/dispatch.h"

namespace halfstep {

/// Adds `count` values in FP32, BF16 or FP16 to `stats`. Other formats are refused.
///
/// Every table gives the same bits. The sum of one call is made of 16 FP64 sums, of elements i, i + 16, ...,
/// which are then added as a tree; `stats.sum` takes it with one more addition.
void add_statistics(Format format, const void* values, std::size_t count, TensorStats& stats,
                    const KernelTable& table = kernels());

}  // namespace halfstep
