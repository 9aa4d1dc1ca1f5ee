// What a tokenizer promises beside equality with `tokenizers`, which tools/tokenizer_parity asks for.
#include <gtest/gtest.h>
#include <halfstep/tokenizer.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "support/error_of.h"
#include "support/tokenizer_json.h"
#include "text/definition.h"
#include "text/pattern.h"

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

// Oracle: byte-pair encoding as it is defined, with strings: again and again the merge of lowest rank,
// leftmost.
std::vector<std::string> merged_by_definition(
    const std::string& word, const std::vector<std::pair<std::string, std::string>>& merges) {
  std::vector<std::string> tokens;
  for (const char c : word) tokens.emplace_back(1, c);
  for (;;) {
    size_t best = merges.size(), place = 0;
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      const auto found = std::ranges::find(merges, std::pair(tokens[i], tokens[i + 1]));
      const auto rank = static_cast<size_t>(found - merges.begin());
      if (rank < best) best = rank, place = i;
    }
    if (best == merges.size()) return tokens;
    tokens[place] += tokens[place + 1];
    tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(place) + 1);
  }
}

// Both ways of merging: words are from 1 to 200 bytes long, and the heap takes over above 64.
TEST(Tokenizer, WordsMergeAsTheDefinitionSays) {
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) {
    Json file = without_added_tokens();
    file["pre_tokenizer"] = {{"type", "ByteLevel"}, {"use_regex", false}, {"add_prefix_space", false}};
    std::vector<std::string> tokens = {"a", "b", "c"};
    std::vector<std::pair<std::string, std::string>> merges;
    while (merges.size() < 40) {
      const std::pair pair(tokens[random() % tokens.size()], tokens[random() % tokens.size()]);
      if (std::ranges::find(merges, pair) != merges.end() || pair.first.size() + pair.second.size() > 12)
        continue;
      merges.push_back(pair);
      const std::string made = pair.first + pair.second;
      if (std::ranges::find(tokens, made) == tokens.end()) {
        file["model"]["vocab"][made] = 256 + tokens.size();
        tokens.push_back(made);
      }
      file["model"]["merges"].push_back({pair.first, pair.second});
    }
    const auto tokenizer = tokenizer_of(file);
    for (size_t length = 1; length <= 200; length += 1 + random() % 9) {
      std::string word(length, ' ');
      for (char& c : word) c = "abc"[random() % 3];
      std::vector<int32_t> expected;
      for (const std::string& token : merged_by_definition(word, merges))
        expected.push_back(*tokenizer.id_of(token));
      EXPECT_EQ(tokenizer.encode(word), expected) << word;
    }
  }
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

// PCRE2's own limit ends such a match after 10 million steps back. Words by hand: all spaces but the last
// one, then " x".
TEST(Tokenizer, ARunOfElevenMillionSpacesIsCutByEveryPattern) {
  constexpr size_t kSpaces = 11'000'000;
  const std::string text = std::string(kSpaces, ' ') + "x";
  text::MatchScratch scratch;
  for (const text::KnownPattern& known : text::known_patterns()) {
    const auto pattern = text::Pattern::named_by(known.expression);
    text::Match match;
    ASSERT_EQ(pattern->find(text, 0, false, scratch, match), text::Search::Found) << known.name;
    EXPECT_EQ(match.end, kSpaces - 1) << known.name;
    ASSERT_EQ(pattern->find(text, match.end, false, scratch, match), text::Search::Found) << known.name;
    EXPECT_EQ(match.end, text.size()) << known.name;
  }
}

TEST(Tokenizer, ThoseWithTheSamePatternShareIt) {
  const auto& expression = text::known_patterns()[1].expression;
  EXPECT_EQ(text::Pattern::named_by(expression), text::Pattern::named_by(expression));
  EXPECT_EQ(text::Pattern::gpt2(), text::Pattern::named_by(text::known_patterns()[0].expression));
}

// A file of zeros is one word to GPT-2's pattern. The first text shows that offsets are of the second alone.
TEST(TokenStream, RefusesAnEndlessWordWithItsOffset) {
  TokenStream stream(tokenizer_of(small_tokenizer()));
  std::vector<int32_t> ids;
  stream.feed("first ", ids);
  stream.finish(ids);
  stream.feed("a b<end>", ids);
  const std::string zeros((size_t{64} << 20) + 2000, '\0');
  const std::string message = error_of([&] { stream.feed(zeros, ids); });
  EXPECT_NE(message.find("more than 64 MiB begins at byte 8 "), std::string::npos) << message;
}

TEST(Tokenizer, AnEndlessWordIsRefusedWithItsOffset) {
  Json file = small_tokenizer();
  file["pre_tokenizer"]["add_prefix_space"] = true;  // whose words are cut from a copy
  const std::string text = "a b<end>" + std::string((size_t{64} << 20) + 1, '\0');
  const auto tokenizer = tokenizer_of(file);
  const std::string message = error_of([&] { tokenizer.encode(text); });
  EXPECT_NE(message.find("more than 64 MiB begins at byte 8 "), std::string::npos) << message;
}

/// One whose merges cross every place at which a word could wrongly be cut.
Tokenizer sensitive_tokenizer(bool digits) {
  Json file = without_added_tokens();
  if (digits)
    file["pre_tokenizer"] = {
        {"type", "Sequence"},
        {"pretokenizers", {{{"type", "Digits"}, {"individual_digits", false}}, file["pre_tokenizer"]}}};
  const auto merge = [&](const std::string& left, const std::string& right) {
    file["model"]["vocab"][left + right] = file["model"]["vocab"].size();
    file["model"]["merges"].push_back({left, right});
  };
  const auto& of = text::byte_characters();
  for (const char* const word : {"don", "'t", "stop", "less", "12", "\xC3\xA9", "\xE6\xBC\xA2",
                                 "\xF0\x9F\x91\x8D", "   ", "\n\n", " \n", "\r\n", " x"}) {
    std::string left = of[static_cast<uint8_t>(word[0])];
    for (const char* c = word + 1; *c != 0; ++c) {
      const std::string right = of[static_cast<uint8_t>(*c)];
      if (!file["model"]["vocab"].contains(left + right)) merge(left, right);
      left += right;
    }
  }
  int64_t next = static_cast<int64_t>(file["model"]["vocab"].size());
  for (const char* const token : {"<end>", "<end>less"})
    file["added_tokens"].push_back({{"id", next++}, {"content", token}, {"special", true}});
  return tokenizer_of(file);
}

// A file larger than memory is fed in parts; the ids must be those of the whole wherever it was cut.
TEST(TokenStream, EveryCutInTwoGivesTheIdsOfTheWhole) {
  const std::string text =
      "don't  stop<end>less \n\n 12\xC3\xA9\xE6\xBC\xA2\xF0\x9F\x91\x8D \xFF<en <end>  x\r\n   x";
  for (const bool digits : {false, true}) {
    const auto tokenizer = sensitive_tokenizer(digits);
    const auto expected = tokenizer.encode(text);
    EXPECT_LT(expected.size(), text.size() - 20);
    for (size_t cut = 0; cut <= text.size(); ++cut) {
      TokenStream stream(tokenizer);
      std::vector<int32_t> ids;
      stream.feed(text.substr(0, cut), ids);
      stream.feed(text.substr(cut), ids);
      stream.finish(ids);
      EXPECT_EQ(ids, expected) << "cut at " << cut << (digits ? ", with Digits" : "");
    }
  }
}

Json nfc_tokenizer() {
  Json file = small_tokenizer();
  file["normalizer"] = {{"type", "NFC"}};
  return file;
}

struct Normal {
  const char* text;
  const char* nfc;
};

// By the examples and tables of Unicode's annex 15, but for the last: `tokenizers` knows no mark that is
// newer than Unicode 9, and leaves U+1ABF (class 220) behind U+0301 (230).
constexpr Normal kNormals[] = {
    {"e\u0301", "\u00E9"},
    {"\u00E9", "\u00E9"},
    {"\u212B \u2126", "\u00C5 \u03A9"},                           // singletons
    {"\u0958", "\u0915\u093C"},                                   // excluded from composition
    {"\u1E0B\u0323 d\u0323\u0307", "\u1E0D\u0307 \u1E0D\u0307"},  // sorted, then joined
    {"a\u0301\u0323", "\u1EA1\u0301"},
    {"\u1100\u1161\u11A8 \uAC00\u11A8", "\uAC01 \uAC01"},
    {"\u0F73 \u0344", "\u0F71\u0F72 \u0308\u0301"},
    {"a\u034F\u0301", "a\u034F\u0301"},  // a joiner between them
    {"\u09C7\u09BE", "\u09CB"},
    {"a\u0301\u1ABF", "\u00E1\u1ABF"},
    {"b\u0301\u1ABF\u0323", "b\u0301\u1ABF\u0323"},
};

TEST(Normalizer, BringsTextIntoFormCAsTokenizersDoes) {
  const auto tokenizer = tokenizer_of(nfc_tokenizer());
  for (const auto& [text, nfc] : kNormals) EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), nfc) << text;
}

TEST(Normalizer, LooksForAddedTokensInTheFormThatTheyAskFor) {
  Json file = nfc_tokenizer();
  file["added_tokens"] = {{{"id", 256}, {"content", "<e\u0301>"}, {"normalized", false}},
                          {{"id", 257}, {"content", "cafe\u0301"}, {"normalized", true}}};
  const auto tokenizer = tokenizer_of(file);
  EXPECT_EQ(tokenizer.encode("caf\u00E9cafe\u0301<e\u0301>"), (std::vector<int32_t>{257, 257, 256}));
  EXPECT_EQ(tokenizer.encode("<\u00E9>").size(), 4u) << "asked for as it is";
}

TEST(Normalizer, InvalidBytesStayAndEndWhatIsJoined) {
  const auto tokenizer = tokenizer_of(nfc_tokenizer());
  const std::string text = "e\xFF\xCC\x81 \xCC\x81\xCC";
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
}

// Where text is cut, what is before may still be joined to what follows, or a mark go before it.
TEST(TokenStream, EveryCutGivesTheIdsOfTheWholeInFormC) {
  const auto tokenizer = tokenizer_of(nfc_tokenizer());
  std::string text;
  for (const auto& normal : kNormals) text.append(normal.text).append(normal.nfc);
  text.append("<end>\u0301<end \xCC").append("x\u0323x\u0323x\u0323\xE1\x84");
  const auto expected = tokenizer.encode(text);
  for (size_t cut = 0; cut <= text.size(); ++cut)
    for (const size_t second : {cut, std::min(cut + 1, text.size()), std::min(cut + 4, text.size())}) {
      TokenStream stream(tokenizer);
      std::vector<int32_t> ids;
      stream.feed(text.substr(0, cut), ids);
      stream.feed(text.substr(cut, second - cut), ids);
      stream.feed(text.substr(second), ids);
      stream.finish(ids);
      EXPECT_EQ(ids, expected) << "cut at " << cut << " and " << second;
    }
}

// A million marks out of order: quadratic sorting would take minutes.
TEST(Normalizer, SortsALongRunOfMarksInTime) {
  std::string marks = "a", below, above;
  for (int i = 0; i < 500'000; ++i) {
    marks += "\u0301\u0323";
    below += "\u0323";
    above += "\u0301";
  }
  const auto tokenizer = tokenizer_of(nfc_tokenizer());
  EXPECT_TRUE(tokenizer.decode(tokenizer.encode(marks)) ==
              "\u1EA1" + below.substr(std::string("\u0323").size()) + above);
}

TEST(TokenStream, KeepsBackNoMoreThanTheLastWord) {
  TokenStream stream(tokenizer_of(small_tokenizer()));
  std::vector<int32_t> ids;
  stream.feed(std::string(1000, 'a') + " b c", ids);
  EXPECT_EQ(ids.size(), 1002u);  // " c" may go on
}

}  // namespace
}  // namespace halfstep
