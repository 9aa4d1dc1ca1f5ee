#include "train/token_sources.h"

#include <gtest/gtest.h>
#include <halfstep/error.h>

#include "support/error_of.h"
#include "support/scratch.h"

namespace halfstep::train {
namespace {

using halfstep::testing::ScratchFolder;
using halfstep::testing::write_text;

std::string text_in(const std::filesystem::path& path) {
  const TokenFile file(path, {.vocabulary_size = 256});
  std::vector<int64_t> ids(static_cast<size_t>(file.size()));
  file.read(0, ids);
  return {ids.begin(), ids.end()};
}

TEST(TokenSources, FolderIsReadInTheOrderOfNamesWithoutHiddenFiles) {
  const ScratchFolder folder;
  std::filesystem::create_directories(folder / "text/b");
  std::filesystem::create_directories(folder / "text/.git");
  write_text(folder / "text/c.txt", "three");
  write_text(folder / "text/a.txt", "one");
  write_text(folder / "text/b/x.txt", "two");
  write_text(folder / "text/.git/x.txt", "hidden");
  write_text(folder / "text/.hidden", "hidden");
  const auto sources =
      prepare_tokens({.train = {(folder / "text").string()}}, Tokenizer::bytes(), folder / "tokens");
  ASSERT_EQ(sources.train.size(), 1U);
  EXPECT_EQ(text_in(sources.train[0]), "onetwothree");
  EXPECT_TRUE(sources.validation.empty());
}

TEST(TokenSources, WholeDocumentsAreHeldOutAndNoneIsInBoth) {
  const ScratchFolder folder;
  std::filesystem::create_directories(folder / "text");
  for (int i = 0; i < 26; ++i) {
    const std::string letter(1, static_cast<char>('a' + i));
    write_text(folder / ("text/" + letter), std::string(100, letter[0]));
  }
  const auto sources = prepare_tokens({.train = {(folder / "text").string()}, .validation_fraction = 0.2},
                                      Tokenizer::bytes(), folder / "tokens");
  const std::string train = text_in(sources.train.at(0)), held = text_in(sources.validation.at(0));
  EXPECT_EQ(train.size() + held.size(), 2600U);
  EXPECT_EQ(held.size(), 500U);  // the largest number of documents of 100 bytes below 0.2 of 2,600
  for (const char letter : held) EXPECT_EQ(train.find(letter), std::string::npos) << letter;
}

TEST(TokenSources, EndOfASingleFileIsHeldOut) {
  const ScratchFolder folder;
  write_text(folder / "book.txt", "0123456789");
  const auto sources = prepare_tokens({.train = {(folder / "book.txt").string()}, .validation_fraction = 0.3},
                                      Tokenizer::bytes(), folder / "tokens");
  EXPECT_EQ(text_in(sources.train.at(0)), "0123456");
  EXPECT_EQ(text_in(sources.validation.at(0)), "789");
}

TEST(TokenSources, WhatIsNotTextIsRefusedByName) {
  const ScratchFolder folder;
  write_text(folder / "photo.png", std::string("\x89PNG\r\n\x1a\n\0\0\0\rIHDR", 16));
  write_text(folder / "book.txt.gz", "\x1f\x8b\x08");
  write_text(folder / "chat.jsonl", "{\"text\": \"hello\"}\n{\"txt\": \"\"}\n");
  for (const auto& [name, why] :
       {std::pair("photo.png", "its byte 8 is 0"), {"book.txt.gz", "unpacked"}, {"chat.jsonl", "line 2"}}) {
    const std::string error = halfstep::testing::error_of([&] {
      prepare_tokens({.train = {(folder / name).string()}}, Tokenizer::bytes(), folder / "tokens");
    });
    EXPECT_TRUE(error.starts_with("data.train: ")) << error;
    EXPECT_NE(error.find(name), std::string::npos) << error;
    EXPECT_NE(error.find(why), std::string::npos) << error;
  }
}

// A tenth of little is less than any of them, and still something can be held out.
TEST(TokenSources, OfAFewFilesTheEndOfTheLargestIsHeldOut) {
  const ScratchFolder folder;
  std::filesystem::create_directories(folder / "text");
  write_text(folder / "text/a", std::string(30, 'a'));
  write_text(folder / "text/b", "0123456789012345678901234567890123456789");
  write_text(folder / "text/c", std::string(30, 'c'));
  const auto sources = prepare_tokens({.train = {(folder / "text").string()}, .validation_fraction = 0.1},
                                      Tokenizer::bytes(), folder / "tokens");
  EXPECT_EQ(text_in(sources.validation.at(0)), "0123456789");
  EXPECT_EQ(text_in(sources.train.at(0)).size(), 90U);
}

TEST(TokenSources, LinesOfTextAreDocumentsCompressedOrNot) {
  const ScratchFolder folder;
  write_text(folder / "a.jsonl", "{\"text\": \"one\"}\n{\"text\": \"two\"}\n{\"text\": \"three\"}\n");
  ASSERT_EQ(std::system(("gzip -k " + (folder / "a.jsonl").string()).c_str()), 0);
  for (const char* name : {"a.jsonl", "a.jsonl.gz"}) {
    const auto sources = prepare_tokens({.train = {(folder / name).string()}, .validation_fraction = 0.3},
                                        Tokenizer::bytes(), folder / "tokens");
    EXPECT_EQ(text_in(sources.train.at(0)), "onetwo");
    EXPECT_EQ(text_in(sources.validation.at(0)), "three");
    EXPECT_FALSE(std::filesystem::exists(folder / "tokens/unpacked"));
  }
  write_text(folder / "b.jsonl", "{\"body\": \"four\", \"text\": \"five\"}\n");
  const auto sources = prepare_tokens({.train = {(folder / "b.jsonl").string()}, .text_field = "body"},
                                      Tokenizer::bytes(), folder / "tokens");
  EXPECT_EQ(text_in(sources.train.at(0)), "four");
}

struct MarkedText {
  std::string ids, given, begins;  // the second and third: '1' or '.'
};

MarkedText marked_text_in(const std::filesystem::path& path) {
  const TokenFile file(path, {.vocabulary_size = 256});
  std::vector<int64_t> ids(static_cast<size_t>(file.size()));
  std::vector<TokenMarks> marks(ids.size());
  file.read(0, ids, marks);
  MarkedText found{.ids = {ids.begin(), ids.end()}, .given = "", .begins = ""};
  for (const TokenMarks& mark : marks) {
    found.given += mark.is_given ? '1' : '.';
    found.begins += mark.begins_text ? '1' : '.';
  }
  return found;
}

TEST(TokenSources, ExamplesStandSideBySideAndNoneAcrossTheEndOfASequence) {
  const ScratchFolder folder;
  write_text(folder / "a.jsonl", R"({"prompt": "ab", "completion": "CD"}
{"prompt": "ef", "completion": "GHI"}
{"prompt": "j", "completion": "KLM"}
{"prompt": "nopqrstuv", "completion": "W"}
{"prompt": "x", "completion": "YZYZYZYZYZ"}
)");
  RunConfig::Data data{.train = {(folder / "a.jsonl").string()}, .sequence_length = 8};
  const auto sources = prepare_tokens(data, Tokenizer::bytes(), folder / "tokens", {.end = '$'});
  const MarkedText found = marked_text_in(sources.train.at(0));
  // The first sequence has 5 and no room for 6; the second 6; the third example (5) fits neither; the fourth
  // has nothing to learn within 8 tokens; the last is cut to 8.
  EXPECT_EQ(found.ids,
            "abCD$$$$"
            "efGHI$$$"
            "jKLM$$$$"
            "xYZYZYZY"
            "$");
  EXPECT_EQ(found.given,
            "11...111"
            "11....11"
            "1....111"
            "1......."
            "1");
  EXPECT_EQ(found.begins,
            "1....1.."
            "1.....1."
            "1....1.."
            "1......."
            "1");
  EXPECT_EQ(sources.examples, "4 examples in 4 sequences, 25% filler, 1 cut, 1 left out: too long a prompt");
  // Again, from the file that is there; another length is another file.
  EXPECT_EQ(prepare_tokens(data, Tokenizer::bytes(), folder / "tokens", {.end = '$'}).examples,
            sources.examples);
  data.sequence_length = 16;
  EXPECT_NE(prepare_tokens(data, Tokenizer::bytes(), folder / "tokens", {.end = '$'}).examples,
            sources.examples);
}

TEST(TokenSources, MessagesAreLearnedWhereTheAssistantSpeaks) {
  const ScratchFolder folder;
  write_text(
      folder / "a.jsonl",
      R"({"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "CD"}, {"role": "user", "content": "e"}, {"role": "assistant", "content": "F"}, {"role": "user", "content": "g"}]}
)");
  const RunConfig::Data data{.train = {(folder / "a.jsonl").string()}, .sequence_length = 24};
  const std::string error =
      halfstep::testing::error_of([&] { prepare_tokens(data, Tokenizer::bytes(), folder / "tokens", {}); });
  EXPECT_NE(error.find("a.jsonl, line 1: has messages, and the model has no chat template"),
            std::string::npos)
      << error;
  const ChatTemplate chat(
      "{% for m in messages %}{{ '<' if m.role == 'user' else '>' }}{{ m.content }}.{% endfor %}"
      "{% if add_generation_prompt %}>{% endif %}",
      {});
  const auto sources = prepare_tokens(data, Tokenizer::bytes(), folder / "tokens", {.chat = chat});
  const MarkedText found = marked_text_in(sources.train.at(0));
  EXPECT_EQ(found.ids.substr(0, 14), "<ab.>CD.<e.>F.");
  EXPECT_EQ(found.given.substr(0, 14), "11111...1111..");
  const ChatTemplate shifting("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
                              {});
  const std::string shifted = halfstep::testing::error_of([&] {
    prepare_tokens(data, Tokenizer::bytes(), folder / "tokens", {.chat = shifting, .chat_text = "another"});
  });
  EXPECT_NE(shifted.find("line 1: the chat template writes message 2"), std::string::npos) << shifted;
}

// Templates write a system message of their own where there is none; what is learned begins behind the words
// that begin every answer.
TEST(TokenSources, AnAnswerMayBeTheFirstMessage) {
  const ScratchFolder folder;
  write_text(
      folder / "a.jsonl",
      R"({"messages": [{"role": "assistant", "content": "AB"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "D"}]}
)");
  const RunConfig::Data data{.train = {(folder / "a.jsonl").string()}, .sequence_length = 24};
  const ChatTemplate chat(
      "{% for m in messages %}{% if loop.first and m.role != 'system' %}(s){% endif %}"
      "{{ '<' if m.role == 'user' else '>' }}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}>{% "
      "endif %}",
      {});
  const auto sources = prepare_tokens(data, Tokenizer::bytes(), folder / "tokens", {.chat = chat});
  const MarkedText found = marked_text_in(sources.train.at(0));
  EXPECT_EQ(found.ids.substr(0, 13), "(s)>AB.<c.>D.");
  EXPECT_EQ(found.given.substr(0, 13), "1111...1111..");
  const ChatTemplate thinking(
      "{% for m in messages %}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>?{% endif %}", {});
  const std::string error = halfstep::testing::error_of([&] {
    prepare_tokens(data, Tokenizer::bytes(), folder / "tokens", {.chat = thinking, .chat_text = "another"});
  });
  EXPECT_NE(error.find("the chat template writes message 1"), std::string::npos) << error;
}

TEST(TokenSources, ExamplesWithoutAnythingToLearnAreToldFromLongOnes) {
  const ScratchFolder folder;
  const std::string empty =
      R"({"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": ""}]})";
  const std::string whole =
      R"({"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "C"}]})";
  const ChatTemplate chat("{% for m in messages %}{{ m.content }}{% endfor %}", {});
  const RunConfig::Data data{.train = {(folder / "a.jsonl").string()}, .sequence_length = 8};
  write_text(folder / "a.jsonl", empty + "\n" + whole + "\n");
  EXPECT_EQ(prepare_tokens(data, Tokenizer::bytes(), folder / "tokens", {.chat = chat}).examples,
            "1 example in 1 sequence, 63% filler, 1 left out: nothing to learn");
  write_text(folder / "a.jsonl", empty + "\n");
  const std::string error = halfstep::testing::error_of(
      [&] { prepare_tokens(data, Tokenizer::bytes(), folder / "tokens", {.chat = chat}); });
  EXPECT_NE(error.find("none of 1 examples has a token to learn"), std::string::npos) << error;
}

TEST(TokenSources, HeldOutFilesWithoutTextAreRefused) {
  const ScratchFolder folder;
  write_text(folder / "a.txt", "text");
  write_text(folder / "empty.txt", "");
  const std::string error = halfstep::testing::error_of([&] {
    prepare_tokens({.train = {(folder / "a.txt").string()}, .validation = {(folder / "empty.txt").string()}},
                   Tokenizer::bytes(), folder / "tokens");
  });
  EXPECT_EQ(error, "data.validation: holds no text and no tokens.");
}

TEST(TokenSources, ExamplesAndTextAreNotMixed) {
  const ScratchFolder folder;
  write_text(folder / "a.jsonl", "{\"prompt\": \"ab\", \"completion\": \"CD\"}\n");
  write_text(folder / "b.txt", "text");
  const std::string error = halfstep::testing::error_of([&] {
    prepare_tokens({.train = {(folder / "a.jsonl").string(), (folder / "b.txt").string()}},
                   Tokenizer::bytes(), folder / "tokens");
  });
  EXPECT_NE(error.find("a.jsonl holds examples and"), std::string::npos) << error;
}

TEST(TokenSources, TokenFilesAreTakenAsTheyAre) {
  const ScratchFolder folder;
  write_text(folder / "a.bin", std::string("\1\0\2\0", 4));
  const auto sources =
      prepare_tokens({.train = {(folder / "a.bin").string()}}, Tokenizer::bytes(), folder / "tokens");
  EXPECT_EQ(sources.train.at(0), folder / "a.bin");
  EXPECT_FALSE(std::filesystem::exists(folder / "tokens"));
  EXPECT_THROW(prepare_tokens({.train = {(folder / "a.bin").string()}, .validation_fraction = 0.5},
                              Tokenizer::bytes(), folder / "tokens"),
               Error);
}

}  // namespace
}  // namespace halfstep::train
