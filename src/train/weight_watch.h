// Notices that masters are not updated.
#pragma once

#include <halfstep/params.h>

#include <cstdint>
#include <vector>

namespace halfstep::train {

/// An optimizer that does not know masters, such as torch::optim's, writes to working copies alone. What it
/// leaves is an edit like any other; that no master moves, step after step, is what gives it away.
class WeightWatch {
 public:
  /// Called when gradients are inspected.
  void note_masters(const std::vector<Param>& params);

  /// Whether an optimizer of ours has updated a master since note_masters.
  bool master_updated(const std::vector<Param>& params) const;

  /// Called at the end of a step with finite gradients. Throws an Error after ten in a row in which weights
  /// with masters had gradients and no master was updated; a few may be left out on purpose.
  void end_step(const std::vector<Param>& params);

 private:
  std::vector<int64_t> noted_versions_;
  const Param* first_with_grad_ = nullptr;  // among those with masters
  int64_t steps_without_update_ = 0;
};

}  // namespace halfstep::train
