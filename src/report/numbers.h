// Numbers as a person reads them. Locale-free: a comma in a thousand, a point before a fraction.
#pragma once

#include <cstdint>
#include <string>

#include "base/with_commas.h"

namespace halfstep::report {

/// So many significant digits, the end's zeros kept: "1.620", "10.81", "0.0003000", "1.2e-09"; "NaN", "Inf".
std::string digits(double value, int significant = 4);

/// The same without the zeros: "1.62", "3e-04".
std::string short_digits(double value, int significant = 4);

/// With a suffix for powers of 1,000: "12.3k", "4.56M".
std::string with_suffix(double value, int significant = 3);

/// "834 kB", "1.23 GB": powers of 1,000.
std::string bytes_text(double bytes);

/// "2 h 03 min", "3 min 20 s", "12.3 s", "4.5 ms".
std::string duration(double seconds);

/// Of a share: "2.1%", "0.03%", "<0.01%".
std::string percent(double share);

/// "+2.01 ± 0.05": to the second digit of the uncertainty.
std::string with_uncertainty(double value, double half_width);

/// "a" or "as" by the count: "1 step", "3 steps", "1,200 steps".
std::string counted(int64_t count, const std::string& singular);

}  // namespace halfstep::report
