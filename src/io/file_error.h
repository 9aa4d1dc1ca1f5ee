// System calls: what they refuse, and what a signal breaks off.
#pragma once

#include <halfstep/error.h>

#include <cerrno>
#include <filesystem>
#include <string_view>

namespace halfstep::files {

/// Throws a FileError for the current `errno`: "checkpoints/step-7: cannot write: No space left on device
/// (ENOSPC) ...".
[[noreturn]] void throw_file_error(std::string_view doing, const std::filesystem::path& path);

/// Makes a call again as long as a signal interrupts it. Not for close: Linux has closed by then.
template <typename Call>
auto uninterrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace halfstep::files
