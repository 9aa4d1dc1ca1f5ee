#include "words/numbers.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace halfstep {
namespace {

std::string fixed(double value, int decimals) {
  char text[400];
  return {text, std::to_chars(text, text + sizeof text, value, std::chars_format::fixed, decimals).ptr};
}

std::string not_finite(double value) { return std::isnan(value) ? "NaN" : value > 0 ? "Inf" : "-Inf"; }

/// The power of ten of the first digit, once the value is rounded to so many digits.
int exponent_of(double value, int significant) {
  if (value == 0) return 0;
  char text[64];
  const auto end =
      std::to_chars(text, text + sizeof text, value, std::chars_format::scientific, significant - 1).ptr;
  const std::string_view written(text, static_cast<size_t>(end - text));
  return std::atoi(std::string(written.substr(written.find('e') + 1)).c_str());
}

struct Suffix {
  double factor;
  const char* letter;
};

std::string suffixed(double value, int significant, const Suffix* begin, const Suffix* end) {
  const Suffix* chosen = begin;
  while (chosen + 1 != end && std::abs(value) >= 0.9995 * chosen[1].factor) ++chosen;
  return short_digits(value / chosen->factor, significant) + chosen->letter;
}

std::string format(const char* pattern, double value) {
  std::array<char, 64> text;
  std::snprintf(text.data(), text.size(), pattern, value);
  return text.data();
}

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

std::string with_commas(int64_t value) {
  std::string text = std::to_string(value);
  const int first = value < 0 ? 1 : 0;
  for (int place = static_cast<int>(text.size()) - 3; place > first; place -= 3)
    text.insert(static_cast<size_t>(place), 1, ',');
  return text;
}

std::string digits(double value, int significant) {
  if (!std::isfinite(value)) return not_finite(value);
  const int exponent = exponent_of(value, significant);
  if (exponent < -5 || exponent > 8) {
    char text[64];
    return {
        text,
        std::to_chars(text, text + sizeof text, value, std::chars_format::scientific, significant - 1).ptr};
  }
  if (exponent >= significant - 1) return with_commas(std::llround(value));
  return fixed(value, significant - 1 - exponent);
}

std::string short_digits(double value, int significant) {
  std::string text = digits(value, significant);
  if (!std::isfinite(value) || text.find('.') == std::string::npos) return text;
  const size_t tail = std::min(text.find('e'), text.size());
  size_t end = text.find_last_not_of('0', tail - 1);
  if (text[end] == '.') --end;
  return text.substr(0, end + 1) + text.substr(tail);
}

std::string with_suffix(double value, int significant) {
  static constexpr std::array<Suffix, 5> kSuffixes{
      {{1, ""}, {1e3, "k"}, {1e6, "M"}, {1e9, "G"}, {1e12, "T"}}};
  return suffixed(value, significant, kSuffixes.data(), kSuffixes.data() + kSuffixes.size());
}

std::string bytes_text(double bytes) {
  static constexpr std::array<Suffix, 5> kSuffixes{
      {{1, " B"}, {1e3, " kB"}, {1e6, " MB"}, {1e9, " GB"}, {1e12, " TB"}}};
  return suffixed(bytes, 3, kSuffixes.data(), kSuffixes.data() + kSuffixes.size());
}

std::string duration(double seconds) {
  if (!std::isfinite(seconds)) return not_finite(seconds);
  if (seconds >= 1e15) return digits(seconds, 3) + " s";
  if (seconds >= 3599.5) {
    const auto minutes = static_cast<int64_t>(std::llround(seconds / 60));
    const std::string rest = std::to_string(minutes % 60);
    return with_commas(minutes / 60) + " h " + (rest.size() < 2 ? "0" : "") + rest + " min";
  }
  if (seconds >= 99.5) {
    const auto whole = static_cast<int64_t>(std::llround(seconds));
    return std::to_string(whole / 60) + " min " + std::to_string(whole % 60) + " s";
  }
  if (seconds >= 0.9995 || seconds <= 0) return short_digits(seconds, 3) + " s";
  if (seconds >= 0.9995e-3) return short_digits(seconds * 1e3, 3) + " ms";
  return short_digits(seconds * 1e6, 3) + " µs";
}

std::string percent(double share) {
  if (!std::isfinite(share)) return not_finite(share);
  const double value = share * 100;
  if (value > 0 && value < 0.01) return "<0.01%";
  return short_digits(value, value >= 10 ? 3 : 2) + "%";
}

std::string with_uncertainty(double value, double half_width) {
  constexpr int kDigits = 2, kMostDecimals = 8;
  if (!std::isfinite(value) || !std::isfinite(half_width)) return digits(value) + " ± " + digits(half_width);
  const int decimals =
      half_width > 0 ? std::clamp(kDigits - 1 - exponent_of(half_width, kDigits), 0, kMostDecimals) : 3;
  const std::string size = fixed(std::abs(value), decimals);
  const bool zero = size.find_first_not_of("0.") == std::string::npos;
  return (zero ? "" : value < 0 ? "−" : "+") + size + " ± " + fixed(half_width, decimals);
}

std::string counted(int64_t count, const std::string& singular) {
  return with_commas(count) + " " + singular + (count == 1 ? "" : "s");
}

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

}  // namespace halfstep
