#include "report/sentence.h"

#include <algorithm>
#include <cmath>

#include "report/numbers.h"

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
      return std::ranges::all_of(group,
                                 [&](size_t other) { return pairs.of(other, run).likeness == Likeness::Same; });
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
         (most < 1e-4 ? "less than 0.01%" : "at most " + percent(most)) + ", within the margin of " + percent(RunComparison::kMargin) + ". ";
}

std::string other_sentence(const std::string& name, const std::string& reference, const LossDifference& from_first) {
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
      return name + " or " + reference + " has lost its loss to NaN or Inf. ";
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
  return with_uncertainty(100 * relative(difference, difference.mean), 100 * relative(difference, difference.half_width)) +
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
      text += other_sentence(comparison.rows[run].name, comparison.rows.front().name, pairs.of(0, run));
  text += "Compared over steps " + with_commas(comparison.first_step) + " to " + with_commas(comparison.last_step) + ".";
  return text;
}

}  // namespace halfstep::report
