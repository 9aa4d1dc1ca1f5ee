// The processor's own FP32 to FP16 conversion, for where cpu_features().avx2 (which asks for F16C too).
#pragma once

#include <cstddef>
#include <cstdint>

namespace halfstep::sweep {

/// Nearest even or toward zero, not saturating; NaN payloads are kept and quieted.
void f16c_codes(const float* values, std::size_t count, bool toward_zero, std::uint16_t* codes);

}  // namespace halfstep::sweep
