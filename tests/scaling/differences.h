// The situations where Halfstep means to differ from torch.amp 2.13.
#pragma once

#include <string>
#include <vector>

namespace halfstep::testing {

struct Difference {
  std::string name;       // that of the function in tools/torch_amp_oracle.py
  std::string situation;  // one line for a person
  std::string torch_amp;  // what torch.amp is expected to do, as compact JSON; anything else is news
  std::string expected;   // what Halfstep promises
  std::string halfstep;   // what Halfstep did
};

/// Runs Halfstep through each of them.
std::vector<Difference> run_differences();

}  // namespace halfstep::testing
