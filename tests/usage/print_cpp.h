// A program as C++ source.
#pragma once

#include <string>

#include "usage/program.h"

namespace usage {

/// A main() that needs Halfstep and LibTorch alone: it trains the program through Halfstep, with an FP64 loop
/// beside it, and prints how far gradients, weights and statistics are apart after every step.
std::string print_cpp(const Program& program);

}  // namespace usage
