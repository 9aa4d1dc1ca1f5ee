#include <halfstep/printable.h>

#include <gtest/gtest.h>

namespace halfstep {
namespace {

std::string escaped(std::string_view text) { return printable(text, Unprintable::Escaped); }
std::string replaced(std::string_view text) { return printable(text, Unprintable::Replaced); }

TEST(Printable, EscapesSayWhatStoodThere) {
  EXPECT_EQ(escaped("a\033[2Jb\n"), "a\\x1b[2Jb\\x0a");
  EXPECT_EQ(escaped(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(escaped("\xC2\x9B"
                    "31m"),
            "\\u009b31m");  // C1: ESC [ in one character
  EXPECT_EQ(escaped("\x9B"
                    "31m"),
            "\\x9b31m");                            // the same, for a terminal that is not set to UTF-8
  EXPECT_EQ(escaped("\u202Eevil"), "\\u202eevil");  // would be shown from right to left
  EXPECT_EQ(escaped("\u2028next"), "\\u2028next");  // ends a line
  EXPECT_EQ(escaped("\xFF\xC3"), "\\xff\\xc3");
  EXPECT_EQ(escaped("\xED\xA0\x80"), "\\xed\\xa0\\x80");  // a surrogate
  EXPECT_EQ(escaped("\xC0\xAF"), "\\xc0\\xaf");           // overlong
  EXPECT_EQ(escaped("model.h.0 é漢👍\u00A0"), "model.h.0 é漢👍\u00A0");
}

TEST(Printable, ReplacedTextStaysOnOneLine) {
  EXPECT_EQ(replaced("a\033[2Jb"), "a\uFFFD[2Jb");
  EXPECT_EQ(replaced("a\nb\tc"), "a b c");
  EXPECT_EQ(replaced("\xC2\x9B"
                     "1m"),
            "\uFFFD"
            "1m");
  EXPECT_EQ(replaced("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(replaced("é漢👍"), "é漢👍");
}

TEST(Printable, NoControlCharacterOfUnicodePassesInEitherForm) {
  for (int value = 0; value < 0xA0; ++value) {
    const bool plain = value >= 0x20 && value < 0x7F;
    const std::string text =
        value < 0x80 ? std::string(1, static_cast<char>(value))
                     : std::string{'\xC2', static_cast<char>(value)};  // 80..BF follow C2 as they are
    EXPECT_EQ(escaped(text) == text, plain) << value;
    EXPECT_EQ(replaced(text) == text, plain) << value;
  }
}

}  // namespace
}  // namespace halfstep
