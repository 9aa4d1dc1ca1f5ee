// An optimizer's memory as a StateDict, and back.
#pragma once

#include <halfstep/optim.h>

#include "optim/rules.h"

namespace halfstep::optim {

/// Everything that a FusedOptimizer saves.
template <typename Options>
struct OptimizerState {
  int64_t steps = 0;
  uint64_t seed = 0;
  std::vector<Options> groups;
  std::vector<Slot> slots;
};

template <typename Options>
StateDict saved_form(const OptimizerState<Options>& state);

/// Writes a saved form into `state`, or throws an Error that lists all that does not fit and changes nothing.
template <typename Options>
void load(const StateDict& saved, OptimizerState<Options>& state);

}  // namespace halfstep::optim
