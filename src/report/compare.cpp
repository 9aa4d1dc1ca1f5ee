#include <halfstep/error.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "report/report.h"
#include "report/figures.h"
#include "report/noise.h"
#include "report/pairing.h"
#include "report/sentence.h"

namespace halfstep {
namespace {

using report::Point;

/// Losses of two runs at the steps that both logged.
struct Common {
  std::vector<int64_t> steps{};
  std::vector<double> first{}, second{};
};

Common common_losses(const RunHistory& a, const RunHistory& b, int64_t last_step) {
  Common common;
  for (size_t i = 0, k = 0; i < a.steps.size() && k < b.steps.size();) {
    const int64_t left = a.steps[i].step, right = b.steps[k].step;
    if (std::max(left, right) > last_step) break;
    if (left == right) {
      common.steps.push_back(left);
      common.first.push_back(a.steps[i].loss);
      common.second.push_back(b.steps[k].loss);
    }
    i += left <= right ? 1 : 0;
    k += right <= left ? 1 : 0;
  }
  return common;
}

bool same_bits(double a, double b) { return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b); }

Likeness judged(const LossDifference& difference) {
  const double size = std::abs(difference.mean);
  if (size + difference.half_width <= difference.margin) return Likeness::Same;
  if (size - difference.half_width > difference.margin) return Likeness::Different;
  return Likeness::Unclear;
}

LossDifference difference_of(const RunHistory& a, const RunHistory& b, int64_t first_step,
                             int64_t last_step) {
  LossDifference result;
  const Common common = common_losses(a, b, last_step);
  result.why_unpaired = report::why_not_the_same_batches(a, b);
  result.paired = result.why_unpaired.empty();
  result.identical = !common.steps.empty() && std::ranges::equal(common.first, common.second, same_bits);
  std::vector<double> first, second, differences;
  int64_t lost = 0;
  for (size_t i = 0; i < common.steps.size(); ++i) {
    if (common.steps[i] < first_step) continue;
    if (!std::isfinite(common.first[i]) || !std::isfinite(common.second[i])) {
      ++lost;
      continue;
    }
    first.push_back(common.first[i]);
    second.push_back(common.second[i]);
    differences.push_back(common.second[i] - common.first[i]);
  }
  result.steps = std::ssize(differences);
  // One step in ten may be lost; a run that loses more is no longer a run.
  if (lost * 10 > lost + result.steps) {
    result.likeness = Likeness::NotFinite;
    return result;
  }
  if (result.steps < report::kLeastValues) return result;
  const report::MeanInterval reference = report::mean_interval(report::without_trend(first));
  result.margin = RunComparison::kMargin * std::abs(reference.mean);
  if (result.paired) {
    const report::MeanInterval interval = report::mean_interval(differences);
    result.mean = interval.mean;
    result.half_width = interval.half_width;
  } else {
    const report::MeanInterval other = report::mean_interval(report::without_trend(second));
    result.mean = other.mean - reference.mean;
    result.half_width = std::hypot(reference.half_width, other.half_width);
  }
  result.likeness = judged(result);
  return result;
}

/// A fifth of the steps, at least 20 and at most 2,000.
int64_t compared_window(int64_t steps) {
  return std::min<int64_t>(steps, std::clamp<int64_t>(steps / 5, 20, 2000));
}

void set_window(RunComparison& comparison, std::span<const RunHistory> runs) {
  const auto last = [](const RunHistory& run) { return run.steps.back().step; };
  const RunHistory& shortest = *std::ranges::min_element(runs, {}, last);
  const auto window = static_cast<size_t>(compared_window(std::ssize(shortest.steps)));
  comparison.last_step = last(shortest);
  comparison.first_step = shortest.steps[shortest.steps.size() - window].step;
}

RunComparison::Row row_of(const RunHistory& run, const RunComparison& comparison) {
  RunComparison::Row row{.name = run.name, .summary = summarize(run)};
  auto loss = report::points_of(run, [](const StepRecord& r) { return std::optional(r.loss); });
  std::erase_if(loss, [&](const Point& point) {
    return point.step < comparison.first_step || point.step > comparison.last_step;
  });
  row.final_loss = report::finite_mean(loss);
  row.not_finite =
      std::ranges::count_if(loss, [](const Point& point) { return !std::isfinite(point.value); });
  for (const Point& point : report::evaluation_points(run)) {
    if (point.step > comparison.last_step) break;
    row.evaluation_loss = point.value;
    row.evaluation_step = point.step;
  }
  return row;
}

}  // namespace

std::string_view to_string(Likeness likeness) {
  switch (likeness) {
    case Likeness::Same:
      return "same";
    case Likeness::Unclear:
      return "unclear";
    case Likeness::Different:
      return "different";
    case Likeness::NotFinite:
      return "not finite";
    case Likeness::TooShort:
      return "too short";
  }
  return "unknown";
}

RunComparison compare_runs(std::span<const RunHistory> runs) {
  HALFSTEP_CHECK(runs.size() >= 2, "compare: ", runs.size(),
                 " run(s) given; a comparison needs two or more.");
  for (const RunHistory& run : runs)
    HALFSTEP_CHECK(!run.steps.empty(), "compare: run '", run.name, "' has logged no step yet.");
  RunComparison comparison;
  set_window(comparison, runs);
  for (const RunHistory& run : runs) comparison.rows.push_back(row_of(run, comparison));
  for (size_t i = 0; i < runs.size(); ++i)
    for (size_t k = i + 1; k < runs.size(); ++k) {
      comparison.pairs.push_back(
          difference_of(runs[i], runs[k], comparison.first_step, comparison.last_step));
      if (i == 0) comparison.rows[k].from_first = comparison.pairs.back();
    }
  comparison.sentence = report::comparison_sentence(comparison);
  return comparison;
}

}  // namespace halfstep
