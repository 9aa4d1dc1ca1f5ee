#include "data/permutation.h"

#include <bit>

#include "formats/philox.h"

namespace halfstep {
namespace {

// Four rounds of a good function cannot be told from a random permutation (Luby and Rackoff, 1988); two more
// because the halves of small domains are only a few bits wide.
constexpr uint32_t kRounds = 6;

uint64_t through_once(uint64_t index, int half_bits, uint64_t seed, uint64_t epoch) {
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  uint64_t left = index >> half_bits, right = index & mask;
  for (uint32_t round = 0; round < kRounds; ++round) {
    const PhiloxWords words = philox({static_cast<uint32_t>(right), round, static_cast<uint32_t>(epoch),
                                      static_cast<uint32_t>(epoch >> 32)},
                                     {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    const uint64_t mixed = (left ^ words[0]) & mask;
    left = right;
    right = mixed;
  }
  return left << half_bits | right;
}

}  // namespace

uint64_t permuted(uint64_t index, uint64_t count, uint64_t seed, uint64_t epoch) {
  const int half_bits = (std::bit_width(count - 1) + 1) / 2;
  if (half_bits == 0) return 0;
  do index = through_once(index, half_bits, seed, epoch);
  while (index >= count);
  return index;
}

}  // namespace halfstep
