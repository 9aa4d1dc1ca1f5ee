#include "io/json.h"

#include <gtest/gtest.h>

#include "safetensors/crafted.h"
#include "support/error_of.h"
#include "words/names.h"

namespace halfstep::files {
namespace {

using testing::repeated;
using namespace std::string_literals;

std::string refusal(std::string_view text, const JsonLimits& limits = {}) {
  return halfstep::testing::error_of([&] { read_json(text, "config.json", limits); });
}

TEST(Json, GoodTextIsRead) {
  EXPECT_EQ(read_json(R"({"a":[1,-2,3.5,"é",null,true],"b":{"a":1}})", "config.json")["b"]["a"], 1);
  EXPECT_EQ(read_json("7", "config.json"), 7);
}

TEST(Json, AKeyThatStandsTwiceInOneObjectIsRefused) {
  EXPECT_NE(refusal(R"({"a":1,"a":1})").find("config.json: the key 'a' occurs twice"), std::string::npos);
  EXPECT_NE(refusal(R"([{"b":{"a":1,"\u0061":2}}])").find("'a' occurs twice"), std::string::npos);
  EXPECT_EQ(refusal(R"([{"a":{"a":1}},{"a":2}])"), "no error");
}

TEST(Json, NestingHasALimit) {
  EXPECT_EQ(refusal(repeated("[", 64) + repeated("]", 64)), "no error");
  EXPECT_NE(refusal(repeated("[", 65) + repeated("]", 65)).find("deeper than 64"), std::string::npos);
  EXPECT_NE(refusal(repeated("[", 1'000'000)).find("deeper than 64"), std::string::npos);
  EXPECT_NE(refusal(repeated("{\"a\":", 1'000'000)).find("deeper than 64"), std::string::npos);
}

TEST(Json, BytesHaveALimit) {
  EXPECT_EQ(refusal("[1]", {.bytes = 3}), "no error");
  EXPECT_NE(refusal("[1] ", {.bytes = 3}).find("at most 3"), std::string::npos);
}

TEST(Json, ValuesHaveALimit) {
  EXPECT_EQ(refusal(R"([{"a":1},[]])", {.values = 4}), "no error");
  EXPECT_NE(refusal(R"([{"a":1},[]])", {.values = 3}).find("more than 3 values"), std::string::npos);
  EXPECT_NE(refusal(std::string("[") + repeated("{},", 4'000'000) + "{}]").find("more than 4000000"),
            std::string::npos);
}

TEST(Json, WhatIsNotJsonIsRefused) {
  for (const std::string& text : {""s, " "s, "{"s, "{} x"s, "[1,]"s, "'a'"s, "// c\n1"s, "NaN"s, "1e999"s,
                                  "\"\xff\""s, "\"\xc0\x80\""s, "\"\xed\xa0\x80\""s, "\"\\ud800\""s})
    EXPECT_NE(refusal(text).find("config.json: is not valid JSON"), std::string::npos) << text;
  EXPECT_NE(refusal("{}\0x"s).find("NUL byte in JSON, at byte 2"), std::string::npos);
}

TEST(Json, MessagesStayShort) {
  EXPECT_LT(refusal(std::string("\"") + repeated("a", 1'000'000)).size(), 500u);
  EXPECT_LT(refusal("{\"" + repeated("a", 100'000) + "\":1,\"" + repeated("a", 100'000) + "\":1}").size(),
            500u);
}

TEST(InQuotes, IsFitForATerminalAndShort) {
  EXPECT_EQ(in_quotes("a é"), "'a é'");
  EXPECT_EQ(in_quotes("\x1b[2J\n\x7f\0"s), "'\\x1b[2J\\x0a\\x7f\\x00'");
  EXPECT_EQ(in_quotes(repeated("a", 81)), std::string("'") + repeated("a", 80) + "'... (81 bytes)");
  EXPECT_EQ(in_quotes(repeated("a", 79) + "éa"), std::string("'") + repeated("a", 79) + "'... (82 bytes)");
}

}  // namespace
}  // namespace halfstep::files
