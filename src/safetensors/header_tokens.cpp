#include "safetensors/header_tokens.h"

#include <halfstep/error.h>

namespace halfstep::files {

size_t check_header_tokens(std::string_view text, std::string_view where, const SafetensorsLimits& limits) {
  const size_t longest_string = static_cast<size_t>(limits.header_bytes / 8);
  constexpr size_t kLongestRun = 4096;  // of anything but strings and punctuation
  const size_t nul = text.find('\0');
  HALFSTEP_CHECK(nul == std::string_view::npos, where, ": a NUL byte in the header, at its byte ", nul, ".");
  size_t object_count = 0, run = 0;
  for (size_t at = 0; at < text.size(); ++at) {
    if (text[at] == '{') ++object_count;
    if (text[at] != '"') {
      run = std::string_view("{}[]:,").find(text[at]) == std::string_view::npos ? run + 1 : 0;
      HALFSTEP_CHECK(run <= kLongestRun, where, ": a number, a word or white space of more than ",
                     kLongestRun, " bytes in the header, at its byte ", at, ".");
      continue;
    }
    run = 0;
    const size_t start = at;
    for (++at; at < text.size() && text[at] != '"'; ++at)
      if (text[at] == '\\') ++at;
    HALFSTEP_CHECK(at < text.size(), where, ": the header ends within the string that starts at its byte ",
                   start, ".");
    HALFSTEP_CHECK(at - start <= longest_string, where, ": a string of ", at - start,
                   " bytes in the header; at most ", longest_string,
                   " are read, an eighth of SafetensorsLimits::header_bytes.");
  }
  return object_count;
}

}  // namespace halfstep::files
