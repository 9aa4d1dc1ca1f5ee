// However a header of the largest size is filled, reading it takes at most three times its size.
#include <gtest/gtest.h>
#include <halfstep/error.h>
#include <malloc.h>

#include <fstream>
#include <functional>

#include "safetensors/crafted.h"
#include "safetensors/safetensors_header.h"
#include "support/sanitized.h"

namespace halfstep {
namespace {

using testing::entry;
using testing::file_of;
using testing::repeated;

constexpr size_t kLargestHeader = size_t{16} << 20;

size_t status_bytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word)
    if (word == field + ":") {
      size_t kibibytes = 0;
      status >> kibibytes;
      return kibibytes << 10;
    }
  return 0;
}

/// What reading takes at its peak beyond what the process had before: resident pages, so the parser's own
/// buffers are in it, and what it reserves without touching is not.
size_t peak_bytes(const std::string& file, bool is_good) {
  ::malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak starts anew
  const size_t before = status_bytes("VmRSS");
  try {
    const auto header = files::parse_safetensors_header(std::as_bytes(std::span(file)), "file");
    EXPECT_TRUE(is_good);
  } catch (const Error& error) {
    EXPECT_FALSE(is_good) << error.what();
  }
  return status_bytes("VmHWM") - before;
}

std::string filled(std::string start, const std::function<std::string(int)>& next, const std::string& end) {
  for (int i = 0;; ++i) {
    const std::string piece = next(i);
    if (start.size() + piece.size() + end.size() > kLargestHeader) break;
    start += piece;
  }
  start.back() = ' ';  // the last comma
  return file_of(start + end);
}

/// A short name for each number, as many letters as three digits to the base of 90.
std::string short_name(int number) {
  std::string name;
  for (int digit = 0; digit < 3; ++digit, number /= 90) {
    const char letter = static_cast<char>('#' + number % 90);  // '#' is behind '"'
    name += letter == '\\' ? '!' : letter;
  }
  return name;
}

TEST(SafetensorsMemory, NoHeaderTakesMoreThanThreeTimesItsLargestSize) {
  if (testing::kSanitized) GTEST_SKIP() << "a sanitizer's own memory hides ours";
  const auto smallest = [](int i) { return entry(short_name(i), "U8", "[0]", "[0,0]") + ","; };
  const std::string many_dimensions = std::string("[0") + repeated(",0", 63) + "]";
  const auto tall = [&](int i) {
    return entry(short_name(i), "U8", i < 29'000 ? many_dimensions : "[0]", "[0,0]") + ",";
  };
  std::string metadata = "{\"__metadata__\":{";
  for (int i = 0; i < 10'000; ++i) metadata += '"' + std::to_string(i) + "\":\"\",";
  metadata.back() = '}';
  const std::string eighth = repeated("x", (2 << 20) - 100);
  const struct {
    const char* filled_with;
    std::string file;
    bool is_good = true;
  } rows[] = {
      {"the smallest entries", filled("{", smallest, "}")},
      {"as many dimensions as are read", filled("{", tall, "}")},
      {"metadata and the smallest entries", filled(metadata + ",", smallest, "}")},
      {"long names",
       filled(
           "{",
           [&](int i) { return entry(std::to_string(i) + repeated("n", 100), "U8", "[0]", "[0,0]") + ","; },
           "}")},
      {"the longest strings",
       filled(
           "{\"__metadata__\":{", [&](int i) { return '"' + std::to_string(i) + "\":\"" + eighth + "\","; },
           "}}")},
      {"a longest string that is not UTF-8",
       filled(
           "{\"__metadata__\":{",
           [&](int i) { return '"' + std::to_string(i) + "\":\"" + eighth + (i == 7 ? "\xff" : "") + "\","; },
           "}}"),
       false},
      {"a fault at the end", filled("{", smallest, "x}"), false},
  };
  EXPECT_LE(peak_bytes(file_of("{}" + std::string(kLargestHeader - 2, ' ')), true), kLargestHeader / 10)
      << "padding";
  for (const auto& row : rows) {
    ASSERT_GT(row.file.size(), kLargestHeader / 2) << row.filled_with;
    const size_t peak = peak_bytes(row.file, row.is_good);
    std::printf("%5.2f x the largest header: %s\n", static_cast<double>(peak) / kLargestHeader,
                row.filled_with);
    EXPECT_LE(peak, 3 * kLargestHeader) << row.filled_with;
    EXPECT_GT(peak, kLargestHeader / 10) << "the measure sees nothing: " << row.filled_with;
  }
}

}  // namespace
}  // namespace halfstep
