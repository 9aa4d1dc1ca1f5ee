// Whether a scheme's losses are those of FP32 training.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "schemes.h"
#include "support/statistics.h"
#include "train.h"

namespace bench {

/// Pre-set, as a share of the FP32 loss: closer than this is the same, for the purpose of training.
inline constexpr double kMarginPercent = 0.25;

struct Verdict {
  const Scheme* scheme = nullptr;
  std::vector<RunResult> runs = {};  ///< one for each seed
  Interval difference_percent = {};  ///< from the FP32 run of the same seed, of the mean FP32 loss
  bool inside = false;               ///< the whole interval is within the margin: equivalent
  bool outside = false;              ///< the whole interval is above it: harm is shown
  bool diverged = false;             ///< a loss is not finite
  bool as_it_should = false;         ///< candidates inside, controls outside, none diverged
};

Verdict judge(const Scheme& scheme, const std::vector<RunResult>& runs,
              const std::vector<RunResult>& reference);

nlohmann::ordered_json json_of(const Verdict& verdict);

}  // namespace bench
