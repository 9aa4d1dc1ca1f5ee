#include "data/permutation.h"

#include <bit>

#include "formats/philox.h"

namespace halfstep {
namespace {

// Four rounds of a good function cannot be told from a random permutation (Luby and Rackoff, 1988), as long
// as the halves are wide: with six and halves of 2 bits, some places were 2 % too frequent. Narrow halves
// take more.
constexpr uint32_t rounds_for(int half_bits) { return half_bits < 8 ? 24 : 6; }

uint64_t through_once(uint64_t index, int half_bits, uint64_t seed, uint64_t epoch) {
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  uint64_t left = index >> half_bits, right = index & mask;
  for (uint32_t round = 0; round < rounds_for(half_bits); ++round) {
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
