// Manifests as text: what was written comes back, and what a stranger changed is refused by name.
#include "checkpoint_format/manifest.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "support/error_of.h"

namespace halfstep::files {
namespace {

using nlohmann::json;
using testing::error_of;

Manifest sample() {
  Manifest manifest{.step = 7, .fingerprint = {{"threads", "2"}}, .file = {}, .parts = {}};
  manifest.file = {.header_bytes = 64, .header_sha256 = sha256_of("header"), .data_bytes = 30};
  manifest.parts.push_back({.name = "model", .scalars = {}, .tensors = {}});
  manifest.parts.push_back({.name = "optimizer",
                            .scalars = {{"steps", int64_t{-5}}, {"lr", 0.1}, {"kind", "adamw \n \"x\" ü"}},
                            .tensors = {}});
  manifest.parts[0].tensors = {{"w", TensorType::F32, {2, 3}, {1, 2}, 0, 24, sha256_of("w")},
                               {"empty", TensorType::BF16, {0, 9}, {}, 24, 24, sha256_of("")}};
  manifest.parts[1].tensors = {{"w", TensorType::BF16, {3, 1}, {}, 24, 30, sha256_of("m")}};
  return manifest;
}

/// The sample with one thing changed in its JSON, sealed anew: what a hostile writer can do.
std::string refusal(const std::function<void(json&)>& change) {
  json value = json::parse(to_text(sample()));
  value.erase("sha256");
  change(value);
  std::string body = value.dump();
  body.pop_back();
  return error_of([&] { parse_manifest(sealed(body), "m.json"); });
}

TEST(Manifest, ComesBackAsItWasWritten) {
  const Manifest written = sample(), read = parse_manifest(to_text(written), "m.json");
  EXPECT_EQ(read.step, written.step);
  EXPECT_EQ(read.fingerprint, written.fingerprint);
  EXPECT_EQ(read.file, written.file);
  ASSERT_EQ(read.parts.size(), written.parts.size());
  for (size_t i = 0; i < read.parts.size(); ++i) {
    EXPECT_EQ(read.parts[i].name, written.parts[i].name);
    EXPECT_EQ(read.parts[i].scalars, written.parts[i].scalars);
    EXPECT_EQ(read.parts[i].tensors, written.parts[i].tensors);
  }
}

TEST(Manifest, RealNumbersKeepEveryBit) {
  using Limits = std::numeric_limits<double>;
  for (const double value : {0.0, -0.0, 0.1, 1.0 / 3, 0x1p-1074, Limits::max(), -Limits::infinity(),
                             std::bit_cast<double>(uint64_t{0x7ff8000000000123}),
                             std::bit_cast<double>(uint64_t{0xfff0000000000001})}) {
    const double read = parse_real(to_text(value), "x");
    EXPECT_EQ(std::bit_cast<uint64_t>(read), std::bit_cast<uint64_t>(value)) << to_text(value);
  }
  for (const char* text : {"", "1.5x", " 1", "0x10", "nan", "nan:", "nan:3ff0000000000000", "1e999"})
    EXPECT_NE(error_of([&] { parse_real(text, "x"); }), "no error") << text;
}

TEST(Manifest, OfAFutureFormatIsRefusedWithItsNumber) {
  const std::string message = refusal([](json& value) {
    value["halfstep_checkpoint"] = 2;
    value["what_we_do_not_know"] = true;
  });
  EXPECT_NE(message.find("format 2"), std::string::npos) << message;
  EXPECT_NE(message.find("reads format 1"), std::string::npos) << message;
}

TEST(Manifest, EveryTruncationAndEveryFlippedBitIsRefused) {
  const std::string text = to_text(sample());
  for (size_t size = 0; size < text.size(); ++size)
    ASSERT_NE(error_of([&] { parse_manifest(text.substr(0, size), "m"); }), "no error") << size;
  for (size_t bit = 0; bit < 8 * text.size(); ++bit) {
    std::string flipped = text;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    ASSERT_NE(error_of([&] { parse_manifest(flipped, "m"); }), "no error") << bit;
  }
}

TEST(Manifest, WhatAHostileWriterSealsIsRefusedByName) {
  const std::pair<const char*, std::function<void(json&)>> cases[] = {
      {"has no 'step'", [](json& m) { m.erase("step"); }},
      {"the key 'extra' is not known", [](json& m) { m["extra"] = 1; }},
      {"step: is -1, expected a count", [](json& m) { m["step"] = -1; }},
      {"step: is 1.5, expected a whole number", [](json& m) { m["step"] = 1.5; }},
      {"expected a whole number of 64 bits", [](json& m) { m["step"] = uint64_t{1} << 63; }},
      {"names a file '../../etc/passwd'", [](json& m) { m["files"][0]["name"] = "../../etc/passwd"; }},
      {"lists 2 files", [](json& m) { m["files"].push_back(m["files"][0]); }},
      {"lists 0 files", [](json& m) { m["files"].clear(); }},
      {"files[0].header_sha256: is \"AB\", expected a SHA-256",
       [](json& m) { m["files"][0]["header_sha256"] = "AB"; }},
      {"called 'a/b'", [](json& m) { m["parts"][0]["name"] = "a/b"; }},
      {"called ''", [](json& m) { m["parts"][0]["name"] = ""; }},
      {"part 'optimizer' occurs twice", [](json& m) { m["parts"][0]["name"] = "optimizer"; }},
      {"'w' occurs twice", [](json& m) { m["parts"][0]["tensors"][1]["name"] = "w"; }},
      {"unknown type 'F128'", [](json& m) { m["parts"][0]["tensors"][0]["type"] = "F128"; }},
      {"24 bytes, but", [](json& m) { m["parts"][0]["tensors"][0]["shape"] = {2, 4}; }},
      {"overflows", [](json& m) { m["parts"][0]["tensors"][1]["shape"] = {0, 1ll << 62, 1ll << 62}; }},
      {"shape[0]: is -2, expected a count", [](json& m) { m["parts"][0]["tensors"][0]["shape"] = {-2, -3}; }},
      {"at most 64", [](json& m) { m["parts"][0]["tensors"][0]["shape"] = std::vector<int>(65, 1); }},
      {"is not a range", [](json& m) { m["parts"][0]["tensors"][0]["bytes"] = {24, 0}; }},
      {"begins at byte 0 of the data; the one before it ends at 6",
       [](json& m) { m["parts"][1]["tensors"][0]["bytes"] = {0, 6}; }},
      {"the tensors end at byte 30 of 31", [](json& m) { m["files"][0]["data_bytes"] = 31; }},
      {"strides [1, 1] do not fit", [](json& m) { m["parts"][0]["tensors"][0]["strides"] = {1, 1}; }},
      {"strides [9223372036854775807, 2] do not fit",
       [](json& m) { m["parts"][0]["tensors"][0]["strides"] = {INT64_MAX, 2}; }},
      {"'inf inf' is not a real number", [](json& m) { m["parts"][1]["scalars"]["lr"]["real"] = "inf inf"; }},
      {"'steps': is true, expected a whole number",
       [](json& m) { m["parts"][1]["scalars"]["steps"] = true; }},
  };
  for (const auto& [expected, change] : cases) {
    const std::string message = refusal(change);
    EXPECT_NE(message.find(expected), std::string::npos) << expected << "\n  said: " << message;
    EXPECT_EQ(message.find("m.json"), 0u) << message;
  }
}

TEST(Manifest, TextsThatAreNotUtf8AreRefusedWhenWritten) {
  Manifest manifest = sample();
  manifest.parts[1].scalars["kind"] = "\xff\xfe";
  EXPECT_NE(error_of([&] { to_text(manifest); }).find("not valid UTF-8"), std::string::npos);
}

// Digests published in FIPS 180-2, appendix B.
TEST(Sha256, OfThePublishedExamples) {
  EXPECT_EQ(sha256_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  Sha256 million;
  const std::string piece(1000, 'a');
  for (int round = 0; round < 2; ++round) {  // the second begins anew
    for (int i = 0; i < 1000; ++i) million.update(std::as_bytes(std::span(piece)));
    EXPECT_EQ(million.finish(), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  }
}

}  // namespace
}  // namespace halfstep::files
