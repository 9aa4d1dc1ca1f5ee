#include <halfstep/error.h>

namespace halfstep::detail {

void throw_error(const std::string& message) { throw Error(message); }

void throw_bug(const char* file, int line, const std::string& message) {
  throw Bug(concat(message, " (a bug in Halfstep, ", file, ":", line, "; please report it)"));
}

}  // namespace halfstep::detail
