// A tokenizer.json that was made to take long.
#include <gtest/gtest.h>
#include <halfstep/tokenizer.h>

#include <cstring>
#include <set>

#include "support/cost_of.h"
#include "support/tokenizer_json.h"

namespace halfstep {
namespace {

constexpr uint64_t kMultiplier = (uint64_t{0xc6a4a793} << 32) + 0x5bd1e995;

// Modulo 2^64, by Newton's method: each round doubles the bits that are right.
uint64_t inverse(uint64_t odd) {
  uint64_t result = 1;
  for (int round = 0; round < 7; ++round) result *= 2 - odd * result;
  return result;
}

bool is_ascii(uint64_t bytes) {
  for (int i = 0; i < 8; ++i) {
    const uint64_t letter = bytes >> 8 * i & 0xff;
    if (letter == 0 || letter > 0x7f) return false;
  }
  return true;
}

/// Texts of 16 letters that libstdc++'s std::hash<std::string>, which is MurmurHash64A with a known seed,
/// gives one value: the first eight bytes are drawn, the last eight computed backwards from that value.
std::set<std::string> colliding_texts(size_t count) {
  const uint64_t back = inverse(kMultiplier), value = 0x123456789abcdef;
  const auto mixed = [](uint64_t word) {
    word *= kMultiplier;
    return (word ^ word >> 47) * kMultiplier;
  };
  const auto unmixed = [&](uint64_t word) {
    word *= back;
    return (word ^ word >> 47) * back;
  };
  uint64_t random = 88172645463325252;
  std::set<std::string> texts;
  while (texts.size() < count) {
    uint64_t first = 0;
    for (int i = 0; i < 8; ++i) {
      random ^= random << 13, random ^= random >> 7, random ^= random << 17;
      first |= ('A' + (random >> 20) % 26) << 8 * i;
    }
    const uint64_t state = ((0xc70f6907 ^ 16 * kMultiplier) ^ mixed(first)) * kMultiplier;
    const uint64_t second = unmixed(value * back ^ state);
    if (!is_ascii(second)) continue;
    std::string text(16, '\0');
    std::memcpy(text.data(), &first, 8);
    std::memcpy(text.data() + 8, &second, 8);
    texts.insert(std::move(text));
  }
  return texts;
}

TEST(HostileTokenizer, NamesThatCollideAreReadAsFastAsOthers) {
  const std::set<std::string> texts = colliding_texts(30'000);
  std::set<size_t> hashes;
  for (const std::string& text : texts) hashes.insert(std::hash<std::string>()(text));
  ASSERT_EQ(hashes.size(), 1u) << "these collide in no table: the standard library has another hash";
  nlohmann::json file = testing::small_tokenizer();
  file["added_tokens"] = nlohmann::json::array();
  for (const std::string& text : texts) file["model"]["vocab"][text] = file["model"]["vocab"].size();
  const std::string json = file.dump();
  std::printf("%zu bytes\n", json.size());
  testing::expect_cheap("tokenizer.json of texts that collide",
                        [&] { Tokenizer::from_json(json, "tokenizer.json"); });
}

}  // namespace
}  // namespace halfstep
