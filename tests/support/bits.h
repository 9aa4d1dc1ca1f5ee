// Tensors compared bit by bit.
#pragma once

#include <ATen/ATen.h>

#include <bit>
#include <cstdint>
#include <cstring>

namespace halfstep::testing {

inline bool bit_equal(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         (a.numel() == 0 || std::memcmp(a.detach().contiguous().const_data_ptr(),
                                        b.detach().contiguous().const_data_ptr(), a.nbytes()) == 0);
}

/// How many FP32 numbers apart: 0 for the same bits, 1 for neighbours.
inline int64_t ulps_apart(float a, float b) {
  const auto place = [](float x) -> int64_t {
    const auto bits = std::bit_cast<std::int32_t>(x);
    return bits < 0 ? -int64_t{bits & 0x7fffffff} : int64_t{bits};
  };
  return std::abs(place(a) - place(b));
}

/// The largest distance between elements of two FP32 tensors.
inline int64_t most_ulps_apart(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor left = a.detach().contiguous(), right = b.detach().contiguous();
  int64_t most = 0;
  for (int64_t i = 0; i < left.numel(); ++i)
    most = std::max(most, ulps_apart(left.const_data_ptr<float>()[i], right.const_data_ptr<float>()[i]));
  return most;
}

}  // namespace halfstep::testing
