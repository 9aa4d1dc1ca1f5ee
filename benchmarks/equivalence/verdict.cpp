#include "verdict.h"

#include <algorithm>
#include <cmath>

namespace bench {

Verdict judge(const Scheme& scheme, const std::vector<RunResult>& runs,
              const std::vector<RunResult>& reference, double margin_percent) {
  Verdict verdict{.scheme = &scheme, .runs = runs};
  verdict.diverged =
      std::any_of(runs.begin(), runs.end(), [](const RunResult& run) { return !std::isfinite(run.loss); });

  double mean_reference = 0;
  for (const auto& run : reference) mean_reference += run.loss / static_cast<double>(reference.size());
  std::vector<double> percents;
  for (std::size_t seed = 0; seed < runs.size(); ++seed)
    percents.push_back(100 * (runs[seed].loss - reference[seed].loss) / mean_reference);
  verdict.difference_percent = mean_with_90_percent(percents);

  const Interval& interval = verdict.difference_percent;
  verdict.inside = !verdict.diverged && interval.low > -margin_percent && interval.high < margin_percent;
  // A NaN is harm too: a control that diverges has been told apart.
  verdict.outside = verdict.diverged || interval.low > margin_percent;
  verdict.as_it_should = scheme.role == Role::Control ? verdict.outside
                         : scheme.role == Role::Shown ? !verdict.diverged
                                                      : verdict.inside;
  return verdict;
}

nlohmann::ordered_json json_of(const Verdict& verdict) {
  const Interval& interval = verdict.difference_percent;
  nlohmann::ordered_json losses = nlohmann::ordered_json::array(), skipped = losses;
  for (const auto& run : verdict.runs) {
    losses.push_back(run.loss);
    skipped.push_back(run.skipped_steps);
  }
  return {{"scheme", verdict.scheme->name},
          {"control", verdict.scheme->role == Role::Control},
          {"mean_percent", interval.mean},
          {"interval_percent", {interval.low, interval.high}},
          {"verdict", verdict.inside    ? "inside"
                      : verdict.outside ? "outside"
                                        : "undecided"},
          {"as_it_should", verdict.as_it_should},
          {"losses", losses},
          {"skipped_steps", skipped}};
}

}  // namespace bench
