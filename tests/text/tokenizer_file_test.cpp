// Files that are wrong, or ask for what is not known: each refused by name.
#include <gtest/gtest.h>
#include <halfstep/tokenizer.h>

#include <fstream>
#include <functional>

#include "support/error_of.h"
#include "support/scratch.h"
#include "support/tokenizer_json.h"

namespace halfstep {
namespace {

using testing::error_of;
using testing::small_tokenizer;
using Json = nlohmann::json;

std::string refusal(const std::string& text) {
  return error_of([&] { Tokenizer::from_json(text, "tokenizer.json"); });
}

/// A fault, and words that its refusal must have.
struct Fault {
  const char* name;
  std::function<void(Json&)> make;
  std::vector<std::string> words;
};

void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.name; }

class FaultyFile : public ::testing::TestWithParam<Fault> {};

TEST_P(FaultyFile, IsRefusedByName) {
  Json file = small_tokenizer();
  GetParam().make(file);
  const std::string message = refusal(file.dump());
  EXPECT_TRUE(message.starts_with("tokenizer.json: ")) << message;
  for (const std::string& word : GetParam().words)
    EXPECT_NE(message.find(word), std::string::npos) << message;
}

Json digits() { return {{"type", "Digits"}, {"individual_digits", true}}; }
Json byte_level() { return {{"type", "ByteLevel"}, {"add_prefix_space", false}}; }
Json sequence(Json steps) { return {{"type", "Sequence"}, {"pretokenizers", std::move(steps)}}; }
Json split(const char* expression, const char* behavior = "Isolated") {
  return {{"type", "Split"}, {"pattern", {{"Regex", expression}}}, {"behavior", behavior}, {"invert", false}};
}

const Fault kFaults[] = {
    {"TopKey", [](Json& f) { f["tokeniser"] = 1; }, {"'tokeniser'"}},
    {"Normalizer", [](Json& f) { f["normalizer"] = {{"type", "NFKC"}}; }, {"normalizer", "NFKC", "NFC"}},
    {"NormalizerInSequence",
     [](Json& f) { f["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "Lowercase"}}}}}; },
     {"normalizers[0]", "Lowercase"}},
    {"Truncation", [](Json& f) { f["truncation"] = {{"max_length", 5}}; }, {"truncation"}},
    {"Padding", [](Json& f) { f["padding"] = {{"pad_id", 0}}; }, {"padding"}},
    {"ModelType", [](Json& f) { f["model"]["type"] = "WordPiece"; }, {"model", "WordPiece", "BPE"}},
    {"ModelKey", [](Json& f) { f["model"]["max_input_chars_per_word"] = 1; }, {"max_input_chars_per_word"}},
    {"Dropout", [](Json& f) { f["model"]["dropout"] = 0.1; }, {"dropout", "0.1"}},
    {"Prefix",
     [](Json& f) { f["model"]["continuing_subword_prefix"] = "##"; },
     {"continuing_subword_prefix"}},
    {"Suffix", [](Json& f) { f["model"]["end_of_word_suffix"] = "</w>"; }, {"end_of_word_suffix"}},
    {"ByteFallback", [](Json& f) { f["model"]["byte_fallback"] = true; }, {"byte_fallback"}},
    {"UnknownTokenInUse",
     [](Json& f) {
       f["model"]["vocab"].erase("b");
       f["model"]["unk_token"] = "a";
     },
     {"unk_token"}},
    {"IdTwice", [](Json& f) { f["model"]["vocab"]["new"] = 5; }, {"id 5", "twice"}},
    {"IdNegative", [](Json& f) { f["model"]["vocab"]["new"] = -1; }, {"'new'", "-1"}},
    {"IdTooLarge", [](Json& f) { f["model"]["vocab"]["new"] = 10'000'000'000; }, {"'new'", "10000000000"}},
    {"IdBeyond64Bits", [](Json& f) { f["model"]["vocab"]["new"] = ~uint64_t{0}; }, {"vocab"}},
    {"IdNoInteger", [](Json& f) { f["model"]["vocab"]["new"] = 1.5; }, {"vocab"}},
    {"VocabularyAnArray", [](Json& f) { f["model"]["vocab"] = Json::array(); }, {"vocab"}},
    {"MergeOfNoToken", [](Json& f) { f["model"]["merges"] = {"a zz"}; }, {"merge 0", "'zz'"}},
    {"MergeMakesNoToken", [](Json& f) { f["model"]["merges"] = {"a b"}; }, {"merge 0", "makes 'ab'"}},
    {"MergeOfThree", [](Json& f) { f["model"]["merges"] = {"a b c"}; }, {"'a b c'"}},
    {"MergeOfOne", [](Json& f) { f["model"]["merges"] = {"a"}; }, {"'a'"}},
    {"MergeANumber", [](Json& f) { f["model"]["merges"] = {7}; }, {"merges", "7"}},
    // Were it taken, merging "" and "a" into "a" would never end.
    {"MergeOfNothing",
     [](Json& f) {
       f["model"]["vocab"][""] = 300;
       f["model"]["merges"] = Json::array({Json::array({"", "a"})});
     },
     {"merge 0", "empty"}},
    {"MergeTwice",
     [](Json& f) {
       f["model"]["vocab"]["ab"] = 300;
       f["model"]["merges"] = {"a b", "a b"};
       f["added_tokens"] = nullptr;
     },
     {"'a'", "'b'", "twice"}},
    {"AddedStrip", [](Json& f) { f["added_tokens"][0]["lstrip"] = true; }, {"added_tokens[0].lstrip"}},
    {"AddedSingleWord", [](Json& f) { f["added_tokens"][1]["single_word"] = true; }, {"[1].single_word"}},
    {"AddedEmpty", [](Json& f) { f["added_tokens"][0]["content"] = ""; }, {"256", "0 bytes"}},
    {"AddedTooLong",
     [](Json& f) { f["added_tokens"][0]["content"] = std::string(257, 'x'); },
     {"257 bytes", "1 to 256"}},
    {"AddedTooMany",
     [](Json& f) {
       for (int i = 258; i < 10'000; ++i)
         f["added_tokens"].push_back({{"id", i}, {"content", std::string(200, 'x') + std::to_string(i)}});
     },
     {"added tokens", "1048576 bytes"}},
    {"AddedTwice", [](Json& f) { f["added_tokens"][1]["content"] = "<end>"; }, {"'<end>'", "twice"}},
    {"AddedOtherId", [](Json& f) { f["added_tokens"][0]["content"] = "a"; }, {"'a'", "256", "97"}},
    {"AddedGap", [](Json& f) { f["added_tokens"][1]["id"] = 1000; }, {"'<end>less'", "1000", "257"}},
    {"AddedForOtherBytes",
     [](Json& f) {
       f["added_tokens"][0]["content"] = "\u0120";  // the alphabet's character of the space
       f["added_tokens"][0]["id"] = 32;
     },
     {"other bytes"}},
    {"PreTokenizerNull", [](Json& f) { f["pre_tokenizer"] = nullptr; }, {"pre_tokenizer.type"}},
    {"PreTokenizerType", [](Json& f) { f["pre_tokenizer"] = {{"type", "Metaspace"}}; }, {"Metaspace"}},
    {"NoByteLevel", [](Json& f) { f["pre_tokenizer"] = digits(); }, {"pre_tokenizer", "ByteLevel"}},
    {"ByteLevelFirst",
     [](Json& f) { f["pre_tokenizer"] = sequence({byte_level(), digits()}); },
     {"ByteLevel"}},
    {"ByteLevelTwice",
     [](Json& f) { f["pre_tokenizer"] = sequence({byte_level(), byte_level()}); },
     {"ByteLevel"}},
    {"EmptySequence", [](Json& f) { f["pre_tokenizer"] = sequence(Json::array()); }, {"ByteLevel"}},
    {"SequenceInSequence",
     [](Json& f) { f["pre_tokenizer"] = sequence(Json::array({sequence(Json::array({byte_level()}))})); },
     {"pretokenizers[0]", "Sequence"}},
    {"Expression",
     [](Json& f) { f["pre_tokenizer"] = sequence({split("(a+)+b"), byte_level()}); },
     {"(a+)+b", "Llama-3"}},
    {"StagesWithoutEnd",
     [](Json& f) {
       Json steps = Json::array();
       for (int i = 0; i < 100'000; ++i) steps.push_back(digits());
       steps.push_back(byte_level());
       f["pre_tokenizer"] = sequence(steps);
     },
     {"pretokenizers[16]", "more than 16"}},
    {"Behavior",
     [](Json& f) { f["pre_tokenizer"] = sequence({split("x", "Removed"), byte_level()}); },
     {"Removed"}},
    {"DecoderNull", [](Json& f) { f["decoder"] = nullptr; }, {"decoder"}},
    {"DecoderType", [](Json& f) { f["decoder"] = {{"type", "WordPiece"}}; }, {"decoder", "WordPiece"}},
    {"PostProcessor",
     [](Json& f) { f["post_processor"] = {{"type", "Mystery"}}; },
     {"post_processor", "Mystery"}},
};

INSTANTIATE_TEST_SUITE_P(TokenizerFile, FaultyFile, ::testing::ValuesIn(kFaults),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(TokenizerFile, WithoutFaultIsRead) {
  Json file = small_tokenizer();
  EXPECT_EQ(refusal(file.dump()), "no error");
  file["post_processor"] = {
      {"type", "TemplateProcessing"}};  // puts tokens around a text, which encode does not
  file["model"]["unk_token"] = "a";     // never needed, as every byte has a token
  EXPECT_EQ(refusal(file.dump()), "no error");
}

// As older published files of GPT-2 have it.
TEST(TokenizerFile, AModelWithoutTypeIsTakenForBpe) {
  Json file = small_tokenizer();
  const auto expected = Tokenizer::from_json(file.dump(), "typed").encode("a b");
  file["model"].erase("type");
  EXPECT_EQ(Tokenizer::from_json(file.dump(), "tokenizer.json").encode("a b"), expected);
  file["model"].erase("merges");  // a WordLevel
  EXPECT_NE(refusal(file.dump()).find("merges"), std::string::npos);
}

TEST(TokenizerFile, SixteenStagesAreRead) {
  Json file = small_tokenizer();
  Json steps = Json::array();
  for (int i = 0; i < 15; ++i) steps.push_back(digits());
  steps.push_back(byte_level());
  file["pre_tokenizer"] = sequence(steps);
  const auto tokenizer = Tokenizer::from_json(file.dump(), "tokenizer.json");
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("a1 22b")), "a1 22b");
}

TEST(TokenizerFile, WhatIsNoJsonOrTooDeepIsRefused) {
  EXPECT_NE(refusal("{").find("JSON"), std::string::npos);
  EXPECT_NE(refusal(std::string(100'000, '[')).find("nested"), std::string::npos);
  EXPECT_NE(refusal("[]").find("object"), std::string::npos);
}

TEST(TokenizerFile, ThatIsNotThereIsAFileError) {
  EXPECT_THROW(Tokenizer::from_file("/nowhere/tokenizer.json"), FileError);
}

TEST(TokenizerFile, Gpt2sPairOfFilesIsRead) {
  const testing::ScratchFolder folder;
  const auto vocabulary = folder / "vocab.json", merges = folder / "merges.txt";
  Json tokens = small_tokenizer()["model"]["vocab"];
  tokens.update({{"ab", 256}, {"<|endoftext|>", 257}});
  std::ofstream(vocabulary) << tokens;
  std::ofstream(merges) << "#version: 0.2\na b\n";
  const auto tokenizer = Tokenizer::from_gpt2(vocabulary, merges);
  EXPECT_EQ(tokenizer.encode("ab<|endoftext|>"), (std::vector<int32_t>{256, 257}));
  std::ofstream(merges) << "a\n";
  EXPECT_NE(error_of([&] { Tokenizer::from_gpt2(vocabulary, merges); }).find("merges.txt"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep
