// Numbers for a person who glances at them: few digits, steady widths, and NaN where it is NaN.
#pragma once

#include <cstdint>
#include <string>

namespace halfstep::cli {

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

/// "10,741,003".
std::string grouped_text(int64_t value);

/// In whole seconds at the finest: "12s", "3m05s", "1h02m", "2d03h".
std::string duration_text(double seconds);

/// What took that long, however short: "45.0ms", "3.20s", "3m05s".
std::string fine_duration_text(double seconds);

}  // namespace halfstep::cli
