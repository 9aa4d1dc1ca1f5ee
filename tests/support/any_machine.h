// Tests study numerics, so they run where BF16 is only imitated too.
#pragma once

#include <halfstep/autocast.h>

namespace halfstep::testing {

inline constexpr AutocastOptions kAnyMachine{.allow_emulated = true};

}  // namespace halfstep::testing
