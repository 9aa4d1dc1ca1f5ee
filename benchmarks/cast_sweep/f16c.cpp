#include "f16c.h"

#include <immintrin.h>

namespace halfstep::sweep {

void f16c_codes(const float* values, std::size_t count, bool toward_zero, std::uint16_t* codes) {
  // A group of four, or what is left of one: values that are not there are zeros, and their codes are
  // dropped.
  for (std::size_t i = 0; i < count; i += 4) {
    const std::size_t here = count - i < 4 ? count - i : 4;
    float in[4] = {};
    std::uint16_t out[8];
    for (std::size_t j = 0; j < here; ++j) in[j] = values[i + j];
    const __m128 group = _mm_loadu_ps(in);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), toward_zero
                                                          ? _mm_cvtps_ph(group, _MM_FROUND_TO_ZERO)
                                                          : _mm_cvtps_ph(group, _MM_FROUND_TO_NEAREST_INT));
    for (std::size_t j = 0; j < here; ++j) codes[i + j] = out[j];
  }
}

}  // namespace halfstep::sweep
