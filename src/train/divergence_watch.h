// Tells a loss that has risen for good from one that is noisy.
#pragma once

#include <halfstep/state_dict.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace halfstep::train {

/// Compares each loss with the lowest mean of kWindow losses in a row that the run has had, plus a margin:
/// half of all that the run had learnt until then, and six deviations of the losses in that window.
///
///   in trouble   the last loss is above or not finite, or the last kShort steps were skipped
///   diverged     the last kLong losses are above: no batch by itself does that
///
/// A loss that is not finite counts as above. Steps that were skipped say nothing of the loss.
class DivergenceWatch {
 public:
  static constexpr size_t kWindow = 16, kShort = 4, kLong = 32;

  void see(int64_t step, double loss, bool skipped);

  bool in_trouble() const;
  /// A sentence with the numbers, if it has.
  std::optional<std::string> diverged() const;
  /// The first step of the present row of losses above; the next step if the last was not.
  int64_t above_since() const { return above_since_; }

  StateDict state_dict() const;
  void load_state_dict(const StateDict& saved);

 private:
  double limit() const { return lowest_mean_ + margin_; }

  std::vector<double> latest_;  ///< at most kWindow, the oldest first
  double first_mean_ = 0, lowest_mean_ = 0, margin_ = 0;
  int64_t windows_ = 0;  ///< full ones seen
  int64_t above_ = 0;    ///< in a row
  int64_t above_since_ = 0;
  double lowest_above_ = 0;  ///< of these
  int64_t skips_ = 0;        ///< in a row
  bool last_bad_ = false;    ///< its loss was not finite
};

}  // namespace halfstep::train
