// What every page carries: how it looks, and a little script that it can do without.
#pragma once

#include <string>
#include <string_view>

namespace halfstep::report {

extern const std::string_view kStyle;
extern const std::string_view kScript;

/// SHA-256 of kScript in base 64, as a Content-Security-Policy names it.
std::string script_hash();

}  // namespace halfstep::report
