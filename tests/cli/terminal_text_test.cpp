#include "cli/terminal_text.h"

#include <gtest/gtest.h>

namespace halfstep::cli {
namespace {

TEST(TerminalText, ColumnsAreThoseOfUnicodesEastAsianWidth) {
  EXPECT_EQ(columns_of("abc"), 3u);
  EXPECT_EQ(columns_of("é"), 1u);
  EXPECT_EQ(columns_of("e\u0301"), 1u);
  EXPECT_EQ(columns_of("漢字"), 4u);
  EXPECT_EQ(columns_of("한"), 2u);
  EXPECT_EQ(columns_of("👍"), 2u);
  EXPECT_EQ(columns_of("\uFFFD"), 1u);
}

TEST(TerminalText, WrapsAtSpacesAndIndentsWhatFollows) {
  const std::vector<std::string> lines = wrapped("one two three four", 9, 2);
  EXPECT_EQ(lines, (std::vector<std::string>{"one two", "  three", "  four"}));
}

TEST(TerminalText, LongWordsAreCutBetweenCharacters) {
  EXPECT_EQ(wrapped("abcdefgh", 3, 0), (std::vector<std::string>{"abc", "def", "gh"}));
  EXPECT_EQ(wrapped("漢漢漢", 5, 0), (std::vector<std::string>{"漢漢", "漢"}));
  EXPECT_EQ(wrapped("漢漢", 1, 0), (std::vector<std::string>{"漢", "漢"}));  // there is no room, but an end
  EXPECT_EQ(wrapped("", 5, 2), (std::vector<std::string>{""}));
  EXPECT_EQ(wrapped("abc def", 1, 4).size(), 6u);
}

TEST(TerminalText, NoLineIsWiderThanItMayBe) {
  const std::string text =
      "the gradient of transformer.h.11.mlp.c_proj.weight 漢字漢字漢字 is not finite at 65536";
  for (size_t columns = 2; columns < 100; ++columns)
    for (const std::string& line : wrapped(text, columns, 4)) EXPECT_LE(columns_of(line), columns) << columns;
}

}  // namespace
}  // namespace halfstep::cli
