#include "report/sentence.h"

#include <algorithm>
#include <cmath>

#include "words/numbers.h"

namespace halfstep::report {
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
  return row.name + " has lost its loss: it is NaN or Inf in " + counted(row.not_finite, "step") +
         " of these. ";
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
      return name + " cannot be told from " + reference + ", nor called the same: the difference is " +
             difference_text(from_first) +
             (from_first.paired ? "" : ", unpaired because " + from_first.why_unpaired) + ". ";
    case Likeness::NotFinite:
      return lost_sentence(first) + lost_sentence(row);
    case Likeness::TooShort:
      return name + " and " + reference + " have too few steps in common to compare. ";
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
  if (text.empty()) text = "No two runs are the same within noise. ";
  for (size_t i = 1; i < groups.size(); ++i)
    for (const size_t run : groups[i])
      text += other_sentence(comparison.rows[run], comparison.rows.front(), pairs.of(0, run));
  const bool all_there = std::ranges::all_of(
      comparison.rows, [&](const auto& row) { return row.summary.last_step == comparison.last_step; });
  return text + "Compared over steps " + with_commas(comparison.first_step) + " to " +
         with_commas(comparison.last_step) + (all_there ? "." : ", the last that all of them have.");
}

}  // namespace halfstep::report
