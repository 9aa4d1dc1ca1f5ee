#include "config/toml.h"

#include <gtest/gtest.h>

#include "support/error_of.h"

namespace halfstep::config {
namespace {

using halfstep::testing::error_of;

TEST(Toml, EveryValueHasItsPathAndLine) {
  const auto entries = parse_toml("a = 1\n[b]\n\nc.d = 'x'\n\"e.f\" = [\n 'y',\n 'z']\n", "t");
  ASSERT_EQ(entries.size(), 3u);
  const std::pair<std::string, uint32_t> expected[] = {{"a", 1}, {"b.c.d", 4}, {"b.e.f", 5}};
  for (size_t i = 0; i < entries.size(); ++i) {
    EXPECT_EQ(entries[i].path, expected[i].first);
    EXPECT_EQ(entries[i].line, expected[i].second) << entries[i].path;
  }
  EXPECT_EQ(std::get<std::vector<std::string>>(entries[2].value), (std::vector<std::string>{"y", "z"}));
}

TEST(Toml, WhatIsNoTomlIsToldWithLineAndColumn) {
  EXPECT_TRUE(
      error_of([] { parse_toml("a = 1\nb = = 2\n", "t.toml"); }).starts_with("t.toml:2:5: this is not TOML"));
}

// Each level would be a call when the tables are freed: the stack would end.
TEST(Toml, DeepKeysAreRefused) {
  std::string deep = "a";
  for (int i = 0; i < 100'000; ++i) deep += ".a";
  EXPECT_NE(error_of([&] { parse_toml(deep + " = 1", "t"); }).find("dots"), std::string::npos);
  EXPECT_NE(error_of([&] { parse_toml("x = \"\"\"a\"\"\"\"\"\n" + deep + " = 1", "t"); }).find("dots"),
            std::string::npos);
  EXPECT_NE(error_of([&] { parse_toml("x = '''a\"''' # \"\n" + deep + " = 1", "t"); }).find("dots"),
            std::string::npos);
  EXPECT_NE(error_of([] { parse_toml("a = " + std::string(10'000, '['), "t"); }), "no error");
}

TEST(Toml, DotsInTextsAreNotCounted) {
  const std::string text = "a = \"" + std::string(5000, '.') + "\\\"...\" # " + std::string(5000, '.');
  EXPECT_EQ(parse_toml(text, "t").size(), 1u);
}

TEST(Toml, QuotedTextComesBack) {
  std::string all;
  for (char c = 1; c < 0x7f; ++c) all += c;
  all += "\x7f\u00e4\u6c34\U0001f600";
  const auto entries = parse_toml("v = " + toml_quoted(all), "t");
  EXPECT_EQ(std::get<std::string>(entries.at(0).value), all);
  EXPECT_EQ(parse_toml(toml_key("prod.dim \"x\"") + " = 1", "t").at(0).path, "prod.dim \"x\"");
}

}  // namespace
}  // namespace halfstep::config
