// What a good file says, read and written.
#include <gtest/gtest.h>
#include <halfstep/safetensors.h>

#include <random>

#include "safetensors/crafted.h"
#include "safetensors/safetensors_header.h"
#include "support/error_of.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

using testing::entry;
using testing::error_of;
using testing::file_of;
using testing::repeated;

files::SafetensorsHeader header_of(const std::string& file) {
  return files::parse_safetensors_header(std::as_bytes(std::span(file)), "file");
}

/// A header with one tensor of one byte, under a name as it stands in JSON.
std::string name_read(std::string_view name_in_json) {
  return header_of(testing::named(name_in_json)).entries.at(0).name;
}

TEST(Safetensors, NamesAreTextAndNothingElse) {
  EXPECT_EQ(name_read(".."), "..");
  EXPECT_EQ(name_read("/etc/passwd"), "/etc/passwd");
  EXPECT_EQ(name_read("a/../b"), "a/../b");
  EXPECT_EQ(name_read("%s%n"), "%s%n");
  EXPECT_EQ(name_read("\\u0041\\u00e9\\ud83d\\ude00"), "Aé😀");
  EXPECT_EQ(name_read("é😀"), "é😀");
  EXPECT_EQ(name_read("\\\"\\\\\\n"), "\"\\\n");
  EXPECT_EQ(name_read(repeated("n", 100'000)).size(), 100'000u);
}

TEST(Safetensors, EmptyTensorsStandBetweenOthers) {
  const auto header = header_of(file_of(std::string("{") + entry("z", "U8", "[3,0]", "[2,2]") + "," +
                                            entry("b", "I16", "[1]", "[0,2]") + "," +
                                            entry("a", "F32", "[0,4611686018427387904]", "[0,0]") + "}",
                                        2));
  ASSERT_EQ(header.entries.size(), 3u);
  EXPECT_EQ(header.entries[0].name, "a");
  EXPECT_EQ(header.entries[1].name, "b");
  EXPECT_EQ(header.entries[2].name, "z");
  EXPECT_EQ(header.entries[0].shape, (std::vector<int64_t>{0, int64_t{1} << 62}));
}

TEST(Safetensors, WhiteSpaceAndOrderOfKeysDoNotMatter) {
  const auto header = header_of(
      file_of("{ \"a\" :\n{\t\"data_offsets\" : [ 0 , 8 ],\r\n\"shape\" : [ ] , \"dtype\" : \"F64\" } }" +
                  std::string(100'000, ' '),
              8));
  ASSERT_EQ(header.entries.size(), 1u);
  EXPECT_EQ(header.entries[0].type, TensorType::F64);
  EXPECT_TRUE(header.entries[0].shape.empty());
}

TEST(Safetensors, AFileMayHoldNoTensors) {
  EXPECT_TRUE(header_of(file_of("{}")).entries.empty());
  const auto header = header_of(file_of(R"({"__metadata__":{"format":"pt","":""}})"));
  EXPECT_EQ(header.metadata, (std::map<std::string, std::string>{{"", ""}, {"format", "pt"}}));
}

TEST(Safetensors, RankSixtyFourIsRead) {
  const auto header = header_of(testing::one("U8", std::string("[1") + repeated(",1", 63) + "]", "[0,1]"));
  EXPECT_EQ(header.entries.at(0).shape.size(), 64u);
}

TEST(Safetensors, AMissingTensorsErrorOffersTheNearestName) {
  const testing::ScratchFolder scratch;
  const std::vector<std::byte> bytes(4);
  write_safetensors(
      scratch / "f",
      {{.name = "transformer.wte.weight", .type = TensorType::F32, .shape = {1}, .bytes = bytes},
       {.name = "transformer.wpe.bias", .type = TensorType::F32, .shape = {1}, .bytes = bytes}});
  const SafetensorsFile file(scratch / "f");
  EXPECT_NE(error_of([&] { file.entry("wte.weight"); }).find("Did you mean 'transformer.wte.weight'?"),
            std::string::npos);
  EXPECT_NE(
      error_of([&] { file.entry("transformer.wpe.bais"); }).find("Did you mean 'transformer.wpe.bias'?"),
      std::string::npos);
  EXPECT_EQ(error_of([&] { file.entry("lm_head"); }).find("Did you mean"), std::string::npos);
  EXPECT_FALSE(file.contains("lm_head"));
}

TEST(Safetensors, BytesOfAnotherFilesEntryAreRefused) {
  const testing::ScratchFolder scratch;
  const std::vector<std::byte> bytes(8);
  write_safetensors(
      scratch / "f",
      {{.name = "a", .type = TensorType::U8, .shape = {4}, .bytes = std::span(bytes).first(4)}});
  write_safetensors(scratch / "g", {{.name = "a", .type = TensorType::U8, .shape = {8}, .bytes = bytes}});
  const SafetensorsFile f(scratch / "f"), g(scratch / "g");
  EXPECT_NE(error_of([&] { (void)f.bytes(g.entry("a")); }).find("another file's"), std::string::npos);
}

struct Owned {
  std::string name;
  TensorType type;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
};

/// Random tensors of every type, with names that need escapes and shapes that are empty or scalar.
std::vector<Owned> random_tensors(std::mt19937& random) {
  const std::vector<std::string> letters = {"a", "b", ".", "/", "\"", "\\", "\n", "é", "😀", "\x7f", " "};
  std::vector<Owned> tensors;
  const size_t count = random() % 40;
  for (size_t i = 0; i < count; ++i) {
    Owned tensor{std::to_string(i), static_cast<TensorType>(random() % 22), {}, {}};
    for (size_t letter = random() % 8; letter > 0; --letter)
      tensor.name += letters[random() % letters.size()];
    uint64_t elements = 4;  // of 6 bits fill 3 bytes; a first dimension of 4 keeps every type whole
    if (random() % 4 == 0 && bits_of(tensor.type) % 8 == 0) {
      elements = 1;
    } else {
      tensor.shape = {4};
    }
    for (size_t rank = random() % 4; rank > 0; --rank) {
      tensor.shape.push_back(random() % 5);
      elements *= static_cast<uint64_t>(tensor.shape.back());
    }
    tensor.bytes.resize(elements * static_cast<uint64_t>(bits_of(tensor.type)) / 8);
    for (std::byte& byte : tensor.bytes)
      byte = std::byte(random() % (tensor.type == TensorType::BOOL ? 2 : 256));
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

std::vector<TensorToWrite> to_write(const std::vector<Owned>& tensors) {
  std::vector<TensorToWrite> result;
  for (const Owned& tensor : tensors)
    result.push_back({tensor.name, tensor.type, tensor.shape, tensor.bytes});
  return result;
}

TEST(Safetensors, RandomTensorsComeBackAndAreAligned) {
  const testing::ScratchFolder scratch;
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    const std::vector<Owned> tensors = random_tensors(random);
    const std::map<std::string, std::string> metadata = {{"round", std::to_string(round)}, {"\"\n", "é"}};
    write_safetensors(scratch / "f", to_write(tensors), metadata);
    const SafetensorsFile file(scratch / "f");
    EXPECT_EQ(file.metadata(), metadata);
    ASSERT_EQ(file.entries().size(), tensors.size());
    for (const Owned& tensor : tensors) {
      const TensorEntry& entry = file.entry(tensor.name);
      EXPECT_EQ(entry.type, tensor.type);
      EXPECT_EQ(entry.shape, tensor.shape);
      const auto bytes = file.bytes(entry);
      EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), tensor.bytes.begin(), tensor.bytes.end()));
      // A mapping starts at a page.
      const auto alignment = static_cast<uintptr_t>(std::max(1, bits_of(tensor.type) / 8));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(bytes.data()) % alignment, 0u) << tensor.name;
    }
  }
}

TEST(Safetensors, TheOrderGivenDoesNotChangeTheFile) {
  const testing::ScratchFolder scratch;
  std::mt19937 random(6);
  const std::vector<Owned> tensors = random_tensors(random);
  std::vector<TensorToWrite> shuffled = to_write(tensors);
  write_safetensors(scratch / "f", shuffled);
  std::shuffle(shuffled.begin(), shuffled.end(), random);
  write_safetensors(scratch / "g", shuffled);
  EXPECT_EQ(testing::read_text(scratch / "f"), testing::read_text(scratch / "g"));
}

TEST(Safetensors, WhatCannotBeReadIsNotWritten) {
  const std::vector<std::byte> bytes(4);
  const auto refusal = [&](TensorToWrite tensor, const std::map<std::string, std::string>& metadata = {}) {
    return error_of([&] { (void)safetensors_header({tensor}, metadata); });
  };
  const TensorToWrite good{.name = "a", .type = TensorType::F32, .shape = {1}, .bytes = bytes};
  EXPECT_EQ(refusal(good), "no error");
  const auto with = [&](auto change) {
    TensorToWrite tensor = good;
    change(tensor);
    return refusal(tensor);
  };
  EXPECT_NE(with([](auto& t) { t.shape = {2}; }).find("takes 8 bytes, but 4 were given"), std::string::npos);
  EXPECT_NE(with([](auto& t) { t.shape = {-1}; }).find("negative dimension"), std::string::npos);
  EXPECT_NE(with([](auto& t) { t.shape = {int64_t{1} << 62, 4}; }).find("overflows"), std::string::npos);
  EXPECT_NE(with([](auto& t) { t.type = TensorType::F4, t.shape = {7}; }).find("whole bytes"),
            std::string::npos);
  EXPECT_NE(with([](auto& t) { t.shape.assign(65, 1); }).find("rank 65"), std::string::npos);
  EXPECT_NE(with([](auto& t) { t.name = ""; }).find("no name"), std::string::npos);
  EXPECT_NE(with([](auto& t) { t.name = "__metadata__"; }).find("keeps that name"), std::string::npos);
  EXPECT_NE(with([](auto& t) { t.name = std::string("a\0b", 3); }).find("NUL"), std::string::npos);
  EXPECT_NE(with([](auto& t) { t.name = "\xff"; }).find("not valid UTF-8"), std::string::npos);
  EXPECT_NE(refusal(good, {{"k", "\xff"}}).find("not valid UTF-8"), std::string::npos);
  EXPECT_NE(with([](auto& t) { t.name = repeated("n", 17 << 20); }).find("bytes"), std::string::npos);
  EXPECT_NE(with([](auto& t) { t.name = repeated("n", 3 << 20); }).find("read back"), std::string::npos);
  EXPECT_NE(refusal(good, {{"k", repeated("n", 3 << 20)}}).find("read back"), std::string::npos);
  EXPECT_NE(error_of([&] { (void)safetensors_header({good, good}); }).find("duplicate"), std::string::npos);
}

TEST(Safetensors, ARefusedFileLeavesTheOldOne) {
  const testing::ScratchFolder scratch;
  testing::write_text(scratch / "f", "old");
  EXPECT_NE(error_of([&] {
              write_safetensors(scratch / "f", {{.name = "a", .type = TensorType::U8, .shape = {1}}});
            }),
            "no error");
  EXPECT_EQ(testing::read_text(scratch / "f"), "old");
}

}  // namespace
}  // namespace halfstep
