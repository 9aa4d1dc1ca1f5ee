#include "support/bandwidth.h"

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>

namespace bench {
namespace {

// Compiled for each width: on what a program for any x86-64 gets, a core would be short of instructions.
__attribute__((target_clones("avx512f", "avx2", "default"))) void add_to_each(float* values,
                                                                              std::int64_t count,
                                                                              float addend) {
  for (std::int64_t i = 0; i < count; ++i) values[i] += addend;
}

}  // namespace

ReadModifyWrite::ReadModifyWrite(std::int64_t bytes, at::Device device)
    : array_(at::ones({bytes / 4}, device)) {}

void ReadModifyWrite::run() {
  if (!array_.is_cpu()) {
    array_.add_(0x1p-20);
    return;
  }
  constexpr std::int64_t kGrain = 1 << 16;
  float* values = array_.data_ptr<float>();
  at::parallel_for(0, array_.numel(), kGrain, [values](std::int64_t begin, std::int64_t end) {
    add_to_each(values + begin, end - begin, 0x1p-20f);
  });
}

double ReadModifyWrite::bytes_moved() const { return 2.0 * static_cast<double>(array_.nbytes()); }

}  // namespace bench
