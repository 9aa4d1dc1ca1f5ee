// The class of the innermost MemoryClassScope of this thread.
#pragma once

#include <halfstep/memory.h>

namespace halfstep {

/// `Other` outside any scope. Some 10 ns.
MemoryClass active_class();

}  // namespace halfstep
