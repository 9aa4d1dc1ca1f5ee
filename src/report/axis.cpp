#include "report/axis.h"

#include <algorithm>
#include <cmath>

#include "words/numbers.h"

namespace halfstep::report {
namespace {

/// 1, 2 or 5 times a power of ten: at most `most` of them fit into the range.
double round_spacing(double range, int most) {
  const double least = range / most;
  const double power = std::pow(10.0, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (factor * power >= least * (1 - 1e-9)) return factor * power;
  return 10.0 * power;
}

std::string label_of(double value, double spacing) {
  if (std::abs(value) < spacing * 1e-6) return "0";
  // As many digits as tell one tick from the next.
  const int needed = static_cast<int>(std::floor(std::log10(std::abs(value)) + 1e-9) -
                                      std::floor(std::log10(spacing) + 1e-9)) +
                     1;
  const int shown = std::clamp(needed, 1, 12);
  return std::abs(value) >= 10000 ? with_suffix(value, shown) : short_digits(value, shown);
}

std::vector<Tick> linear_ticks(double low, double high, double spacing) {
  std::vector<Tick> ticks;
  for (double i = std::ceil(low / spacing - 1e-9); i * spacing <= high + spacing * 1e-9; ++i)
    ticks.push_back({.value = i * spacing, .label = label_of(i * spacing, spacing)});
  return ticks;
}

std::string power_label(int base, int exponent) {
  return std::to_string(base) + "<sup>" + (exponent < 0 ? "−" : "") + std::to_string(std::abs(exponent)) +
         "</sup>";
}

std::string decade_label(int exponent) {
  return exponent >= -3 && exponent <= 4 ? short_digits(std::pow(10.0, exponent), 6)
                                         : power_label(10, exponent);
}

Axis log10_axis(double low, double high) {
  constexpr int kMostTicks = 6;
  Axis axis{.kind = AxisKind::Log10, .low = low / 1.1, .high = high * 1.1};
  if (high / low < 6) {  // 1, 2, 5, 10 would leave a tick or two
    axis.ticks = linear_ticks(axis.low, axis.high, round_spacing(axis.high - axis.low, 6));
    return axis;
  }
  const int first = static_cast<int>(std::floor(std::log10(axis.low)));
  const int last = static_cast<int>(std::floor(std::log10(axis.high)));
  const int every = (last - first) / kMostTicks + 1;
  for (int exponent = first; exponent <= last; exponent += every) {
    const double power = std::pow(10.0, exponent);
    for (const double factor : {1.0, 2.0, 5.0}) {
      if (factor > 1 && axis.high / axis.low > 300) break;
      const double value = factor * power;
      if (value < axis.low || value > axis.high) continue;
      axis.ticks.push_back(
          {.value = value, .label = factor > 1 ? short_digits(value, 1) : decade_label(exponent)});
    }
  }
  return axis;
}

Axis log2_axis(double low, double high) {
  constexpr int kMostTicks = 6;
  const int first = static_cast<int>(std::floor(std::log2(low))),
            last = static_cast<int>(std::ceil(std::log2(high)));
  Axis axis{.kind = AxisKind::Log2, .low = std::ldexp(1.0, first) / 1.5, .high = std::ldexp(1.0, last) * 1.5};
  const int every = (last - first) / kMostTicks + 1;
  for (int exponent = first + ((-first % every) + every) % every; exponent <= last; exponent += every)
    axis.ticks.push_back({.value = std::ldexp(1.0, exponent), .label = power_label(2, exponent)});
  return axis;
}

}  // namespace

double Axis::place(double value) const {
  if (kind == AxisKind::Linear) return (value - low) / (high - low);
  return std::log(value / low) / std::log(high / low);
}

bool Axis::holds(double value) const {
  return std::isfinite(value) && (kind == AxisKind::Linear || value > 0);
}

Axis axis_around(AxisKind kind, double low, double high, bool from_zero) {
  constexpr int kMostSpaces = 5;
  if (kind == AxisKind::Log10) return log10_axis(low, high);
  if (kind == AxisKind::Log2) return log2_axis(low, high);
  if (from_zero) {
    low = std::min(low, 0.0);
    high = std::max(high, 0.0);
  }
  // A constant gets room around it, so that it is a line and not an edge.
  if (high - low <= 1e-12 * std::max(std::abs(low), std::abs(high))) {
    const double room = high == 0 ? 1.0 : std::abs(high) * 0.1;
    high += room;
    if (!from_zero) low -= room;
  }
  const double spacing = round_spacing(high - low, kMostSpaces);
  // The last tick below or above the values, whichever wastes less than a third of a space.
  const double margin = 0.04 * (high - low);
  Axis axis{.low = from_zero && low == 0 ? 0.0 : low - margin,
            .high = from_zero && high == 0 ? 0.0 : high + margin};
  axis.ticks = linear_ticks(axis.low, axis.high, spacing);
  return axis;
}

Axis axis_of_steps(double first, double last) {
  constexpr int kMostSpaces = 6;
  Axis axis{.low = first, .high = last > first ? last : first + 1};
  const double spacing = std::max(1.0, round_spacing(axis.high - axis.low, kMostSpaces));
  axis.ticks = linear_ticks(axis.low, axis.high, spacing);
  return axis;
}

}  // namespace halfstep::report
