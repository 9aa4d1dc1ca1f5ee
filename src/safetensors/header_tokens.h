// A first look at the text of a safetensors header.
#pragma once

#include <halfstep/safetensors.h>

#include <cstddef>
#include <string_view>

namespace halfstep::files {

/// Refuses what nlohmann's lexer must not be given. It takes a NUL for the end of the text, so that what
/// follows would go unread; and it keeps the whole token it works on, and the white space behind it, several
/// times over once it complains. Returns how many objects begin in the text.
size_t check_header_tokens(std::string_view text, std::string_view where, const SafetensorsLimits& limits);

}  // namespace halfstep::files
