#include "data_files/idx.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <zlib.h>

#include <cstring>
#include <random>

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
  packed.erase(packed.size() - stream.avail_out);
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
  EXPECT_NE(refusal(kTwoByThree + "g").find("continues"), std::string::npos);
  EXPECT_NE(refusal(gzip(kTwoByThree + "g")).find("continues"), std::string::npos);
  EXPECT_NE(refusal(gzip(kTwoByThree) + "g").find("after"), std::string::npos);
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
  EXPECT_NE(refusal(huge).find("2^63"), std::string::npos);
  std::string hidden("\0\0\x08\x08\0\0\0\0", 8);  // the first dimension is 0, the others overflow
  hidden += std::string(28, '\xFF');
  EXPECT_NE(refusal(hidden).find("2^63"), std::string::npos);
  const std::string lying("\0\0\x0C\x01\xFF\xFF\xFF\xFF", 8);
  EXPECT_NE(refusal(lying).find("cannot hold"), std::string::npos);
  EXPECT_NE(refusal(gzip(lying)).find("cannot hold"), std::string::npos);
}

// 2 GB by the header, which the size of the file allows, and 2 MB of data.
TEST(Idx, MemoryFollowsTheDataNotTheHeader) {
  std::mt19937 random(1);
  std::string data(2'000'000, '\0');
  for (char& c : data) c = static_cast<char>(random());
  const std::string file = gzip(std::string("\0\0\x08\x01\x77\x35\x94\0", 8) + data);
  const auto peak_kib = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
  };
  const long before = peak_kib();
  EXPECT_NE(refusal(file).find("ends after 2000000 of 2000000000"), std::string::npos) << refusal(file);
  EXPECT_LT(peak_kib() - before, 100'000);
}

TEST(Idx, ThatIsLargeComesBackWhole) {
  std::string file("\0\0\x08\x01\0\x4C\x4B\x40", 8);  // 5,000,000
  for (int i = 0; i < 5'000'000; ++i) file += static_cast<char>(i % 251);
  for (const auto& array : {parse(file), parse(gzip(file))})
    EXPECT_EQ(std::memcmp(array.elements.data(), file.data() + 8, 5'000'000), 0);
}

TEST(Idx, OtherFilesAreRefusedByTheirFirstBytes) {
  EXPECT_NE(refusal("PNG and so on").find("not an IDX"), std::string::npos);
  EXPECT_NE(refusal(std::string("\0\0\x0A\x01\0\0\0\0", 8)).find("not an IDX"), std::string::npos);
  EXPECT_NE(refusal(std::string("\0\0\x08\0", 4)).find("0 dimensions"), std::string::npos);
}

}  // namespace
}  // namespace halfstep
