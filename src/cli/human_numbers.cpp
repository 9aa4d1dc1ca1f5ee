#include "cli/human_numbers.h"

#include <array>
#include <cmath>
#include <cstdio>

namespace halfstep::cli {
namespace {

std::string format(const char* pattern, double value) {
  std::array<char, 64> text;
  std::snprintf(text.data(), text.size(), pattern, value);
  return text.data();
}

std::string not_finite(double value) { return std::isnan(value) ? "NaN" : value > 0 ? "Inf" : "-Inf"; }

// "3.00e-04" is one column longer than it needs to be.
std::string scientific(double value) {
  std::string text = format("%.2e", value);
  const size_t zero = text.find('e') + 2;
  if (text[zero] == '0') text.erase(zero, 1);
  return text;
}

// The bounds are where rounding carries into another digit: 9.995 is 10.0.
std::string three_digits(double value) {
  const double size = std::fabs(value);
  if (size < 0.9995) return format("%.3f", value);
  if (size < 9.995) return format("%.2f", value);
  if (size < 99.95) return format("%.1f", value);
  return format("%.0f", value);
}

}  // namespace

std::string loss_text(double loss) {
  if (!std::isfinite(loss)) return not_finite(loss);
  return std::fabs(loss) < 1e5 ? format("%.4f", loss) : scientific(loss);
}

std::string lr_text(double lr) {
  if (!std::isfinite(lr)) return not_finite(lr);
  return lr == 0 ? "0" : scientific(lr);
}

std::string short_text(double value) {
  if (!std::isfinite(value)) return not_finite(value);
  if (value == 0) return "0";
  const double size = std::fabs(value);
  return size >= 0.01 && size < 9999.5 ? three_digits(value) : scientific(value);
}

std::string si_text(double value) {
  if (!std::isfinite(value)) return not_finite(value);
  if (value == 0) return "0";
  constexpr std::array kSuffixes{"", "k", "M", "G", "T"};
  size_t suffix = 0;
  while (std::fabs(value) >= 999.5 && suffix + 1 < kSuffixes.size()) {
    value /= 1000;
    ++suffix;
  }
  return three_digits(value) + kSuffixes[suffix];
}

std::string percent_text(double share) {
  if (!std::isfinite(share)) return not_finite(share);
  return share > 0 && share < 0.005 ? "<1%" : format("%.0f%%", 100 * share);
}

std::string loss_scale_text(double loss_scale) {
  if (!std::isfinite(loss_scale)) return not_finite(loss_scale);
  const bool whole = loss_scale == std::floor(loss_scale) && std::fabs(loss_scale) < 1e9;
  return whole ? format("%.0f", loss_scale) : short_text(loss_scale);
}

std::string grouped_text(int64_t value) {
  std::string text = std::to_string(value);
  const size_t first = value < 0 ? 2 : 1;
  for (size_t end = text.size(); end > first + 2; end -= 3)
    text.insert(text.begin() + static_cast<std::ptrdiff_t>(end - 3), ',');
  return text;
}

std::string duration_text(double seconds) {
  if (!std::isfinite(seconds)) return not_finite(seconds);
  constexpr int64_t kMinute = 60, kHour = 60 * kMinute, kDay = 24 * kHour;
  const auto whole = static_cast<int64_t>(std::llround(std::fmin(seconds, 1e12)));
  const auto two = [](int64_t large, char large_unit, int64_t small, char small_unit) {
    return std::to_string(large) + large_unit + (small < 10 ? "0" : "") + std::to_string(small) + small_unit;
  };
  if (whole >= kDay) return two(whole / kDay, 'd', whole % kDay / kHour, 'h');
  if (whole >= kHour) return two(whole / kHour, 'h', whole % kHour / kMinute, 'm');
  if (whole >= kMinute) return two(whole / kMinute, 'm', whole % kMinute, 's');
  return std::to_string(whole) + "s";
}

std::string fine_duration_text(double seconds) {
  if (!std::isfinite(seconds) || seconds >= 9.995) return duration_text(seconds);
  return seconds < 0.9995 ? three_digits(1000 * seconds) + "ms" : three_digits(seconds) + "s";
}

}  // namespace halfstep::cli
