#include "files/in_quotes.h"

#include <halfstep/printable.h>

namespace halfstep::files {

std::string_view beginning_of(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  // Bytes 10xxxxxx continue a character.
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xc0) == 0x80) --most;
  return text.substr(0, most);
}

std::string in_quotes(std::string_view text) {
  constexpr size_t kShown = 80;
  const std::string_view shown = beginning_of(text, kShown);
  std::string result = "'" + printable(shown, Unprintable::Escaped) + "'";
  if (shown.size() < text.size()) result += "... (" + std::to_string(text.size()) + " bytes)";
  return result;
}

}  // namespace halfstep::files
