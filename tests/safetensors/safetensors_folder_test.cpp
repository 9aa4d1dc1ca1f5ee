#include <gtest/gtest.h>
#include <halfstep/safetensors.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "safetensors/crafted.h"
#include "safetensors/safetensors_index.h"
#include "support/error_of.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

using testing::error_of;
using testing::read_text;
using testing::ScratchFolder;
using testing::write_text;

struct Ten {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<TensorToWrite> tensors;
};

/// t0 to t9, of 100 bytes each.
Ten ten_tensors() {
  Ten ten;
  for (int i = 0; i < 10; ++i) ten.bytes.emplace_back(100, std::byte(i));
  for (int i = 0; i < 10; ++i)
    ten.tensors.push_back({.name = std::string("t") + std::to_string(i),
                           .type = TensorType::U8,
                           .shape = {100},
                           .bytes = ten.bytes[static_cast<size_t>(i)]});
  return ten;
}

std::vector<std::string> files_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& file : std::filesystem::directory_iterator(folder))
    names.push_back(file.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

TEST(SafetensorsFolder, ShardsAreFilledInOrderAndNamedAsHuggingFaceDoes) {
  const ScratchFolder scratch;
  const Ten ten = ten_tensors();
  write_safetensors_folder(scratch.path(), ten.tensors, 400);
  EXPECT_EQ(files_in(scratch.path()),
            (std::vector<std::string>{"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                                      "model-00003-of-00003.safetensors", "model.safetensors.index.json"}));
  const auto index = nlohmann::json::parse(read_text(scratch / "model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 1000);
  EXPECT_EQ(index["weight_map"]["t3"], "model-00001-of-00003.safetensors");
  EXPECT_EQ(index["weight_map"]["t4"], "model-00002-of-00003.safetensors");

  const SafetensorsFolder folder(scratch.path());
  EXPECT_EQ(folder.files().size(), 3u);
  EXPECT_EQ(folder.names().size(), 10u);
  for (const TensorToWrite& tensor : ten.tensors) {
    const auto bytes = folder.bytes(tensor.name);
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), tensor.bytes.begin(), tensor.bytes.end()));
    EXPECT_EQ(folder.entry(tensor.name).shape, tensor.shape);
  }
  EXPECT_NE(error_of([&] { folder.entry("tt3"); }).find("Did you mean 't3'?"), std::string::npos);
}

TEST(SafetensorsFolder, ATensorLargerThanAShardHasOneOfItsOwn) {
  const ScratchFolder scratch;
  const Ten ten = ten_tensors();
  write_safetensors_folder(scratch.path(), ten.tensors, 50);
  EXPECT_EQ(SafetensorsFolder(scratch.path()).files().size(), 10u);
}

TEST(SafetensorsFolder, WhatAnEarlierSaveLeftIsRemovedAndNothingElse) {
  const ScratchFolder scratch;
  const Ten ten = ten_tensors();
  for (const char* name : {"config.json", "adapter_model.safetensors", "model-1-of-2.safetensors"})
    write_text(scratch / name, "kept");
  const auto others = files_in(scratch.path());
  write_safetensors_folder(scratch.path(), ten.tensors, 400);
  write_safetensors_folder(scratch.path(), ten.tensors, 500);
  EXPECT_EQ(SafetensorsFolder(scratch.path()).files().size(), 2u);
  EXPECT_EQ(files_in(scratch.path()).size(), others.size() + 3);
  write_safetensors_folder(scratch.path(), ten.tensors);
  EXPECT_EQ(SafetensorsFolder(scratch.path()).names().size(), 10u);
  EXPECT_EQ(files_in(scratch.path()).size(), others.size() + 1);
  write_safetensors_folder(scratch.path(), ten.tensors, 400);
  EXPECT_EQ(files_in(scratch.path()).size(), others.size() + 4);
}

TEST(SafetensorsFolder, AllDisagreementsAreToldAtOnce) {
  const ScratchFolder scratch;
  const std::byte one{1};
  const auto tensor = [&](std::string name) {
    return TensorToWrite{.name = std::move(name), .type = TensorType::U8, .shape = {1}, .bytes = {&one, 1}};
  };
  write_safetensors(scratch / "x.safetensors", {tensor("a"), tensor("stray"), tensor("moved")});
  write_safetensors(scratch / "y.safetensors", {tensor("b")});
  write_text(
      scratch / "model.safetensors.index.json",
      R"({"weight_map":{"a":"x.safetensors","b":"y.safetensors","moved":"y.safetensors","lost":"x.safetensors"}})");
  const std::string message = error_of([&] { SafetensorsFolder{scratch.path()}; });
  EXPECT_NE(message.find("disagree on 4 tensors"), std::string::npos) << message;
  EXPECT_NE(message.find("'x.safetensors' holds 'stray', which the index does not name"), std::string::npos)
      << message;
  EXPECT_NE(message.find("'x.safetensors' holds 'moved', which the index places in 'y.safetensors'"),
            std::string::npos)
      << message;
  EXPECT_NE(message.find("places 'moved' in 'y.safetensors', which does not hold it"), std::string::npos)
      << message;
  EXPECT_NE(message.find("places 'lost' in 'x.safetensors', which does not hold it"), std::string::npos)
      << message;
}

// An index of ten thousand names for one file of many tensors would have it read ten thousand times. Here the
// second file is not there, so opening it would be a FileError.
TEST(SafetensorsFolder, NoFileIsOpenedOnceTheyHoldMoreThanTheIndexNames) {
  const ScratchFolder scratch;
  write_safetensors(scratch / "x.safetensors", ten_tensors().tensors);
  write_text(scratch / "model.safetensors.index.json",
             R"({"weight_map":{"t0":"x.safetensors","u":"y.safetensors"}})");
  const std::string message = error_of([&] { SafetensorsFolder{scratch.path()}; });
  EXPECT_NE(message.find("disagree on 9 tensors"), std::string::npos) << message;
}

TEST(SafetensorsFolder, AFolderWithoutWeightsOrShardsIsRefused) {
  const ScratchFolder scratch;
  EXPECT_NE(error_of([&] { SafetensorsFolder{scratch.path()}; }).find("neither"), std::string::npos);
  EXPECT_NE(error_of([&] { SafetensorsFolder{scratch / "absent"}; }).find("neither"), std::string::npos);
  write_text(scratch / "model.safetensors.index.json", R"({"weight_map":{"a":"absent.safetensors"}})");
  EXPECT_THROW(SafetensorsFolder{scratch.path()}, FileError);
}

TEST(SafetensorsFolder, NamesInTheIndexNeverLeaveTheFolder) {
  const std::vector<std::string> refused = {"../x.safetensors",
                                            "/x.safetensors",
                                            "a/x.safetensors",
                                            "a\\x.safetensors",
                                            "..",
                                            ".",
                                            "",
                                            ".safetensors",
                                            ".x.safetensors",
                                            "x.bin",
                                            "x.safetensors/",
                                            "x.safetensors\n",
                                            std::string("x\0.safetensors", 14),
                                            "x\x1b[2J.safetensors",
                                            std::string(300, 'x') + ".safetensors"};
  for (const std::string& name : refused) {
    const std::string text = nlohmann::json({{"weight_map", {{"a", name}}}}).dump();
    EXPECT_NE(error_of([&] { files::parse_safetensors_index(text, "index"); }).find("Only a plain name"),
              std::string::npos)
        << name;
  }
  EXPECT_EQ(files::parse_safetensors_index(R"({"weight_map":{"../a":"é x..safetensors"}})", "index")
                .file_of.at("../a"),
            "é x..safetensors");
}

TEST(SafetensorsFolder, AnIndexThatIsNoneIsRefused) {
  const auto refusal = [](std::string_view text) {
    return error_of([&] { files::parse_safetensors_index(text, "index"); });
  };
  EXPECT_NE(refusal("[]").find("not a JSON object"), std::string::npos);
  EXPECT_NE(refusal("{}").find("no object 'weight_map'"), std::string::npos);
  EXPECT_NE(refusal(R"({"weight_map":[]})").find("no object 'weight_map'"), std::string::npos);
  EXPECT_NE(refusal(R"({"weight_map":{"a":1}})").find("is not a string"), std::string::npos);
  EXPECT_NE(refusal(R"({"weight_map":{"a":"x.safetensors","a":"y.safetensors"}})").find("twice"),
            std::string::npos);
  std::string many = R"({"weight_map":{)";
  for (int i = 0; i < 10'001; ++i)
    many += '"' + std::to_string(i) + "\":\"" + std::to_string(i) + ".safetensors\",";
  many.back() = '}';
  EXPECT_NE(refusal(many + "}").find("10001 files"), std::string::npos);
}

TEST(SafetensorsFolder, OfMoreShardsThanAreReadIsRefusedBeforeTheFirstIsWritten) {
  const ScratchFolder scratch;
  const std::byte one{1};
  std::vector<TensorToWrite> tensors;
  for (int i = 0; i < 10'001; ++i)
    tensors.push_back(
        {.name = std::to_string(i), .type = TensorType::U8, .shape = {1}, .bytes = std::span(&one, 1)});
  EXPECT_NE(error_of([&] { write_safetensors_folder(scratch.path(), tensors, 1); }).find("10001 files"),
            std::string::npos);
  EXPECT_TRUE(files_in(scratch.path()).empty());
}

TEST(SafetensorsFolder, AFolderThatCannotBeWrittenIsAFileError) {
  const ScratchFolder scratch;
  write_text(scratch / "file", "");
  EXPECT_THROW(write_safetensors_folder(scratch / "file", ten_tensors().tensors), FileError);
}

}  // namespace
}  // namespace halfstep
