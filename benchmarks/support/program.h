// What every program that measures does with an Error: says it, and exits with 2. 1 is for figures that fall
// short.
#pragma once

#include <halfstep/error.h>

#include <cstdio>

namespace bench {

template <typename Run>
int exit_code_of(Run run, int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const halfstep::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}

}  // namespace bench
