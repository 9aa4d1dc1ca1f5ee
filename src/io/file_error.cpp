#include "io/file_error.h"

#include <halfstep/printable.h>

#include <cerrno>
#include <cstring>

namespace halfstep::files {
namespace {

std::string_view remedy(int code) {
  switch (code) {
    case ENOSPC:
    case EDQUOT:
      return " Free space on that disk, or choose another folder.";
    case EFBIG:
      return " Raise the limit of file sizes (`ulimit -f`), or choose another file system.";
    case EROFS:
      return " The file system is mounted read-only; choose another folder.";
    case EACCES:
    case EPERM:
      return " Check the permissions of the file and of its folder.";
    case EMFILE:
    case ENFILE:
      return " Too many files are open; raise the limit with `ulimit -n`.";
    case ENOENT:
      return " Check the path.";
    case EIO:
      return " The disk reported a fault; what was being written cannot be trusted.";
    default:
      return "";
  }
}

}  // namespace

void throw_file_error(std::string_view doing, const std::filesystem::path& path) {
  const int code = errno;
  const char* const name = strerrorname_np(code);
  throw FileError(detail::concat(printable(path.native(), Unprintable::Escaped), ": cannot ", doing, ": ",
                                 std::strerror(code), " (", name ? name : "unknown", ").", remedy(code)),
                  code);
}

}  // namespace halfstep::files
