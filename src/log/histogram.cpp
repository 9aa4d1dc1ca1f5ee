#include <halfstep/event_file.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace halfstep {
namespace {

// Every bucket holds its lower end and not its upper one, so that a negative value goes by the power of two
// above its size, -2^j <= x < -2^(j-1), and a positive one by the power below, 2^e <= x < 2^(e+1). FP32 has j
// from 128 down to -149, then zero, then e from -149 (the smallest denormal number) up to 127.
constexpr int kNegative = 128 + 149 + 1, kPositive = 127 + 149 + 1;
constexpr int kBuckets = kNegative + 1 + kPositive;

int bucket_of(float value) {
  if (value == 0) return kNegative;
  int exponent = 0;
  const float fraction = std::frexp(value, &exponent);  // 0.5 <= |fraction| < 1
  if (value > 0) return kNegative + 1 + (exponent - 1 + 149);
  return 128 - (fraction == -0.5f ? exponent - 1 : exponent);
}

double upper_limit_of(int bucket) {
  return bucket < kNegative ? -std::ldexp(1.0, 127 - bucket) : std::ldexp(1.0, bucket - kNegative - 149);
}

}  // namespace

Histogram histogram_of(std::span<const float> values) {
  Histogram result{.min = std::numeric_limits<double>::infinity(),
                   .max = -std::numeric_limits<double>::infinity()};
  std::array<int64_t, kBuckets> counts{};
  for (const float value : values) {
    if (!std::isfinite(value)) {
      ++result.not_finite;
      continue;
    }
    ++counts[static_cast<size_t>(bucket_of(value))];
    const double exact = value;
    result.min = std::min(result.min, exact);
    result.max = std::max(result.max, exact);
    result.sum += exact;
    result.sum_of_squares += exact * exact;
  }
  result.count = static_cast<double>(values.size()) - static_cast<double>(result.not_finite);
  if (result.count == 0) return Histogram{.not_finite = result.not_finite};
  for (int bucket = 0; bucket < kBuckets; ++bucket) {
    const auto count = static_cast<double>(counts[static_cast<size_t>(bucket)]);
    const bool before_the_first = result.counts.empty();
    if (count == 0 && before_the_first) continue;
    if (count == 0 && result.counts.back() == 0) {
      result.limits.back() = upper_limit_of(bucket);
      continue;
    }
    result.limits.push_back(upper_limit_of(bucket));
    result.counts.push_back(count);
  }
  if (result.counts.back() == 0) {  // behind the last value
    result.limits.pop_back();
    result.counts.pop_back();
  }
  return result;
}

}  // namespace halfstep
