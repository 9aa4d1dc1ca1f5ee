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
  write_text(folder / "chat.jsonl", "{\"text\": \"hello\"}\n");
  for (const auto& [name, why] :
       {std::pair("photo.png", "its byte 8 is 0"), {"book.txt.gz", "gunzip"}, {"chat.jsonl", "JSON Lines"}}) {
    const std::string error = halfstep::testing::error_of([&] {
      prepare_tokens({.train = {(folder / name).string()}}, Tokenizer::bytes(), folder / "tokens");
    });
    EXPECT_TRUE(error.starts_with("data.train: ")) << error;
    EXPECT_NE(error.find(name), std::string::npos) << error;
    EXPECT_NE(error.find(why), std::string::npos) << error;
  }
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
