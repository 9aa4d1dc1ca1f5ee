#include "base/keyed_hash.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>

namespace halfstep {
namespace {

__extension__ using Product = unsigned __int128;

constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;

// a * b modulo 2^61 - 1; both are below 2^61.
uint64_t multiply(uint64_t a, uint64_t b) {
  const Product product = Product{a} * b;
  const uint64_t sum = static_cast<uint64_t>(product & kPrime) + static_cast<uint64_t>(product >> 61);
  return sum >= kPrime ? sum - kPrime : sum;
}

uint64_t random_point() {
  std::random_device device;
  const uint64_t drawn = uint64_t{device()} << 32 | device();
  return drawn % (kPrime - 1) + 1;
}

}  // namespace

size_t KeyedHash::operator()(std::string_view text) const {
  static const uint64_t point = random_point();
  constexpr size_t kWordBytes = 7;  // fits below 2^61
  // The length first: zeros at the end count.
  uint64_t sum = multiply(text.size() % kPrime, point);
  for (size_t at = 0; at < text.size(); at += kWordBytes) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min(kWordBytes, text.size() - at));
    sum = multiply((sum + word) % kPrime, point);
  }
  return sum;
}

}  // namespace halfstep
