#include "report/numbers.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <string_view>

namespace halfstep::report {
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

}  // namespace

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

}  // namespace halfstep::report
