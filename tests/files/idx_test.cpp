#include "files/idx.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <cstring>

#include "support/error_of.h"

namespace halfstep {
namespace {

using files::IdxType;
using files::parse_idx;
using testing::error_of;

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

files::IdxArray parse(const std::string& file) { return parse_idx(bytes_of(file), "images.idx"); }
std::string refusal(const std::string& file) {
  return error_of([&] { parse(file); });
}

std::string gzip(const std::string& plain) {
  std::string packed(plain.size() + 1000, '\0');
  z_stream stream{};
  deflateInit2(&stream, 9, Z_DEFLATED, 16 + MAX_WBITS, 9, Z_DEFAULT_STRATEGY);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(plain.data()));
  stream.avail_in = static_cast<uInt>(plain.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  deflate(&stream, Z_FINISH);
  packed.resize(packed.size() - stream.avail_out);
  deflateEnd(&stream);
  return packed;
}

const std::string kTwoByThree(
    "\0\0\x08\x02\0\0\0\x02\0\0\0\x03"
    "abcdef",
    18);
const std::string kOneDouble("\0\0\x0E\x01\0\0\0\x01\x3F\xF8\0\0\0\0\0\0", 16);  // 1.5, big-endian

TEST(Idx, IsReadPlainAndCompressed) {
  for (const std::string& file : {kTwoByThree, gzip(kTwoByThree)}) {
    const auto array = parse(file);
    EXPECT_EQ(array.type, IdxType::U8);
    EXPECT_EQ(array.shape, (std::vector<int64_t>{2, 3}));
    EXPECT_EQ(std::memcmp(array.elements.data(), "abcdef", 6), 0);
  }
}

TEST(Idx, ElementsComeInTheMachinesOrderOfBytes) {
  const auto array = parse(kOneDouble);
  double value = 0;
  std::memcpy(&value, array.elements.data(), sizeof value);
  EXPECT_EQ(value, 1.5);
}

TEST(Idx, EveryTruncationIsRefused) {
  for (const std::string& file : {kTwoByThree, gzip(kTwoByThree)})
    for (size_t length = 0; length < file.size(); ++length)
      EXPECT_NE(refusal(file.substr(0, length)), "no error") << length;
}

TEST(Idx, BytesBehindTheEndAreRefused) {
  EXPECT_NE(refusal(kTwoByThree + "g").find("goes on"), std::string::npos);
  EXPECT_NE(refusal(gzip(kTwoByThree + "g")).find("goes on"), std::string::npos);
  EXPECT_NE(refusal(gzip(kTwoByThree) + "g").find("behind"), std::string::npos);
}

TEST(Idx, AFlippedBitInCompressedElementsIsFound) {
  std::string file = gzip(kTwoByThree);
  file[file.size() - 6] = static_cast<char>(file[file.size() - 6] ^ 1);  // of the CRC
  EXPECT_NE(refusal(file).find("damaged"), std::string::npos);
}

// 2^32 - 1 in each of 8 dimensions; and 16 GiB in a file of 12 bytes. Neither may be allocated.
TEST(Idx, ShapesThatOverflowOrLieAreRefusedBeforeMemoryIsTaken) {
  std::string huge("\0\0\x0E\x08", 4);
  huge += std::string(32, '\xFF');
  EXPECT_NE(refusal(huge).find("2^64"), std::string::npos);
  const std::string lying("\0\0\x0C\x01\xFF\xFF\xFF\xFF", 8);
  EXPECT_NE(refusal(lying).find("cannot hold"), std::string::npos);
  EXPECT_NE(refusal(gzip(lying)).find("cannot hold"), std::string::npos);
}

TEST(Idx, OtherFilesAreRefusedByTheirFirstBytes) {
  EXPECT_NE(refusal("PNG and so on").find("no IDX"), std::string::npos);
  EXPECT_NE(refusal(std::string("\0\0\x0A\x01\0\0\0\0", 8)).find("no IDX"), std::string::npos);
  EXPECT_NE(refusal(std::string("\0\0\x08\0", 4)).find("0 dimensions"), std::string::npos);
}

}  // namespace
}  // namespace halfstep
