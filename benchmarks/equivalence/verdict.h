// Whether a scheme's losses are those of the reference.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "schemes.h"
#include "support/statistics.h"
#include "train.h"

namespace bench {

struct Verdict {
  const Scheme* scheme = nullptr;
  std::vector<RunResult> runs = {};  ///< one for each seed
  Interval difference_percent = {};  ///< from the reference's run of the same seed, of its mean loss
  bool inside = false;               ///< the whole interval is within the margin: equivalent
  bool outside = false;              ///< the whole interval is above it: harm is shown
  bool diverged = false;             ///< a loss is not finite
  bool as_it_should = false;         ///< candidates inside, controls outside, none diverged
};

/// The margin is pre-set, as a share of the reference's loss: closer is the same, for the purpose of
/// training.
Verdict judge(const Scheme& scheme, const std::vector<RunResult>& runs,
              const std::vector<RunResult>& reference, double margin_percent);

nlohmann::ordered_json json_of(const Verdict& verdict);

}  // namespace bench
