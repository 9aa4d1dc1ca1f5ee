// What AdamW and SGD differ in. Everything else is FusedOptimizer.
#pragma once

#include <halfstep/optim.h>

#include "kernels/update.h"
#include "optim/slot.h"

namespace halfstep::optim {

template <typename Options>
struct Rule;

template <>
struct Rule<AdamWOptions> {
  static constexpr const char* kName = "AdamW";
  static int moment_count(const AdamWOptions&) { return 2; }
  /// `step` is the number of this step for this parameter, counted from 1.
  static AdamWStep constants(const AdamWOptions& options, double learning_rate, double grad_multiplier,
                             int64_t step, StochasticKey random);
  static UpdateCounts update(const UpdateLayout& layout, const AdamWStep& step, const UpdateRun& run) {
    return adamw_update(layout, step, run);
  }
};

template <>
struct Rule<SgdOptions> {
  static constexpr const char* kName = "SGD";
  static int moment_count(const SgdOptions& options) { return options.momentum == 0 ? 0 : 1; }
  static SgdStep constants(const SgdOptions& options, double learning_rate, double grad_multiplier,
                           int64_t step, StochasticKey random);
  static UpdateCounts update(const UpdateLayout& layout, const SgdStep& step, const UpdateRun& run) {
    return sgd_update(layout, step, run);
  }
};

}  // namespace halfstep::optim
