#include "report/comparison.h"

#include <halfstep/error.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "report/figures.h"
#include "report/noise.h"
#include "report/run_report.h"
#include "words/numbers.h"

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

namespace halfstep::report {

std::string why_not_the_same_batches(const RunHistory& a, const RunHistory& b) {
  const auto first = configuration_of(a), second = configuration_of(b);
  if (!first || !second)
    return "a configuration cannot be read, so it is unknown whether they saw the same batches";
  const auto& left = first->data;
  const auto& right = second->data;
  if (left.seed != right.seed) return "data.seed differs";
  if (left.train != right.train || left.images != right.images) return "they train on other files";
  if (left.validation != right.validation || left.validation_fraction != right.validation_fraction)
    return "other parts of the data are held out";
  if (left.sequence_length != right.sequence_length) return "data.sequence_length differs";
  if (left.batch_size * first->train.accumulation != right.batch_size * second->train.accumulation)
    return "their steps have batches of another size";
  // Without a tokenizer of its own a run takes that of the model which it starts from.
  const bool from_model = !left.tokenizer && !right.tokenizer;
  if (left.tokenizer != right.tokenizer || (from_model && first->model.from != second->model.from))
    return "their tokenizers differ";
  return "";
}

namespace {

/// The margin is a share of the loss, which gives the loss back.
double relative(const LossDifference& difference, double value) {
  return difference.margin > 0 ? value / difference.margin * RunComparison::kMargin : 0.0;
}

class Pairs {
 public:
  explicit Pairs(const RunComparison& comparison) : comparison_(comparison) {}

  const LossDifference& of(size_t i, size_t k) const {
    if (i > k) std::swap(i, k);
    const size_t count = comparison_.rows.size();
    return comparison_.pairs[i * count - i * (i + 1) / 2 + (k - i - 1)];
  }

 private:
  const RunComparison& comparison_;
};

using Group = std::vector<size_t>;

/// Runs that are each the same as every other of their group; the earliest group that takes a run has it.
std::vector<Group> groups_of(const RunComparison& comparison, const Pairs& pairs) {
  std::vector<Group> groups;
  for (size_t run = 0; run < comparison.rows.size(); ++run) {
    const auto takes = [&](const Group& group) {
      return std::ranges::all_of(
          group, [&](size_t other) { return pairs.of(other, run).likeness == Likeness::Same; });
    };
    const auto group = std::ranges::find_if(groups, takes);
    if (group == groups.end())
      groups.push_back({run});
    else
      group->push_back(run);
  }
  return groups;
}

std::string names_of(const RunComparison& comparison, const Group& group) {
  std::string text;
  for (size_t i = 0; i < group.size(); ++i)
    text += (i == 0 ? "" : i + 1 == group.size() ? " and " : ", ") + comparison.rows[group[i]].name;
  return text;
}

std::string same_sentence(const RunComparison& comparison, const Pairs& pairs, const Group& group) {
  double most = 0.0;
  bool identical = true;
  for (size_t i = 0; i < group.size(); ++i)
    for (size_t k = i + 1; k < group.size(); ++k) {
      const LossDifference& pair = pairs.of(group[i], group[k]);
      most = std::max(most, relative(pair, std::abs(pair.mean) + pair.half_width));
      identical = identical && pair.identical;
    }
  if (identical) return names_of(comparison, group) + " are identical: every loss has the same bits. ";
  return names_of(comparison, group) + " are the same within noise: their training losses differ by " +
         (most < 1e-4 ? "less than 0.01%" : "at most " + percent(most)) + ", within the margin of " +
         percent(RunComparison::kMargin) + ". ";
}

std::string lost_sentence(const RunComparison::Row& row) {
  if (row.not_finite == 0) return "";
  return row.name + "'s loss is NaN or Inf in " + counted(row.not_finite, "step") + " of these. ";
}

std::string other_sentence(const RunComparison::Row& row, const RunComparison::Row& first,
                           const LossDifference& from_first) {
  const std::string &name = row.name, &reference = first.name;
  switch (from_first.likeness) {
    case Likeness::Same:
      return "";  // told by its group; it is not in the first one because of another member
    case Likeness::Different:
      return name + " differs from " + reference + " by " + difference_text(from_first) +
             (from_first.paired ? "" : ", unpaired because " + from_first.why_unpaired) + ". ";
    case Likeness::Unclear:
      return name + " cannot be distinguished from " + reference +
             ", nor called the same: the difference is " + difference_text(from_first) +
             (from_first.paired ? "" : ", unpaired because " + from_first.why_unpaired) + ". ";
    case Likeness::NotFinite:
      return lost_sentence(first) + lost_sentence(row);
    case Likeness::TooShort:
      if (from_first.identical)
        return name + " and " + reference + " are identical: every loss has the same bits. ";
      return name + " and " + reference +
             " have too few steps in common to compare: " + std::to_string(from_first.steps) + ", at least " +
             std::to_string(report::kLeastValues) + " are needed. ";
  }
  return "";
}

}  // namespace

std::string difference_text(const LossDifference& difference) {
  if (difference.identical) return "identical";
  if (difference.likeness == Likeness::NotFinite) return "not finite";
  if (difference.likeness == Likeness::TooShort) return "too few steps";
  return with_uncertainty(100 * relative(difference, difference.mean),
                          100 * relative(difference, difference.half_width)) +
         "%";
}

std::string comparison_sentence(const RunComparison& comparison) {
  const Pairs pairs(comparison);
  const auto groups = groups_of(comparison, pairs);
  std::string text;
  for (const Group& group : groups)
    if (group.size() > 1) text += same_sentence(comparison, pairs, group);
  const auto is_too_short = [](const LossDifference& pair) { return pair.likeness == Likeness::TooShort; };
  if (text.empty() && !std::ranges::any_of(comparison.pairs, is_too_short))
    text = "No two runs are the same within noise. ";
  for (size_t i = 1; i < groups.size(); ++i)
    for (const size_t run : groups[i])
      text += other_sentence(comparison.rows[run], comparison.rows.front(), pairs.of(0, run));
  const bool all_there = std::ranges::all_of(
      comparison.rows, [&](const auto& row) { return row.summary.last_step == comparison.last_step; });
  return text + "Compared over steps " + with_commas(comparison.first_step) + " to " +
         with_commas(comparison.last_step) + (all_there ? "." : ", the last that all of them have.");
}

}  // namespace halfstep::report
