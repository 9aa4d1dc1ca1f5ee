// Whatever is read as a tokenizer gives every text back (unless it normalizes), and the same ids when the
// text comes in parts.
//
// An input that begins with '{' is a tokenizer.json, a NUL, and a text. Any other is a text for one of our
// own tokenizers, which its first byte chooses: some for each pattern.
#include <halfstep/tokenizer.h>

#include <algorithm>
#include <vector>

#include "fuzz/fuzz_target.h"
#include "support/tokenizer_json.h"
#include "text/definition.h"
#include "text/pattern.h"

namespace {

using namespace halfstep;

Tokenizer own_tokenizer(std::string_view expression, bool digits, bool nfc) {
  nlohmann::json file = testing::small_tokenizer();
  file["added_tokens"][0]["id"] = 262;
  file["added_tokens"][1]["id"] = 263;
  file["model"]["vocab"].update(
      {{"aa", 256}, {"aaa", 257}, {"aaaa", 258}, {"\u0120a", 259}, {"'s", 260}, {"\u010A\u010A", 261}});
  file["model"]["merges"] = {"a a", "aa a", "aa aa", "\u0120 a", "' s", "\u010A \u010A"};
  nlohmann::json steps = nlohmann::json::array();
  if (digits) steps.push_back({{"type", "Digits"}, {"individual_digits", true}});
  steps.push_back(
      {{"type", "Split"}, {"pattern", {{"Regex", expression}}}, {"behavior", "Isolated"}, {"invert", false}});
  steps.push_back({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}});
  file["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", steps}};
  if (nfc) file["normalizer"] = {{"type", "NFC"}};
  return Tokenizer::from_json(file.dump(), "own");
}

struct OwnTokenizer {
  Tokenizer tokenizer;
  bool nfc;
};

const OwnTokenizer& own_tokenizer(uint8_t choice) {
  static const std::vector<OwnTokenizer> all = [] {
    std::vector<OwnTokenizer> made;
    for (const bool nfc : {false, true})
      for (const text::KnownPattern& known : text::known_patterns())
        for (const bool digits : {false, true})
          made.push_back({own_tokenizer(known.expression, digits, nfc), nfc});
    return made;
  }();
  return all[choice % all.size()];
}

// The parts' lengths are taken from the text itself.
std::vector<int32_t> encode_in_parts(const Tokenizer& tokenizer, std::string_view text) {
  TokenStream stream(tokenizer);
  std::vector<int32_t> ids;
  while (!text.empty()) {
    const size_t bytes = std::min<size_t>(text.size(), 1 + static_cast<uint8_t>(text[0]) % 23);
    stream.feed(text.substr(0, bytes), ids);
    text.remove_prefix(bytes);
  }
  stream.finish(ids);
  return ids;
}

void check(const Tokenizer& tokenizer, std::string_view text, bool comes_back) {
  const std::vector<int32_t> ids = tokenizer.encode(text);
  for (const int32_t id : ids)
    testing::require(id >= 0 && id < tokenizer.vocabulary_size(), "ids are of the vocabulary");
  if (comes_back) testing::require(tokenizer.decode(ids) == text, "the text comes back");
  testing::require(encode_in_parts(tokenizer, text) == ids, "parts give the ids of the whole");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input = testing::text_of(data, size);
  if (input.empty()) return 0;
  if (input[0] != '{') {
    const OwnTokenizer& own = own_tokenizer(data[0]);
    check(own.tokenizer, input.substr(1), !own.nfc);
    return 0;
  }
  const size_t nul = std::min(input.find('\0'), input.size());
  const std::string_view file = input.substr(0, nul), text = input.substr(std::min(nul + 1, input.size()));
  testing::read_or_refuse([&] {
    const text::Definition definition = text::parse_tokenizer_json(file, "input");
    const bool adds_spaces = std::ranges::any_of(definition.stages, &text::Stage::add_prefix_space);
    check(Tokenizer::from_json(file, "input", {.missing_bytes = MissingBytes::Drop}), text, false);
    // Refuses what it could not give back.
    check(Tokenizer::from_json(file, "input"), text, !adds_spaces && !definition.nfc);
  });
  return 0;
}
