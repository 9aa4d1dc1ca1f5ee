// Against the safetensors package, both ways.
#include <gtest/gtest.h>
#include <halfstep/safetensors.h>
#include <openssl/evp.h>

#include <random>

#include "support/python.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

using nlohmann::json;

constexpr int kTypeCount = 22;

std::string hex(std::span<const unsigned char> bytes) {
  std::string text;
  char digits[3];
  for (const unsigned char byte : bytes) {
    std::snprintf(digits, sizeof digits, "%02x", byte);
    text += digits;
  }
  return text;
}

std::string sha256(std::span<const std::byte> bytes) {
  unsigned char digest[32];
  unsigned int size = 0;
  EVP_Digest(bytes.data(), bytes.size(), digest, &size, EVP_sha256(), nullptr);
  return hex(digest);
}

json described(const SafetensorsFile& file) {
  json answer = json::object();
  for (const TensorEntry& entry : file.entries())
    answer[entry.name] = {
        {"type", to_string(entry.type)}, {"shape", entry.shape}, {"sha256", sha256(file.bytes(entry))}};
  return answer;
}

json without_torch(json answer) {
  for (auto& tensor : answer) tensor.erase("torch");
  return answer;
}

struct Owned {
  std::string name;
  TensorType type;
  std::vector<int64_t> shape;
  std::vector<unsigned char> bytes;
};

bool package_writes(TensorType type) { return type != TensorType::F6_E2M3 && type != TensorType::F6_E3M2; }

/// Each type several times, in random order, with empty tensors and, where a byte holds an element, scalars.
std::vector<Owned> random_tensors(std::mt19937& random, bool only_what_the_package_writes) {
  std::vector<Owned> tensors;
  for (int i = 0; i < 3 * kTypeCount; ++i) {
    const auto type = static_cast<TensorType>(i % kTypeCount);
    if (only_what_the_package_writes && !package_writes(type)) continue;
    Owned tensor{"layer." + std::to_string(random() % 1000) + ".é\"" + std::to_string(i), type, {}, {}};
    int64_t elements = 1;
    if (i / kTypeCount > 0 || bits_of(type) < 8) {
      tensor.shape = {static_cast<int64_t>(random() % 4), static_cast<int64_t>(random() % 3 + 1), 4};
      for (const int64_t dimension : tensor.shape) elements *= dimension;
    }
    tensor.bytes.resize(static_cast<size_t>(elements * bits_of(type) / 8));
    for (unsigned char& byte : tensor.bytes)
      byte = static_cast<unsigned char>(random() % (type == TensorType::BOOL ? 2 : 256));
    tensors.push_back(std::move(tensor));
  }
  std::shuffle(tensors.begin(), tensors.end(), random);
  return tensors;
}

void write_ours(const std::filesystem::path& path, const std::vector<Owned>& tensors,
                const std::map<std::string, std::string>& metadata) {
  std::vector<TensorToWrite> to_write;
  for (const Owned& tensor : tensors)
    to_write.push_back({tensor.name, tensor.type, tensor.shape, std::as_bytes(std::span(tensor.bytes))});
  write_safetensors(path, to_write, metadata);
}

json asked(const std::filesystem::path& path, const std::vector<Owned>& tensors,
           const std::map<std::string, std::string>& metadata) {
  json list = json::array();
  for (const Owned& tensor : tensors)
    list.push_back({{"name", tensor.name},
                    {"type", to_string(tensor.type)},
                    {"shape", tensor.shape},
                    {"hex", hex(tensor.bytes)}});
  return {{"path", path.string()}, {"tensors", list}, {"metadata", metadata}};
}

TEST(SafetensorsPackage, EachReadsWhatTheOtherWritesAndTheBytesAreTheSame) {
  const testing::ScratchFolder scratch;
  std::mt19937 random(7);
  constexpr int kRounds = 10;
  // One key of metadata at most: the package writes more in the order of a hash table, anew each time.
  const std::map<std::string, std::string> metadata = {{"format", "pt"}};
  json question = {{"write", json::array()}, {"read", json::array()}};
  for (int round = 0; round < kRounds; ++round) {
    const auto tensors = random_tensors(random, true);
    write_ours(scratch / ("ours" + std::to_string(round)), tensors, metadata);
    question["write"].push_back(asked(scratch / ("theirs" + std::to_string(round)), tensors, metadata));
    question["read"].push_back((scratch / ("ours" + std::to_string(round))).string());
  }
  write_ours(scratch / "every_type", random_tensors(random, false), metadata);
  question["read"].push_back((scratch / "every_type").string());
  const json answer = testing::ask_python("tests/safetensors/safetensors_package.py", question);

  for (int round = 0; round < kRounds; ++round) {
    const auto ours = scratch / ("ours" + std::to_string(round)),
               theirs = scratch / ("theirs" + std::to_string(round));
    EXPECT_EQ(described(SafetensorsFile(ours)), without_torch(answer[static_cast<size_t>(round)]));
    EXPECT_EQ(described(SafetensorsFile(theirs)), without_torch(answer[static_cast<size_t>(round)]));
    EXPECT_TRUE(testing::read_text(ours) == testing::read_text(theirs)) << "round " << round;
  }
  const json& every_type = answer[kRounds];
  EXPECT_EQ(described(SafetensorsFile(scratch / "every_type")), without_torch(every_type));
  std::set<std::string> read_by_package, read_by_torch;
  for (const auto& tensor : every_type) {
    read_by_package.insert(tensor["type"]);
    if (tensor["torch"]) read_by_torch.insert(tensor["type"]);
  }
  EXPECT_EQ(read_by_package.size(), 22u);
  EXPECT_EQ(read_by_torch.size(), 19u);
}

TEST(SafetensorsPackage, MiniLmReadsAsThePackageReadsIt) {
  const std::filesystem::path path = HALFSTEP_MINILM;
  if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is not there; tools/setup installs it";
  const json answer = testing::ask_python("tests/safetensors/safetensors_package.py",
                                          {{"write", json::array()}, {"read", {path.string()}}});
  EXPECT_EQ(answer[0].size(), 104u);
  const SafetensorsFile file(path);
  EXPECT_EQ(described(file), without_torch(answer[0]));

  const testing::ScratchFolder scratch;
  std::vector<TensorToWrite> tensors;
  for (const TensorEntry& entry : file.entries())
    tensors.push_back({entry.name, entry.type, entry.shape, file.bytes(entry)});
  write_safetensors(scratch / "again", tensors, file.metadata());
  EXPECT_TRUE(testing::read_text(scratch / "again") == testing::read_text(path))
      << "the package wrote other bytes";
}

}  // namespace
}  // namespace halfstep
