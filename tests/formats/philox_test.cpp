#include "formats/philox.h"

#include <gtest/gtest.h>

#include <set>

namespace halfstep {
namespace {

// The known answers that Random123 publishes for philox4x32-10 (its kat_vectors file).
TEST(Philox, GivesThePublishedAnswers) {
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (PhiloxWords{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (PhiloxWords{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxWords{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(RandomBits, AreLaidOutAsDocumented) {
  const StochasticKey key{.seed = 0x299f31d0a4093822, .tensor = 0x13198a2e, .step = 0x03707344};
  const std::uint64_t block = 0x05a308d3243f6a88;
  const PhiloxWords words =
      philox({0x243f6a88, 0x05a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0});
  for (std::uint64_t word = 0; word < 4; ++word) EXPECT_EQ(random_bits(key, 4 * block + word), words[word]);
}

TEST(RandomBits, DifferWhenAnyPartOfTheKeyDiffers) {
  const StochasticKey keys[] = {{1, 2, 3}, {2, 2, 3}, {1 + (1ull << 32), 2, 3},
                                {1, 3, 3}, {1, 2, 4}, {1, 3, 2}};
  std::set<std::uint32_t> seen;
  for (const StochasticKey& key : keys)
    for (std::uint64_t element : {0ull, 1ull, 4ull, 1ull << 34}) seen.insert(random_bits(key, element));
  EXPECT_EQ(seen.size(), 24u);
}

}  // namespace
}  // namespace halfstep
