// The tokens of a Jinja template, with the white space that tags take away already gone.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep::jinja {

struct Token {
  enum class Kind : uint8_t {
    Data,
    OutputBegin,
    OutputEnd,
    TagBegin,
    TagEnd,
    Name,
    String,
    Integer,
    Float,
    Operator,
    End
  };
  Kind kind;
  int line;
  std::string text;  ///< of a String, its value
};

/// As Jinja2 3.1 does with trim_blocks and lstrip_blocks. The last token is End.
std::vector<Token> tokens_of(std::string_view source, std::string_view where);

}  // namespace halfstep::jinja
