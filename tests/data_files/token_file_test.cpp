#include <fcntl.h>
#include <gtest/gtest.h>
#include <halfstep/token_file.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <numeric>
#include <thread>
#include <vector>

#include "support/error_of.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

using testing::error_of;

class TokenFiles : public ::testing::Test {
 protected:
  /// A file of these numbers, each as wide as its type.
  template <typename Number>
  std::filesystem::path file_of(const std::vector<Number>& numbers, const std::vector<int32_t>& header = {}) {
    const auto path = folder_ / "tokens.bin";
    std::ofstream file(path, std::ios::binary);
    std::vector<int32_t> words(header.empty() ? 0 : 256);
    std::copy(header.begin(), header.end(), words.begin());
    file.write(reinterpret_cast<const char*>(words.data()), static_cast<std::streamsize>(words.size() * 4));
    file.write(reinterpret_cast<const char*>(numbers.data()),
               static_cast<std::streamsize>(numbers.size() * sizeof(Number)));
    return path;
  }

  static std::vector<int64_t> all_of(const TokenFile& file) {
    std::vector<int64_t> ids(static_cast<size_t>(file.size()));
    file.read(0, ids);
    return ids;
  }

  const testing::ScratchFolder folder_;
};

TEST_F(TokenFiles, AreReadInAllFourFormats) {
  const std::vector<int64_t> expected = {7, 0, 300, 49151};
  const std::vector<uint16_t> narrow(expected.begin(), expected.end());
  const std::vector<uint32_t> wide(expected.begin(), expected.end());
  const TokenFileOptions options{.vocabulary_size = 49152};

  const TokenFile raw16(file_of(narrow), options);
  EXPECT_EQ(raw16.format(), TokenFormat::Raw16);
  EXPECT_EQ(all_of(raw16), expected);
  const TokenFile raw32(file_of(wide), {.vocabulary_size = 49152, .format = TokenFormat::Raw32});
  EXPECT_EQ(all_of(raw32), expected);
  const TokenFile llmc16(file_of(narrow, {20240520, 1, 4}), options);
  EXPECT_EQ(llmc16.format(), TokenFormat::Llmc16);
  EXPECT_EQ(all_of(llmc16), expected);
  const TokenFile llmc32(file_of(wide, {20240801, 7, 4}), options);
  EXPECT_EQ(llmc32.format(), TokenFormat::Llmc32);
  EXPECT_EQ(all_of(llmc32), expected);
}

TEST_F(TokenFiles, WithoutHeaderHave32BitsWhereTheVocabularyNeedsThem) {
  const TokenFile file(file_of<uint32_t>({128'000}), {.vocabulary_size = 128'256});
  EXPECT_EQ(all_of(file), std::vector<int64_t>{128'000});
}

// Another process may write into the file at any moment.
TEST_F(TokenFiles, NoReadGivesAnIdOutsideTheVocabularyWhileTheFileChanges) {
  const auto path = file_of(std::vector<uint16_t>(4096, 1));
  const TokenFile file(path, {.vocabulary_size = 1000});
  std::atomic<bool> ended = false;
  std::thread writer([&] {
    const int open_file = ::open(path.c_str(), O_WRONLY);
    for (uint16_t id = 1; !ended; id = id == 1 ? 1000 : 1)
      ASSERT_EQ(pwrite(open_file, &id, sizeof id, 4000 * sizeof id), ssize_t{sizeof id});
    ::close(open_file);
  });
  std::vector<int64_t> ids(4096);
  size_t outside = 0;
  for (int round = 0; round < 20'000; ++round) {
    try {
      file.read(0, ids);
      outside += static_cast<size_t>(std::ranges::count_if(ids, [](int64_t id) { return id >= 1000; }));
    } catch (const Error&) {  // it was seen
    }
  }
  ended = true;
  writer.join();
  EXPECT_EQ(outside, 0u);
}

// At every place around the edges of the blocks in which ids are compared.
TEST_F(TokenFiles, AnIdOutsideTheVocabularyIsFoundByItsOffset) {
  for (const size_t place : {size_t{0}, size_t{1}, size_t{4095}, size_t{4096}, size_t{9999}}) {
    std::vector<uint16_t> ids(10'000, 999);
    ids[place] = 1000;
    const auto path = file_of(ids, {20240520, 1, 10'000});
    const std::string message = error_of([&] { TokenFile(path, {.vocabulary_size = 1000}); });
    const std::string expected =
        "token " + std::to_string(place) + " (byte " + std::to_string(1024 + 2 * place) + ") is 1000";
    EXPECT_NE(message.find(expected), std::string::npos) << message;

    const TokenFile lazy(path, {.vocabulary_size = 1000, .check = TokenCheck::OnRead});
    std::vector<int64_t> one(1);
    EXPECT_EQ(error_of([&] { lazy.read(place == 0 ? 1 : 0, one); }), "no error");
    EXPECT_NE(error_of([&] { lazy.read(static_cast<int64_t>(place), one); }).find(expected),
              std::string::npos);
  }
}

TEST_F(TokenFiles, ALengthThatDoesNotFitIsRefused) {
  const TokenFileOptions options{.vocabulary_size = 1000};
  EXPECT_NE(error_of([&] { TokenFile(file_of<uint8_t>({1, 2, 3}), options); }).find("3 bytes"),
            std::string::npos);
  for (const int32_t told : {3, 5, -1, 2'147'483'647}) {
    const auto path = file_of<uint16_t>({1, 2, 3, 4}, {20240520, 1, told});
    EXPECT_NE(error_of([&] { TokenFile(path, options); }).find("declares " + std::to_string(told)),
              std::string::npos);
  }
  const TokenFileOptions llmc{.vocabulary_size = 1000, .format = TokenFormat::Llmc16};
  EXPECT_NE(error_of([&] { TokenFile(file_of<uint16_t>({1}), llmc); }).find("header alone"),
            std::string::npos);
  EXPECT_NE(error_of([&] { TokenFile(file_of<uint16_t>({1}, {20240520, 2, 1}), llmc); }).find("version 2"),
            std::string::npos);
}

TEST_F(TokenFiles, WithoutVocabularyOrBeyondTheEndAreRefused) {
  const auto path = file_of<uint16_t>({1, 2, 3});
  EXPECT_NE(error_of([&] { TokenFile(path, {}); }).find("vocabulary_size"), std::string::npos);
  const TokenFile file(path, {.vocabulary_size = 4});
  std::vector<int64_t> two(2);
  for (const int64_t first : {int64_t{2}, int64_t{4}, int64_t{-1}, std::numeric_limits<int64_t>::max()})
    EXPECT_NE(error_of([&] { file.read(first, two); }).find("of 3"), std::string::npos) << first;
}

TEST_F(TokenFiles, MarksStandBesideTheIds) {
  const auto path = folder_ / "marked.tokens";
  const std::vector<int32_t> ids = {5, (1 << 30) - 1, 0, 7};
  const std::vector<TokenMarks> marks = {{.begins_text = true, .is_given = true},
                                         {.begins_text = false, .is_given = true},
                                         {.begins_text = true, .is_given = false},
                                         {}};
  TokenFileWriter writer(path, TokenFormat::Marked32, int64_t{1} << 30);
  writer.append(ids, marks);
  EXPECT_NE(error_of([&] { writer.append(ids, std::span(marks).first(3)); }).find("4 ids and 3 marks"),
            std::string::npos);
  writer.commit();
  const TokenFile file(path, {.vocabulary_size = int64_t{1} << 30});
  EXPECT_EQ(file.format(), TokenFormat::Marked32);
  EXPECT_EQ(all_of(file), std::vector<int64_t>(ids.begin(), ids.end()));
  std::vector<int64_t> found(3);
  std::vector<TokenMarks> found_marks(3);
  file.read(1, found, found_marks);
  EXPECT_EQ(found_marks, std::vector<TokenMarks>(marks.begin() + 1, marks.end()));
  EXPECT_NE(
      error_of([&] { TokenFile(path, {.vocabulary_size = 1000}); }).find("token 1 (byte 1028) is 1073741823"),
      std::string::npos);
  EXPECT_NE(error_of([&] {
              TokenFileWriter(path, TokenFormat::Marked32, (int64_t{1} << 30) + 1);
            }).find("marked32"),
            std::string::npos);
  const TokenFile plain(file_of<uint16_t>({1, 2, 3}), {.vocabulary_size = 4});
  EXPECT_NE(error_of([&] { plain.read(0, found, found_marks); }).find("no marks"), std::string::npos);
}

TEST_F(TokenFiles, AreWrittenAsTheyAreRead) {
  std::vector<int32_t> ids(10'000);
  std::iota(ids.begin(), ids.end(), 0);
  for (const auto format : {TokenFormat::Raw16, TokenFormat::Raw32, TokenFormat::Llmc16, TokenFormat::Llmc32,
                            TokenFormat::Marked32}) {
    const auto path = folder_ / "written.bin";
    TokenFileWriter writer(path, format, 10'000);
    writer.append(std::span(ids).first(3));
    writer.append(std::span(ids).subspan(3));
    EXPECT_FALSE(std::filesystem::exists(path)) << "before commit";
    writer.commit();
    const TokenFile file(path, {.vocabulary_size = 10'000, .format = format});
    EXPECT_EQ(all_of(file), std::vector<int64_t>(ids.begin(), ids.end())) << to_string(format);
    std::filesystem::remove(path);
  }
}

TEST_F(TokenFiles, OfNoIdsAreFilesToo) {
  TokenFileWriter writer(folder_ / "empty.bin", TokenFormat::Llmc16, 10);
  writer.commit();
  EXPECT_EQ(TokenFile(folder_ / "empty.bin", {.vocabulary_size = 10}).size(), 0);
}

TEST_F(TokenFiles, TheWriterRefusesWhatTheReaderWould) {
  TokenFileWriter writer(folder_ / "written.bin", TokenFormat::Raw16, 100);
  EXPECT_NE(error_of([&] { writer.append(std::vector<int32_t>{5, 100}); }).find("token 1 is 100"),
            std::string::npos);
  EXPECT_NE(error_of([&] { writer.append(std::vector<int32_t>{-1}); }).find("token 0 is -1"),
            std::string::npos);
  EXPECT_NE(error_of([&] { TokenFileWriter(folder_ / "x", TokenFormat::Raw16, 65'537); }).find("raw32"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep
