// What an optimizer keeps for one parameter.
#pragma once

#include <halfstep/optim.h>
#include <halfstep/params.h>

#include <cstdint>
#include <vector>

#include "kernels/update.h"

namespace halfstep::optim {

struct Moment {
  at::Tensor values;  // FP32, BF16 or 8-bit codes, laid out as the working copy; undefined where none is kept
  at::Tensor scales;  // one for each block of 8-bit codes
};

struct Slot {
  Param param;
  std::size_t group = 0;
  std::uint32_t id = 0;  // names its random numbers; goes by the parameter's name
  int64_t steps = 0;     // in which it had a gradient
  MomentStorage storage = MomentStorage::Fp32;
  Moment first{}, second{};
};

/// One for each different parameter, in their order, without moments. An Error by name for parameters that
/// the kernels cannot update or that cannot be told apart: wrong type, not dense, sharing memory with
/// another, called as another is. `whose` begins the messages: "AdamW".
std::vector<Slot> make_slots(const char* whose, const std::vector<const std::vector<Param>*>& groups);

/// All zero.
Moment make_moment(const Param& param, MomentStorage storage);

/// That the parameter still is what the slot was made for: its tensor is the user's, who may have changed it.
void check_slot(const char* whose, const Slot& slot);

/// The part of a slot that a chunk covers.
UpdateRun run_of(const Slot& slot, const at::Tensor& grad, int64_t first_element, int64_t count);

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
