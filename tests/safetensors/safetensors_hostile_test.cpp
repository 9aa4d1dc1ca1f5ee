// Files from strangers: each is refused with a message that names its fault, or read rightly.
#include <gtest/gtest.h>
#include <halfstep/safetensors.h>
#include <time.h>

#include <functional>

#include "safetensors/crafted.h"
#include "support/error_of.h"
#include "support/sanitized.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

using testing::entry;
using testing::error_of;
using testing::file_of;
using testing::named;
using testing::one;
using testing::repeated;
using namespace std::string_literals;

constexpr size_t kLargestHeader = size_t{16} << 20;

struct Row {
  const char* fault;
  std::string word;  // of the message
  std::function<std::string()> bytes;
  SafetensorsLimits limits{};
};

void expect_refused(const std::vector<Row>& rows) {
  const testing::ScratchFolder scratch;
  for (const Row& row : rows) {
    SCOPED_TRACE(row.fault);
    const auto path = scratch / "file.safetensors";
    testing::write_text(path, row.bytes());
    timespec start{}, end{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
    const std::string message = error_of([&] {
      const SafetensorsFile file(path, row.limits);
      for (const TensorEntry& tensor : file.entries()) (void)file.bytes(tensor);
    });
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    EXPECT_NE(message.find(row.word), std::string::npos) << message;
    EXPECT_TRUE(message.starts_with(path.string())) << message;
    EXPECT_LT(message.size(), 1000u) << "a message that nobody reads";
    if (!testing::kSanitized) {
      EXPECT_LT(static_cast<double>(end.tv_sec - start.tv_sec) +
                    1e-9 * static_cast<double>(end.tv_nsec - start.tv_nsec),
                1.0);
    }
  }
}

auto just(std::string bytes) {
  return [bytes = std::move(bytes)] { return bytes; };
}

/// A header's text, as it stands.
auto text(std::string header, size_t data_bytes = 0) { return just(file_of(header, data_bytes)); }

/// Header entries, between braces.
auto entries(std::string inner, size_t data_bytes) {
  return text(std::string("{") + inner + "}", data_bytes);
}

TEST(HostileSafetensors, FilesThatAreNone) {
  std::string large(8 + kLargestHeader + 1, ' ');
  const uint64_t length = kLargestHeader + 1;
  std::memcpy(large.data(), &length, sizeof length);
  expect_refused({
      {"empty file", "too short", just("")},
      {"7 bytes", "too short", just("\1\0\0\0\0\0\0"s)},
      {"a header of no bytes", "does not start with '{'", just(std::string(8, '\0'))},
      {"length beyond the file", "exceeds the file", just("\3\0\0\0\0\0\0\0{}"s)},
      {"length 2^64 - 1", "exceeds the file", just(std::string(8, '\xff') + "{}")},
      {"length 2^63", "exceeds the file", just("\0\0\0\0\0\0\0\x80{}"s)},
      {"a zip archive", "exceeds the file", just("PK\3\4\0\0\x8\0\0\0\0\0 archive/data.pkl"s)},
      {"a text", "exceeds the file", just("version https://git-lfs.github.com/spec/v1\n")},
      {"header above its limit", "16777216", just(large)},
      {"white space first", "does not start with '{'", text(" {}")},
      {"byte order mark", "does not start with '{'", text("\xef\xbb\xbf{}")},
      {"an array", "does not start with '{'", text("[]")},
      {"a string", "does not start with '{'", text("\"a\"")},
  });
}

TEST(HostileSafetensors, TextsThatAreNotJson) {
  const std::string word = "not valid JSON";
  expect_refused({
      {"cut within an object", word, text("{\"a\":{")},
      {"cut behind a key", word, text("{\"a\":")},
      {"cut within a string", "ends within the string", text("{\"a")},
      {"cut behind a backslash", "ends within the string", text("{\"a\\")},
      {"letters behind the object", word, text("{}x")},
      {"two objects", word, text("{}{}")},
      {"NUL and more behind the object", "NUL", text("{}\0{\"a\":1}"s)},
      {"NUL padding", "NUL", text("{}\0\0\0\0\0\0"s)},
      {"NUL within a name", "NUL", just(named("a\0b"s))},
      {"single quotes", word, text("{'a':1}")},
      {"a comment", word, text("{/* */}")},
      {"trailing comma", word, entries(entry("a", "U8", "[1]", "[0,1]") + ",", 1)},
      {"NaN", word, just(one("U8", "[NaN]", "[0,1]"))},
      {"leading zero", word, just(one("U8", "[01]", "[0,1]"))},
      {"plus sign", word, just(one("U8", "[+1]", "[0,1]"))},
      {"hexadecimal", word, just(one("U8", "[0x1]", "[0,1]"))},
      {"raw line feed in a name", word, just(named("a\nb"))},
      {"escape that is none", word, just(named("\\x41"))},
      {"lone high surrogate", word, just(named("\\ud800"))},
      {"lone low surrogate", word, just(named("\\udc00"))},
      {"byte FF", word, just(named("\xff"))},
      {"overlong NUL", word, just(named("\xc0\x80"))},
      {"overlong slash", word, just(named("\xe0\x80\xaf"))},
      {"surrogate in UTF-8", word, just(named("\xed\xa0\x80"))},
      {"beyond U+10FFFF", word, just(named("\xf4\x90\x80\x80"))},
      {"cut UTF-8", word, just(named("\xe2\x82"))},
      {"invalid UTF-8 in metadata", word, text("{\"__metadata__\":{\"a\":\"\xff\"}}")},
  });
}

TEST(HostileSafetensors, EntriesThatAreNone) {
  expect_refused({
      {"a number", "the number 1 where an object", text(R"({"a":1})")},
      {"a string", "the string 'b' where an object", text(R"({"a":"b"})")},
      {"null", "null where an object", text(R"({"a":null})")},
      {"true", "true where an object", text(R"({"a":true})")},
      {"an array", "an array where an object", text(R"({"a":[]})")},
      {"no dtype", "no dtype", text(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1)},
      {"no shape", "no shape", text(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1)},
      {"no data_offsets", "no data_offsets", text(R"({"a":{"dtype":"U8","shape":[1]}})", 1)},
      {"nothing", "no dtype", text(R"({"a":{}})")},
      {"an unknown key", "unknown key 'strides'",
       text(R"({"a":{"dtype":"U8","shape":[1],"strides":[1],"data_offsets":[0,1]}})", 1)},
      {"unknown dtype", "unknown dtype 'F128'", just(one("F128", "[1]", "[0,1]"))},
      {"dtype in small letters", "unknown dtype 'f32'", just(one("f32", "[1]", "[0,4]", 4))},
      {"dtype of a mebibyte", "unknown dtype", just(one(repeated("F", 1 << 20), "[1]", "[0,1]"))},
      {"dtype a number", "where the name of a dtype", text(R"({"a":{"dtype":8}})")},
      {"dtype an array", "an array where the name of a dtype", text(R"({"a":{"dtype":["U8"]}})")},
      {"empty name", "empty name", just(named(""))},
      {"NUL in a name, escaped", "contains a NUL", just(named("a\\u0000b"))},
  });
}

TEST(HostileSafetensors, KeysThatStandTwice) {
  const std::string first = entry("a", "U8", "[1]", "[0,1]");
  expect_refused({
      {"a tensor", "'a' is a duplicate", entries(first + "," + entry("a", "U8", "[1]", "[1,2]"), 2)},
      {"the same tensor", "'a' is a duplicate", entries(first + "," + first, 1)},
      {"a tensor, spelt by an escape", "'a' is a duplicate",
       entries(first + "," + entry("\\u0061", "U8", "[1]", "[1,2]"), 2)},
      {"dtype", "'dtype' is a duplicate",
       text(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1)},
      {"shape", "'shape' is a duplicate",
       text(R"({"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", 1)},
      {"data_offsets", "'data_offsets' is a duplicate",
       text(R"({"a":{"dtype":"U8","data_offsets":[0,1],"shape":[1],"data_offsets":[0,1]}})", 1)},
      {"metadata's key", "'k' of __metadata__ is a duplicate", text(R"({"__metadata__":{"k":"1","k":"2"}})")},
      {"metadata", "'__metadata__' is a duplicate", text(R"({"__metadata__":{},"__metadata__":{}})")},
  });
}

TEST(HostileSafetensors, ShapesThatAreNone) {
  expect_refused({
      {"a string", "where an array of integers", just(one("U8", "\"1\"", "[0,1]"))},
      {"null", "null where an array of integers", just(one("U8", "null", "[0,1]"))},
      {"an object", "an object where an array", just(one("U8", "{}", "[0,1]"))},
      {"an array of arrays", "an array where an integer", just(one("U8", "[[1]]", "[0,1]"))},
      {"true", "true where an integer", just(one("U8", "[true]", "[0,1]"))},
      {"a negative dimension", "negative number -1", just(one("U8", "[-1]", "[0,1]"))},
      {"two negative dimensions", "negative number -1", just(one("U8", "[-1,-1]", "[0,1]"))},
      {"minus zero", "negative number 0", just(one("U8", "[-0]", "[0,0]", 0))},
      {"1.0", "'1.0', which is not an integer", just(one("U8", "[1.0]", "[0,1]"))},
      {"1e0", "'1e0', which is not an integer", just(one("U8", "[1e0]", "[0,1]"))},
      {"1e999", "not valid JSON", just(one("U8", "[1e999]", "[0,1]"))},
      {"2^63", "does not fit in 63 bits", just(one("U8", "[9223372036854775808]", "[0,1]"))},
      {"2^64", "not an integer of 64 bits", just(one("U8", "[18446744073709551616]", "[0,1]"))},
      {"2^64 + 1", "not an integer of 64 bits", just(one("U8", "[18446744073709551617]", "[0,1]"))},
      {"2^32 x 2^32", "overflows", just(one("U8", "[4294967296,4294967296]", "[0,0]", 0))},
      {"a product of 2^64 + 1", "overflows", just(one("U8", "[274177,67280421310721]", "[0,1]"))},
      {"0 x 2^62 x 2^62", "overflows",
       just(one("U8", "[0,4611686018427387904,4611686018427387904]", "[0,0]", 0))},
      {"2^62 x 2^62 x 0", "overflows",
       just(one("U8", "[4611686018427387904,4611686018427387904,0]", "[0,0]", 0))},
      {"2^61 elements of 8 bytes", "overflows", just(one("F64", "[2305843009213693952]", "[0,0]", 0))},
      {"rank 65", "rank exceeds 64", just(one("U8", std::string("[1") + repeated(",1", 64) + "]", "[0,1]"))},
      {"an F4 alone", "does not fill whole bytes", just(one("F4", "[1]", "[0,1]"))},
      {"three F4", "does not fill whole bytes", just(one("F4", "[3]", "[0,2]", 2))},
      {"two F6", "does not fill whole bytes", just(one("F6_E2M3", "[2]", "[0,2]", 2))},
      {"five F6", "does not fill whole bytes", just(one("F6_E3M2", "[5]", "[0,4]", 4))},
  });
}

TEST(HostileSafetensors, OffsetsThatDoNotTileTheData) {
  const std::string a = entry("a", "U8", "[2]", "[0,2]");
  expect_refused({
      {"a number", "where an array of integers", just(one("U8", "[1]", "1"))},
      {"none", "0 numbers; 2 are needed", just(one("U8", "[1]", "[]"))},
      {"one", "1 numbers; 2 are needed", just(one("U8", "[1]", "[0]"))},
      {"three", "more than 2 numbers", just(one("U8", "[1]", "[0,1,1]"))},
      {"negative", "negative number -1", just(one("U8", "[1]", "[-1,0]"))},
      {"float", "not an integer", just(one("U8", "[1]", "[0,1.0]"))},
      {"2^64", "not an integer of 64 bits", just(one("U8", "[1]", "[0,18446744073709551616]"))},
      {"a string", "the string '1' where an integer", just(one("U8", "[1]", "[0,\"1\"]"))},
      {"end before begin", "ends before it begins", just(one("U8", "[1]", "[1,0]"))},
      {"end before begin by 2^64 - 1", "ends before it begins",
       just(one("U8", "[1]", "[18446744073709551615,0]"))},
      {"shape smaller than its bytes", "takes 1 bytes, but its data_offsets [0, 2]",
       just(one("U8", "[1]", "[0,2]", 2))},
      {"shape larger than its bytes", "takes 4 bytes", just(one("F32", "[1]", "[0,2]", 2))},
      {"data cut short", "cut short", just(one("U8", "[2]", "[0,2]", 1))},
      {"data absent", "cut short", just(one("F32", "[1048576]", "[0,4194304]", 0))},
      {"trailing byte", "1 trailing bytes", just(one("U8", "[2]", "[0,2]", 3))},
      {"trailing bytes behind no tensor", "4 trailing bytes", text("{}", 4)},
      {"the same bytes twice", "overlap", entries(a + "," + entry("b", "U8", "[2]", "[0,2]"), 2)},
      {"overlap by one", "overlap", entries(a + "," + entry("b", "U8", "[2]", "[1,3]"), 3)},
      {"one within another", "overlap",
       entries(entry("b", "U8", "[4]", "[0,4]") + "," + entry("a", "U8", "[1]", "[1,2]"), 4)},
      {"empty tensor within another", "overlap", entries(a + "," + entry("b", "U8", "[0]", "[1,1]"), 2)},
      {"hole at the start", "a hole before tensor 'a'", just(one("U8", "[1]", "[1,2]", 2))},
      {"hole in the middle", "a hole before tensor 'b'",
       entries(a + "," + entry("b", "U8", "[1]", "[3,4]"), 4)},
      {"empty tensor beyond the data", "a hole before tensor 'b'",
       entries(a + "," + entry("b", "U8", "[0]", "[3,3]"), 2)},
      {"empty tensor at 2^64 - 1", "a hole",
       just(one("U8", "[0]", "[18446744073709551615,18446744073709551615]", 0))},
      {"a BOOL of 2", "neither 0 nor 1", just(one("BOOL", "[3]", "[0,3]", 2) + "\2")},
      {"a BOOL of 255", "is 255, neither", just(one("BOOL", "[1]", "[0,1]", 0) + "\xff")},
  });
}

TEST(HostileSafetensors, MetadataThatIsNotStrings) {
  expect_refused({
      {"a number", "the number 1 where a string", text(R"({"__metadata__":{"k":1}})")},
      {"null", "null where a string", text(R"({"__metadata__":{"k":null}})")},
      {"a float", "where a string", text(R"({"__metadata__":{"k":1.5}})")},
      {"an object", "an object where a string", text(R"({"__metadata__":{"k":{}}})")},
      {"an array", "an array where", text(R"({"__metadata__":{"k":[]}})")},
      {"null itself", "null where an object of strings", text(R"({"__metadata__":null})")},
      {"a string itself", "where an object of strings", text(R"({"__metadata__":"pt"})")},
      {"an array itself", "an array where an object of strings", text(R"({"__metadata__":[]})")},
  });
}

TEST(HostileSafetensors, HeadersThatAskForMuch) {
  const size_t half = kLargestHeader / 2 - 8;
  const auto full = [](std::string start, std::string_view fill, std::string end = "") {
    return [=] {
      return file_of(start + repeated(fill, (kLargestHeader - start.size() - end.size()) / fill.size()) +
                     end);
    };
  };
  expect_refused({
      {"8 Mi arrays in one another", "an array where",
       [=] { return file_of("{\"a\":" + repeated("[", half) + repeated("]", half) + "}"); }},
      {"objects in one another", "unknown key 'a'", full("{\"a\":", "{\"a\":")},
      {"arrays in a shape", "an array where an integer", full("{\"a\":{\"shape\":[", "[")},
      {"objects in metadata", "an object where a string", full("{\"__metadata__\":{\"a\":", "{\"a\":")},
      {"a name of 16 MiB", "a string of", full("{\"", "n", "\":{}}")},
      {"a name of 16 MiB without end", "ends within the string", full("{\"", "n")},
      {"a name of backslashes", "a string of", full("{\"", "\\\\", "\":{}}")},
      {"a number of 16 MiB", "more than 4096 bytes", full("{\"a\":", "1")},
      {"white space of 16 MiB", "more than 4096 bytes", full("{", "\n", "x}")},
      {"line feeds as padding", "more than 4096 bytes", full("{}", "\n")},
      {"commas", "not valid JSON", full("{", ",")},
      {"braces in a name", "empty name",
       full("{\"" + repeated("{", 1 << 20) +
                "\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},\"\":1",
            " ")},
      {"2 Mi dimensions", "dimensions in all",
       [] {
         std::string header = "{";
         for (int i = 0; i < 33'000; ++i)
           header +=
               entry(std::to_string(i), "U8", std::string("[0") + repeated(",0", 63) + "]", "[0,0]") + ",";
         header.back() = '}';
         return file_of(header);
       }},
      {"10,001 metadata keys", "10000 keys",
       [] {
         std::string header = "{\"__metadata__\":{";
         for (int i = 0; i < 10'001; ++i) header += '"' + std::to_string(i) + "\":\"\",";
         header.back() = '}';
         return file_of(header + "}");
       }},
      {"more tensors than the limit",
       "more than 2 tensors",
       entries(entry("a", "U8", "[0]", "[0,0]") + "," + entry("b", "U8", "[0]", "[0,0]") + "," +
                   entry("c", "U8", "[0]", "[0,0]"),
               0),
       {.tensor_count = 2}},
      {"larger header than the limit", "at most 8 are read", text("{}       "), {.header_bytes = 8}},
      {"higher rank than the limit", "rank exceeds 1", just(one("U8", "[1,1]", "[0,1]")), {.rank = 1}},
      {"250,000 tensors, one of them twice", "is a duplicate",
       [] {
         std::string header = "{";
         for (int i = 0; i < 250'000; ++i) header += entry(std::to_string(i), "U8", "[0]", "[0,0]") + ",";
         return file_of(header + entry("77", "U8", "[0]", "[0,0]") + "}");
       }},
  });
}

}  // namespace
}  // namespace halfstep
