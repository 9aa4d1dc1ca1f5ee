// A step that was skipped, taken again: what each rank has found, and what all of them make of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/ranks.h>
#include <halfstep/run_log.h>

#include <cstdint>
#include <optional>
#include <string>

namespace halfstep::train {

/// The gradients of one parameter, added up in FP32 as a step adds those of its micro-batches.
class SumAgain {
 public:
  explicit SumAgain(at::Tensor parameter) : parameter_(std::move(parameter)) {}
  /// What backward has left.
  void add();

  double largest_part() const { return largest_part_; }  ///< magnitude in any micro-batch
  double largest() const;                                ///< in the sum; Inf or NaN where it is that
  std::string shape() const;                             ///< "[8, 4]"

 private:
  at::Tensor parameter_, sum_;
  double largest_part_ = 0;
};

/// What one rank has found.
struct Retrace {
  std::optional<CulpritRecord> culprit{};
  bool complete = true;  ///< every micro-batch of its own was looked at to the end
  std::optional<SumAgain> sum{};
};

/// The sum in which something was not finite, where the gradients of every micro-batch were.
struct FailedSum {
  std::string parameter;
  int64_t micro_batches = 1;          ///< that each rank adds
  c10::ScalarType type = at::kFloat;  ///< in which ranks are added
  double loss_scale = 1;
};

/// The first culprit of the lowest rank that has one, and which ranks have one. Where none has, all were
/// looked at, and a sum is known to have failed: that sum. All ranks call it.
std::optional<CulpritRecord> agreed_culprit(const Ranks& ranks, Retrace mine,
                                            const std::optional<FailedSum>& failed_sum);

}  // namespace halfstep::train
