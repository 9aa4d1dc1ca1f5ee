// Errors. What Halfstep throws is a halfstep::Error; LibTorch's own errors pass through as c10::Error.
#pragma once

#include <halfstep/config.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace halfstep {

/// What a caller can get wrong, or what went wrong around us: the message says what happened, with the
/// numbers, and what to do about it.
class HALFSTEP_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A broken promise of Halfstep itself. Please report it.
class HALFSTEP_API Bug : public Error {
 public:
  using Error::Error;
};

/// What the operating system refused: a disk that is full, a folder that cannot be written. `code()` is its
/// errno.
class HALFSTEP_API FileError : public Error {
 public:
  FileError(const std::string& message, int code) : Error(message), code_(code) {}
  int code() const { return code_; }  ///< errno

 private:
  int code_;
};

/// A checkpoint is saved, and one that it made superfluous could not be removed: no reason to end a run.
class HALFSTEP_API OldCheckpointError : public FileError {
 public:
  using FileError::FileError;
};

namespace detail {

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

[[noreturn]] HALFSTEP_API void throw_error(const std::string& message);
[[noreturn]] HALFSTEP_API void throw_bug(const char* file, int line, const std::string& message);

}  // namespace detail
}  // namespace halfstep

/// For what a caller can get wrong.
#define HALFSTEP_CHECK(condition, ...) \
  ((condition) ? (void)0 : ::halfstep::detail::throw_error(::halfstep::detail::concat(__VA_ARGS__)))

/// For what only Halfstep can get wrong.
#define HALFSTEP_BUG(...) \
  ::halfstep::detail::throw_bug(__FILE__, __LINE__, ::halfstep::detail::concat(__VA_ARGS__))
