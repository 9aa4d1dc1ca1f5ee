// Numbers as a person reads them. Locale-free: a comma in a thousand, a point before a fraction.
#pragma once

#include <cstdint>
#include <string>

namespace halfstep {

/// "1,234,567".
std::string with_commas(int64_t value);

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

// For a column of a terminal: few digits, steady widths.

/// "3.2145".
std::string loss_text(double loss);

/// Three significant digits: "3.00e-4".
std::string lr_text(double lr);

/// Three significant digits: "0.123", "12.3", "1.23e+5".
std::string short_text(double value);

/// Three significant digits and a suffix: "812", "12.3k", "1.20M".
std::string si_text(double value);

/// "41%", "<1%".
std::string percent_text(double share);

/// All digits while there are few: "65536".
std::string loss_scale_text(double loss_scale);

/// In whole seconds at the finest: "12s", "3m05s", "1h02m", "2d03h".
std::string duration_text(double seconds);

/// What took that long, however short: "45.0ms", "3.20s", "3m05s".
std::string fine_duration_text(double seconds);

}  // namespace halfstep
