#include "jinja/tokens.h"

#include <algorithm>
#include <array>
#include <optional>

#include "jinja/python_text.h"
#include "jinja/run.h"
#include "words/names.h"
#include "words/utf8.h"

namespace halfstep::jinja {
namespace {

using Kind = Token::Kind;

// Every line end becomes \n, and one at the end is dropped, as Jinja2 does without keep_trailing_newline.
std::string with_plain_line_ends(std::string_view source) {
  std::string plain;
  plain.reserve(source.size());
  for (size_t at = 0; at < source.size(); ++at) {
    if (source[at] == '\r') {
      plain += '\n';
      if (at + 1 < source.size() && source[at + 1] == '\n') ++at;
    } else {
      plain += source[at];
    }
  }
  if (plain.ends_with('\n')) plain.pop_back();
  return plain;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_start(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

class Lexer {
 public:
  Lexer(std::string_view source, std::string_view where) : source_(source), where_(where) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) text_and_tag();
    add(Kind::End, "");
    return std::move(tokens_);
  }

 private:
  template <typename... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    fail_at(where_, line_, parts...);
  }

  bool follows(std::string_view what, size_t at) const { return source_.substr(at).starts_with(what); }
  bool follows(std::string_view what) const { return follows(what, at_); }
  void add(Kind kind, std::string text) { tokens_.push_back({kind, line_, std::move(text)}); }
  void move_to(size_t at) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                                         source_.begin() + static_cast<std::ptrdiff_t>(at), '\n'));
    at_ = at;
    line_starts_ = at > 0 && source_[at - 1] == '\n';
  }
  size_t behind_space(size_t at) const { return source_.size() - python::lstrip(source_.substr(at)).size(); }

  // The text up to the next tag, and the tag.
  void text_and_tag() {
    size_t tag = at_;
    while (tag < source_.size() &&
           !(source_[tag] == '{' && tag + 1 < source_.size() &&
             (source_[tag + 1] == '{' || source_[tag + 1] == '%' || source_[tag + 1] == '#')))
      ++tag;
    if (tag == source_.size()) return add_text(tag, 0, false);
    const char kind = source_[tag + 1];
    const char sign = sign_at(tag + 2);
    add_text(tag, sign, kind != '{');
    const size_t inside = tag + 2 + (sign != 0);
    if (kind == '#') return skip_comment(inside);
    if (kind == '%' && raw_begins(inside)) return;
    add(kind == '{' ? Kind::OutputBegin : Kind::TagBegin, "");
    move_to(inside);
    expression_tokens(kind == '{');
  }

  char sign_at(size_t at) const {
    return at < source_.size() && (source_[at] == '-' || source_[at] == '+') ? source_[at] : char{0};
  }

  // The text from here to `end`, where a tag with this sign stands.
  void add_text(size_t end, char sign, bool strips_line) {
    std::string_view text = source_.substr(at_, end - at_);
    if (sign == '-') {
      text = python::rstrip(text);
    } else if (sign == 0 && strips_line) {
      const size_t newline = text.rfind('\n');
      const size_t line_begin = newline == text.npos ? 0 : newline + 1;
      if ((newline != text.npos || line_starts_) && python::lstrip(text.substr(line_begin)).empty())
        text = text.substr(0, line_begin);
    }
    if (!text.empty()) add(Kind::Data, std::string(text));
    move_to(end);
  }

  void skip_comment(size_t inside) {
    const size_t end = source_.find("#}", inside);
    if (end == source_.npos) fail("a comment, {#, without its end, #}.");
    const char sign = end > inside ? sign_at(end - 1) : char{0};
    move_to(behind_tag(end + 2, sign));
  }

  // Behind the end of a tag: a minus takes all white space, no sign the line end.
  size_t behind_tag(size_t at, char sign) const {
    if (sign == '-') return behind_space(at);
    return sign == 0 && follows("\n", at) ? at + 1 : at;
  }

  // {% raw %} ... {% endraw %}: its text as it is.
  bool raw_begins(size_t inside) {
    size_t at = behind_space(inside);
    if (!follows("raw", at)) return false;
    at = behind_space(at + 3);
    if (follows("-%}", at)) {
      at = behind_space(at + 3);
    } else if (follows("%}", at)) {
      at += 2;
    } else {
      return false;
    }
    move_to(at);
    for (size_t tag = source_.find("{%", at_); tag != source_.npos; tag = source_.find("{%", tag + 1)) {
      const char sign = sign_at(tag + 2);
      size_t end = behind_space(tag + 2 + (sign != 0));
      if (!follows("endraw", end)) continue;
      end = behind_space(end + 6);
      const char end_sign = sign_at(end);
      if (!follows("%}", end + (end_sign != 0))) continue;
      add_text(tag, sign, true);
      move_to(behind_tag(end + (end_sign != 0) + 2, end_sign));
      return true;
    }
    fail("{% raw %} without {% endraw %}.");
  }

  void expression_tokens(bool output) {
    std::string open;  // brackets
    while (true) {
      if (open.empty() && at_end(output)) return;
      if (at_ == source_.size()) fail(output ? "{{ without its end, }}." : "{% without its end, %}.");
      if (const size_t behind = behind_space(at_); behind > at_)
        move_to(behind);
      else if (is_digit(source_[at_]))
        number();
      else if (is_name_start(source_[at_]))
        name();
      else if (source_[at_] == '\'' || source_[at_] == '"')
        string();
      else
        an_operator(open);
    }
  }

  bool at_end(bool output) {
    const std::string_view mark = output ? "}}" : "%}";
    char sign = at_ < source_.size() ? sign_at(at_) : char{0};
    if (output && sign == '+') sign = 0;
    const size_t begin = at_ + (sign != 0);
    if (!follows(mark, begin)) return false;
    add(output ? Kind::OutputEnd : Kind::TagEnd, "");
    if (output)
      move_to(sign == '-' ? behind_space(begin + 2) : begin + 2);
    else
      move_to(behind_tag(begin + 2, sign));
    return true;
  }

  // Digits, single underscores between them.
  size_t digits_end(size_t at, auto&& is_one) const {
    while (at < source_.size() && (is_one(source_[at]) || (source_[at] == '_' && at + 1 < source_.size() &&
                                                           is_one(source_[at + 1]))))
      ++at;
    return at;
  }

  std::optional<size_t> float_end() const {
    if (at_ > 0 && source_[at_ - 1] == '.') return std::nullopt;
    const auto digit_at = [&](size_t at) { return at < source_.size() && is_digit(source_[at]); };
    size_t end = digits_end(at_, is_digit);
    bool fraction = false;
    if (end < source_.size() && source_[end] == '.' && digit_at(end + 1)) {
      end = digits_end(end + 1, is_digit);
      fraction = true;
    }
    if (end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
      const size_t sign = end + 1 < source_.size() && (source_[end + 1] == '+' || source_[end + 1] == '-');
      if (digit_at(end + 1 + sign)) return digits_end(end + 1 + sign, is_digit);
    }
    return fraction ? std::optional(end) : std::nullopt;
  }

  size_t integer_end() const {
    const auto is_hex = [](char c) {
      return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
    };
    const auto is_octal = [](char c) { return c >= '0' && c <= '7'; };
    const auto is_binary = [](char c) { return c == '0' || c == '1'; };
    if (source_[at_] != '0') return digits_end(at_, is_digit);
    if (at_ + 1 < source_.size()) {
      const char base = static_cast<char>(source_[at_ + 1] | 0x20);
      const size_t begin = at_ + 2;
      const size_t end = base == 'x'   ? digits_end(begin, is_hex)
                         : base == 'o' ? digits_end(begin, is_octal)
                         : base == 'b' ? digits_end(begin, is_binary)
                                       : begin;
      if (end > begin) return end;
    }
    return digits_end(at_, [](char c) { return c == '0'; });
  }

  void number() {
    const std::optional<size_t> as_float = float_end();
    const size_t end = as_float ? *as_float : integer_end();
    std::string digits(source_.substr(at_, end - at_));
    std::erase(digits, '_');
    add(as_float ? Kind::Float : Kind::Integer, std::move(digits));
    move_to(end);
  }

  void name() {
    size_t end = at_;
    while (end < source_.size() && (is_name_start(source_[end]) || is_digit(source_[end]))) ++end;
    add(Kind::Name, std::string(source_.substr(at_, end - at_)));
    move_to(end);
  }

  void string() {
    const char quote = source_[at_];
    size_t end = at_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) fail("a string without its closing ", quote, ".");
    add(Kind::String, unescaped(source_.substr(at_ + 1, end - at_ - 1)));
    move_to(end + 1);
  }

  // Python's escapes.
  std::string unescaped(std::string_view text) const {
    std::string value;
    for (size_t at = 0; at < text.size();) {
      if (text[at] != '\\') {
        value += text[at++];
        continue;
      }
      const char escape = text[at + 1];
      at += 2;
      constexpr std::string_view kLetters = "\\'\"abfnrtv", kMeanings = "\\'\"\a\b\f\n\r\t\v";
      if (const size_t known = kLetters.find(escape); known != kLetters.npos) {
        value += kMeanings[known];
      } else if (escape == '\n') {
        continue;
      } else if (escape >= '0' && escape <= '7') {
        size_t end = at;
        while (end < text.size() && end < at + 2 && text[end] >= '0' && text[end] <= '7') ++end;
        append_utf8(
            static_cast<uint32_t>(std::stoul(std::string(text.substr(at - 1, end - at + 1)), nullptr, 8)),
            value);
        at = end;
      } else if (escape == 'x' || escape == 'u' || escape == 'U') {
        const size_t count = escape == 'x' ? 2 : escape == 'u' ? 4 : 8;
        const std::string_view digits = text.substr(at, count);
        const bool hex =
            digits.size() == count && digits.find_first_not_of("0123456789abcdefABCDEF") == digits.npos;
        if (!hex) fail("the escape \\", escape, " needs ", count, " hexadecimal digits.");
        const uint32_t code = static_cast<uint32_t>(std::stoul(std::string(digits), nullptr, 16));
        if (code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF))
          fail("the escape \\", escape, digits, " is not a character.");
        append_utf8(code, value);
        at += count;
      } else if (escape == 'N') {
        fail("the escape \\N{...} is not supported; write the character itself.");
      } else {
        (value += '\\') += escape;
      }
    }
    return value;
  }

  void an_operator(std::string& open) {
    constexpr std::array<std::string_view, 25> kOperators{"**", "//", "==", "!=", ">=", "<=", "+", "-", "/",
                                                          "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                                          ">",  "<",  "=",  ".",  ":",  "|",  ","};
    const auto found =
        std::ranges::find_if(kOperators, [&](std::string_view candidate) { return follows(candidate); });
    if (found == kOperators.end()) {
      const CodePoint point = code_point_at(source_, at_);
      fail("the character ", in_quotes(source_.substr(at_, std::max(point.bytes, 1u))),
           " is given where a name, a value or an operator is expected.");
    }
    const char first = (*found)[0];
    if (first == '(' || first == '[' || first == '{') {
      open += first == '(' ? ')' : first == '[' ? ']' : '}';
    } else if (first == ')' || first == ']' || first == '}') {
      if (open.empty()) fail("'", first, "' closes nothing.");
      if (open.back() != first) fail("'", first, "' stands where '", open.back(), "' is expected.");
      open.pop_back();
    }
    add(Kind::Operator, std::string(*found));
    move_to(at_ + found->size());
  }

  std::string_view source_;
  std::string_view where_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starts_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokens_of(std::string_view source, std::string_view where) {
  HALFSTEP_CHECK(source.size() <= kMaxTemplateBytes, where, ": has ", source.size(), " bytes; up to ",
                 kMaxTemplateBytes, " are read.");
  const std::string plain = with_plain_line_ends(source);
  return Lexer(plain, where).run();
}

}  // namespace halfstep::jinja
