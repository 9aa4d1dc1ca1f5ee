#include "files/in_quotes.h"

namespace halfstep::files {

std::string in_quotes(std::string_view text) {
  constexpr size_t kShown = 80;
  constexpr char kDigits[] = "0123456789abcdef";
  size_t shown = text.size();
  if (shown > kShown) {
    shown = kShown;
    // Not in the middle of a character: bytes 10xxxxxx continue one.
    while (shown > 0 && (static_cast<unsigned char>(text[shown]) & 0xc0) == 0x80) --shown;
  }
  std::string result = "'";
  for (const char letter : text.substr(0, shown)) {
    const auto code = static_cast<unsigned char>(letter);
    if (code < 0x20 || code == 0x7f) {
      result += {'\\', 'x', kDigits[code >> 4], kDigits[code & 15]};
    } else {
      result += letter;
    }
  }
  result += "'";
  if (shown < text.size()) result += "... (" + std::to_string(text.size()) + " bytes)";
  return result;
}

}  // namespace halfstep::files
