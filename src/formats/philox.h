// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011):
// a counter goes in, four random words come out, and nothing is remembered.
#pragma once

#include <halfstep/formats.h>

#include <array>
#include <cstdint>

namespace halfstep {

inline constexpr std::uint32_t kPhiloxMultiplier0 = 0xD2511F53, kPhiloxMultiplier1 = 0xCD9E8D57;
inline constexpr std::uint32_t kPhiloxWeyl0 = 0x9E3779B9, kPhiloxWeyl1 = 0xBB67AE85;
inline constexpr int kPhiloxRounds = 10;

using PhiloxWords = std::array<std::uint32_t, 4>;

constexpr PhiloxWords philox(PhiloxWords counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const std::uint64_t product0 = std::uint64_t{kPhiloxMultiplier0} * counter[0];
    const std::uint64_t product1 = std::uint64_t{kPhiloxMultiplier1} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<std::uint32_t>(product0)};
    key[0] += kPhiloxWeyl0;
    key[1] += kPhiloxWeyl1;
  }
  return counter;
}

/// The 32 random bits of one element: four neighbouring elements share a counter, one word each.
constexpr std::uint32_t random_bits(StochasticKey key, std::uint64_t element) {
  const std::uint64_t block = element / 4;
  const PhiloxWords words = philox(
      {static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), key.tensor, key.step},
      {static_cast<std::uint32_t>(key.seed), static_cast<std::uint32_t>(key.seed >> 32)});
  return words[element % 4];
}

}  // namespace halfstep
