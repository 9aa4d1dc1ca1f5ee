// System calls that a signal may break off.
#pragma once

#include <cerrno>

namespace halfstep::files {

/// Makes a call again as long as a signal interrupts it. Not for close: Linux has closed by then.
template <typename Call>
auto uninterrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace halfstep::files
