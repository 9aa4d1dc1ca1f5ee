// What a tokenizer promises beside equality with `tokenizers`, which tools/tokenizer_parity asks for.
#include <gtest/gtest.h>
#include <halfstep/tokenizer.h>

#include <atomic>
#include <random>
#include <thread>

#include "support/error_of.h"
#include "support/tokenizer_json.h"

namespace halfstep {
namespace {

using testing::error_of;
using testing::small_tokenizer;
using Json = nlohmann::json;

Tokenizer tokenizer_of(const Json& file, MissingBytes missing = MissingBytes::Refuse) {
  return Tokenizer::from_json(file.dump(), "tokenizer.json", {.missing_bytes = missing});
}

/// The ids of added tokens follow the vocabulary; a test that changes the one does without the other.
Json without_added_tokens() {
  Json file = small_tokenizer();
  file["added_tokens"] = Json::array();
  return file;
}

std::string random_bytes(std::mt19937& random, size_t count) {
  std::string bytes(count, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  return bytes;
}

TEST(Tokenizer, OfBytesGivesEachByteItsOwnNumber) {
  const auto tokenizer = Tokenizer::bytes();
  EXPECT_EQ(tokenizer.vocabulary_size(), 256);
  EXPECT_EQ(tokenizer.encode(std::string("a\0\xff", 3)), (std::vector<int32_t>{97, 0, 255}));
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{104, 105}), "hi");
}

TEST(Tokenizer, AnyBytesComeBackFromTheirIds) {
  const auto tokenizer = tokenizer_of(small_tokenizer());
  std::mt19937 random(1);
  for (size_t length = 0; length < 300; ++length) {
    const std::string text = random_bytes(random, length);
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  }
}

// By hand: " hello" is Ġ h e l l o; the ranks say l+l, h+e, then he+ll; o and the space stay.
TEST(Tokenizer, MergesByRankThenFromTheLeft) {
  Json file = without_added_tokens();
  file["model"]["vocab"].update({{"ll", 300}, {"he", 301}, {"hell", 302}, {"el", 303}});
  file["model"]["merges"] = {"l l", "h e", "he ll", "e l"};
  const auto tokenizer = tokenizer_of(file);
  const int32_t space = *tokenizer.id_of(" "), o = *tokenizer.id_of("o"), l = *tokenizer.id_of("l");
  EXPECT_EQ(tokenizer.encode(" hello"), (std::vector<int32_t>{space, 302, o}));
  EXPECT_EQ(tokenizer.encode("lll"), (std::vector<int32_t>{300, l}));
}

// The same word by the scan of short words and, 1,000 times over, by the heap of long ones.
TEST(Tokenizer, LongWordsMergeAsShortOnesDo) {
  Json file = without_added_tokens();
  file["pre_tokenizer"] = {{"type", "ByteLevel"}, {"use_regex", false}, {"add_prefix_space", false}};
  file["model"]["vocab"].update({{"ab", 300}, {"abc", 301}, {"bc", 302}});
  file["model"]["merges"] = {"a b", "ab c", "b c"};
  const auto tokenizer = tokenizer_of(file);
  const auto once = tokenizer.encode("xbcabc");  // begins with a byte that merges with nothing
  std::string text;
  std::vector<int32_t> expected;
  for (int i = 0; i < 1000; ++i) {
    text += "xbcabc";
    expected.insert(expected.end(), once.begin(), once.end());
  }
  EXPECT_EQ(tokenizer.encode(text), expected);
}

TEST(Tokenizer, AddedTokensAreFoundInTheTextTheLongestFirst) {
  const auto tokenizer = tokenizer_of(small_tokenizer());
  const int32_t end = *tokenizer.id_of("<end>"), endless = *tokenizer.id_of("<end>less");
  const int32_t a = *tokenizer.id_of("a");
  EXPECT_EQ(tokenizer.encode("a<end>a<end>lessa"), (std::vector<int32_t>{a, end, a, endless, a}));
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{end, a}), "<end>a");
}

TEST(Tokenizer, AMissingByteIsRefusedByNameOrDroppedWhenAsked) {
  Json file = without_added_tokens();
  file["model"]["vocab"].erase("b");
  EXPECT_NE(error_of([&] { tokenizer_of(file).encode("abc"); }).find("0x62"), std::string::npos);
  const auto dropping = tokenizer_of(file, MissingBytes::Drop);
  EXPECT_EQ(dropping.decode(dropping.encode("abc")), "ac");
  TokenStream stream(dropping);
  std::vector<int32_t> ids;
  stream.feed("abc b", ids);
  stream.finish(ids);
  EXPECT_EQ(stream.dropped_bytes(), 2u);
}

TEST(Tokenizer, AnUnknownIdIsRefusedWithItsPlace) {
  const std::string message = error_of([] { Tokenizer::bytes().decode(std::vector<int32_t>{1, 256}); });
  EXPECT_NE(message.find("256 at place 1"), std::string::npos) << message;
}

TEST(Tokenizer, AFailedEncodeLeavesTheIdsAsTheyWere) {
  Json file = without_added_tokens();
  file["model"]["vocab"].erase("b");
  const auto tokenizer = tokenizer_of(file);
  std::vector<int32_t> ids = {7};
  EXPECT_NE(error_of([&] { tokenizer.encode("a a b", ids); }), "no error");
  EXPECT_EQ(ids, std::vector<int32_t>{7});
}

TEST(Tokenizer, ThreadsShareOne) {
  const auto tokenizer = tokenizer_of(small_tokenizer());
  std::mt19937 random(2);
  const std::string text = random_bytes(random, 100'000) + std::string(50'000, 'a');
  const auto expected = tokenizer.encode(text);
  std::vector<std::thread> threads;
  std::atomic<int> same = 0;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (int round = 0; round < 5; ++round) same += tokenizer.encode(text) == expected;
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(same, 20);
}

// A file larger than memory is fed in parts; the ids must be those of the whole wherever it was cut.
TEST(TokenStream, EveryCutInTwoGivesTheIdsOfTheWhole) {
  const auto tokenizer = tokenizer_of(small_tokenizer());
  const std::string text =
      "don't  stop<end>less \n\n 12\xC3\xA9\xE6\xBC\xA2\xF0\x9F\x91\x8D \xFF<en <end>  x\r\n   ";
  const auto expected = tokenizer.encode(text);
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    TokenStream stream(tokenizer);
    std::vector<int32_t> ids;
    stream.feed(text.substr(0, cut), ids);
    stream.feed(text.substr(cut), ids);
    stream.finish(ids);
    EXPECT_EQ(ids, expected) << "cut at " << cut;
  }
}

TEST(TokenStream, KeepsBackNoMoreThanTheLastWord) {
  TokenStream stream(tokenizer_of(small_tokenizer()));
  std::vector<int32_t> ids;
  stream.feed(std::string(1000, 'a') + " b c", ids);
  EXPECT_EQ(ids.size(), 1002u);  // " c" may go on
}

}  // namespace
}  // namespace halfstep
