// What the operating system refused, as one typed error.
#pragma once

#include <halfstep/error.h>

#include <filesystem>
#include <string_view>

namespace halfstep::files {

/// Throws a FileError for the current `errno`: "checkpoints/step-7: cannot write: No space left on device
/// (ENOSPC) ...".
[[noreturn]] void throw_file_error(std::string_view doing, const std::filesystem::path& path);

}  // namespace halfstep::files
