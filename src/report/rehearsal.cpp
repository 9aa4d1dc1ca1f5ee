#include "report/rehearsal.h"

#include <halfstep/error.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <span>

#include "report/figures.h"
#include "report/noise.h"
#include "words/numbers.h"

namespace halfstep {
namespace {

using report::Point;

constexpr double kTie = 0.01;  // a cost within this share of the least counts as equal

/// One run of a recipe beside the baseline's of the same seed.
struct Pair {
  std::vector<double> differences{};  ///< of training losses, step by step over the last third
  double baseline_loss = 0.0;         ///< mean over those steps
  std::optional<double> held_out{};   ///< difference after the last step
  std::optional<double> baseline_held_out{};
};

double mean_of(std::span<const double> values) {
  double sum = 0.0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

/// Training losses of the last third, by step.
std::map<int64_t, double> last_losses(const RunHistory& run, int64_t first_step) {
  std::map<int64_t, double> losses;
  for (const StepRecord& record : run.steps)
    if (record.step >= first_step) losses[record.step] = record.loss;
  return losses;
}

std::optional<double> held_out_loss(const RunHistory& run, int64_t step) {
  const auto points = report::evaluation_points(run);
  if (points.empty() || points.back().step != step || !std::isfinite(points.back().value)) return {};
  return points.back().value;
}

/// Why a run's losses cannot be judged; empty if they can.
std::string lost_sentence(const RunHistory& run, int64_t steps, int64_t first_step) {
  if (run.end() && run.end()->outcome == "diverged")
    return "diverged at step " + with_commas(run.end()->step) +
           (run.end()->why.empty() ? "" : ": " + run.end()->why);
  const auto losses = last_losses(run, first_step);
  const auto lost =
      std::ranges::count_if(losses, [](const auto& loss) { return !std::isfinite(loss.second); });
  // One step in ten may be lost; a run that loses more is no longer a run.
  if (lost * 10 > std::ssize(losses))
    return "its loss is NaN or Inf in " + counted(lost, "step") + " of the last " +
           with_commas(steps - first_step + 1);
  return "";
}

bool is_complete(const RunHistory& run, int64_t steps) {
  return !run.steps.empty() && run.steps.back().step >= steps;
}

Pair pair_of(const RunHistory& baseline, const RunHistory& run, int64_t steps, int64_t first_step) {
  Pair pair;
  const auto before = last_losses(baseline, first_step);
  std::vector<double> reference;
  for (const auto& [step, loss] : last_losses(run, first_step)) {
    const auto same_step = before.find(step);
    if (same_step == before.end() || !std::isfinite(loss) || !std::isfinite(same_step->second)) continue;
    pair.differences.push_back(loss - same_step->second);
    reference.push_back(same_step->second);
  }
  if (!reference.empty()) pair.baseline_loss = mean_of(reference);
  pair.baseline_held_out = held_out_loss(baseline, steps);
  if (const auto loss = held_out_loss(run, steps); loss && pair.baseline_held_out)
    pair.held_out = *loss - *pair.baseline_held_out;
  return pair;
}

/// Over seeds, by Student's t; of one seed a single number.
PairedDifference over_seeds(std::span<const double> differences, double baseline_loss) {
  PairedDifference result{.mean = mean_of(differences) / std::abs(baseline_loss)};
  if (differences.size() < 2) return result;
  const double mean = mean_of(differences), count = static_cast<double>(differences.size());
  double squares = 0.0;
  for (const double difference : differences) squares += (difference - mean) * (difference - mean);
  result.half_width =
      report::t_quantile(count - 1) * std::sqrt(squares / (count - 1) / count) / std::abs(baseline_loss);
  return result;
}

std::optional<PairedDifference> training_difference(std::span<const Pair> pairs) {
  std::vector<double> means, losses;
  for (const Pair& pair : pairs) {
    if (pair.differences.empty()) return {};
    means.push_back(mean_of(pair.differences));
    losses.push_back(pair.baseline_loss);
  }
  PairedDifference result = over_seeds(means, mean_of(losses));
  if (pairs.size() == 1 && std::ssize(pairs.front().differences) >= report::kLeastValues) {
    const report::MeanInterval interval = report::mean_interval(pairs.front().differences);
    result = {.mean = interval.mean / std::abs(losses.front()),
              .half_width = interval.half_width / std::abs(losses.front())};
  }
  return result;
}

std::optional<PairedDifference> held_out_difference(std::span<const Pair> pairs) {
  std::vector<double> differences, losses;
  for (const Pair& pair : pairs) {
    if (!pair.held_out) return {};
    differences.push_back(*pair.held_out);
    losses.push_back(*pair.baseline_held_out);
  }
  return over_seeds(differences, mean_of(losses));
}

int64_t activation_bytes(const RunHistory& run) {
  int64_t most = 0;
  for (const StepRecord& record : run.steps)
    if (record.memory)
      for (const MemoryRecord::Class& each : record.memory->classes)
        if (each.name == "activation") most = std::max(most, each.peak_bytes);
  return most;
}

/// What is known of a recipe without a look at the others.
RecipeRow measured(const RehearsedRecipe& recipe, int64_t steps, int64_t first_step) {
  RecipeRow row{.name = recipe.name, .why = {}};
  std::vector<double> training, held_out, seconds;
  for (const RunHistory& run : recipe.runs) {
    const RunSummary summary = summarize(run);
    row.peak_bytes = std::max(row.peak_bytes, summary.peak_bytes);
    row.activation_bytes = std::max(row.activation_bytes, activation_bytes(run));
    row.skipped += summary.skipped;
    if (summary.items_per_second && !run.steps.empty())
      seconds.push_back(static_cast<double>(run.steps.front().items) / *summary.items_per_second);
    std::vector<double> finite;
    for (const auto& [step, loss] : last_losses(run, first_step))
      if (std::isfinite(loss)) finite.push_back(loss);
    if (!finite.empty()) training.push_back(mean_of(finite));
    if (const auto loss = held_out_loss(run, steps)) held_out.push_back(*loss);
  }
  if (!training.empty() && training.size() == recipe.runs.size()) row.training_loss = mean_of(training);
  if (!held_out.empty() && held_out.size() == recipe.runs.size()) row.held_out_loss = mean_of(held_out);
  if (!seconds.empty() && !recipe.emulated) row.seconds_per_step = mean_of(seconds);
  return row;
}

/// One recipe against the baseline.
class Judge {
 public:
  Judge(const Rehearsal& rehearsal, const RehearsalJudgement& judgement)
      : rehearsal_(rehearsal),
        baseline_(rehearsal.recipes.front()),
        first_step_(judgement.first_step),
        by_held_out_(judgement.by_held_out),
        baseline_is_evaluated_(judgement.rows.front().held_out_loss.has_value()) {}

  void decide(const RehearsedRecipe& recipe, RecipeRow& row) const {
    if (recipe.runs.empty()) return set(row, RecipeVerdict::NotRun, recipe.why_not_run);
    for (const RunHistory& run : recipe.runs)
      if (const std::string lost = lost_sentence(run, rehearsal_.steps, first_step_); !lost.empty())
        return set(row, RecipeVerdict::DoesNotHold, lost);
    std::vector<Pair> pairs;
    for (size_t seed = 0; seed < recipe.runs.size(); ++seed) {
      if (!is_complete(recipe.runs[seed], rehearsal_.steps))
        return set(row, RecipeVerdict::CannotTell, "a run of it has not taken all its steps");
      pairs.push_back(pair_of(baseline_.runs[seed], recipe.runs[seed], rehearsal_.steps, first_step_));
      const auto evaluations = report::evaluation_points(recipe.runs[seed]);
      if (baseline_is_evaluated_ && (evaluations.empty() || evaluations.back().step != rehearsal_.steps))
        return set(row, RecipeVerdict::CannotTell, "a run of it was not evaluated after its last step");
    }
    row.training = training_difference(pairs);
    row.held_out = held_out_difference(pairs);
    by_interval(row);
  }

 private:
  static void set(RecipeRow& row, RecipeVerdict verdict, std::string why) {
    row.verdict = verdict;
    row.why = std::move(why);
  }

  void by_interval(RecipeRow& row) const {
    const std::optional<PairedDifference>& difference = by_held_out_ ? row.held_out : row.training;
    const double bound = rehearsal_.bound;
    if (baseline_is_evaluated_ && !row.held_out)
      return set(row, RecipeVerdict::DoesNotHold, "its held-out loss is not finite");
    if (!difference || !difference->half_width)
      return set(row, RecipeVerdict::CannotTell,
                 "the last third has " + counted(rehearsal_.steps - first_step_ + 1, "step") + ", and " +
                     std::to_string(report::kLeastValues) + " are needed: --steps " +
                     std::to_string(3 * report::kLeastValues) + " or more");
    // A comparison with NaN is false, and would pass for an interval below the bound.
    if (!std::isfinite(difference->low()) || !std::isfinite(difference->high()) ||
        (row.held_out && !std::isfinite(row.held_out->mean)))
      return set(row, RecipeVerdict::CannotTell,
                 "a difference is a share of " + rehearsal_.recipes.front().name + "'s loss, which is 0");
    const std::string found =
        (by_held_out_ ? "held-out loss " : "training loss ") + difference_text(*difference);
    if (difference->low() > bound)
      return set(row, RecipeVerdict::DoesNotHold,
                 found + ", all of it beyond the bound of " + percent(bound));
    if (difference->high() >= bound)
      return set(row, RecipeVerdict::CannotTell,
                 found + ", which contains the bound of " + percent(bound) +
                     ": more --steps or more --seeds would decide");
    // One seed has one held-out difference, without an interval: not enough to refuse, too much to pass over.
    if (row.held_out && !row.held_out->half_width && row.held_out->mean >= bound)
      return set(row, RecipeVerdict::CannotTell,
                 found + ", within the bound, but the held-out loss " + difference_text(*row.held_out) +
                     ", beyond it: --seeds 4 would decide");
    set(row, RecipeVerdict::Holds, found + ", below the bound of " + percent(bound));
  }

  const Rehearsal& rehearsal_;
  const RehearsedRecipe& baseline_;
  int64_t first_step_;
  bool by_held_out_, baseline_is_evaluated_;
};

/// What is compared to find the cheapest.
std::optional<double> cost_of(const Rehearsal& rehearsal, const RehearsalJudgement& judgement, size_t index) {
  if (!rehearsal.device.empty()) return rehearsal.recipes[index].forecast_seconds;
  const int64_t bytes = judgement.rows[index].peak_bytes;
  return bytes > 0 ? std::optional(static_cast<double>(bytes)) : std::nullopt;
}

/// Of the cheapest within kTie, the first as they were given: simpler recipes stand before others.
std::optional<size_t> cheapest_that_holds(const Rehearsal& rehearsal, const RehearsalJudgement& judgement) {
  std::optional<double> least;
  const auto candidate = [&](size_t i) -> std::optional<double> {
    const RecipeVerdict verdict = judgement.rows[i].verdict;
    if (verdict != RecipeVerdict::Holds && verdict != RecipeVerdict::Baseline) return {};
    return cost_of(rehearsal, judgement, i);
  };
  for (size_t i = 0; i < judgement.rows.size(); ++i)
    if (const auto cost = candidate(i)) least = std::min(least.value_or(*cost), *cost);
  if (!least) return {};
  for (size_t i = 0; i < judgement.rows.size(); ++i)
    if (const auto cost = candidate(i); cost && *cost <= *least * (1 + kTie)) return i;
  return {};
}

std::string names_with(const RehearsalJudgement& judgement, RecipeVerdict verdict) {
  std::vector<std::string> names;
  for (const RecipeRow& row : judgement.rows)
    if (row.verdict == verdict) names.push_back(row.name);
  std::string text;
  for (size_t i = 0; i < names.size(); ++i)
    text += (i == 0 ? std::string() : std::string(i + 1 == names.size() ? " and " : ", ")) + names[i];
  return text;
}

std::string cost_sentence(const Rehearsal& rehearsal, const RehearsalJudgement& judgement, size_t index) {
  const double cost = *cost_of(rehearsal, judgement, index);
  const auto baseline = cost_of(rehearsal, judgement, 0);
  const auto text = [&](double value) {
    return rehearsal.device.empty() ? bytes_text(value) : duration(value);
  };
  std::string sentence =
      rehearsal.device.empty()
          ? "its peak memory, " + text(cost) + " as measured here, is the least"
          : "a step of it on " + rehearsal.device + " is forecast to take " + text(cost) + ", the least";
  sentence += " of those that hold";
  if (index > 0 && baseline) sentence += " (" + rehearsal.recipes.front().name + ": " + text(*baseline) + ")";
  return sentence;
}

/// Of what would cost less and is not known to hold.
std::string open_question(const Rehearsal& rehearsal, const RehearsalJudgement& judgement) {
  const double chosen = *cost_of(rehearsal, judgement, *judgement.recommended);
  const std::string open = names_with(judgement, RecipeVerdict::CannotTell);
  for (size_t i = 0; i < judgement.rows.size(); ++i) {
    const auto cost = cost_of(rehearsal, judgement, i);
    if (judgement.rows[i].verdict == RecipeVerdict::CannotTell && cost && *cost < chosen * (1 - kTie))
      return "; whether " + open + (open.find(" and ") == open.npos ? " holds" : " hold") +
             ", this rehearsal cannot tell";
  }
  return "";
}

std::string recommendation(const Rehearsal& rehearsal, const RehearsalJudgement& judgement) {
  const std::string& baseline = rehearsal.recipes.front().name;
  if (judgement.rows.front().verdict != RecipeVerdict::Baseline)
    return "No recipe can be recommended: " + baseline + " itself, the baseline, " +
           judgement.rows.front().why + "; fix that first, for instance with a lower optimizer.lr.";
  if (!judgement.recommended)
    return "No recipe can be recommended: no cost is known, neither a forecast nor measured memory; give "
           "--device.";
  const RecipeRow& row = judgement.rows[*judgement.recommended];
  const std::string cost = cost_sentence(rehearsal, judgement, *judgement.recommended);
  const std::string open = open_question(rehearsal, judgement);
  if (*judgement.recommended == 0) {
    const std::string holding = names_with(judgement, RecipeVerdict::Holds);
    return "Stay with " + baseline + ": " +
           (holding.empty()
                ? "no other recipe is shown to hold within " + percent(rehearsal.bound) + " of its loss"
                : cost) +
           open + ".";
  }
  return "Take " + row.name + ": " + cost + ", and after " + counted(rehearsal.steps, "step") +
         " it holds: " + row.why + open + ".";
}

std::string meaning_of(const Rehearsal& rehearsal, const RehearsalJudgement& judgement) {
  const int64_t seeds = std::ssize(rehearsal.recipes.front().runs);
  if (seeds > 1)
    return "Intervals are 95% ones over " + counted(seeds, "seed") +
           ", by Student's t of the differences seed by seed: what a further seed would be expected to find "
           "on average.";
  return "Intervals are 95% ones of the mean difference of training losses over steps " +
         with_commas(judgement.first_step) + " to " + with_commas(rehearsal.steps) +
         " of this one seed, with neighbouring steps combined because they are correlated: they say how "
         "certain this run is, and nothing about other seeds.";
}

}  // namespace

std::string_view to_string(RecipeVerdict verdict) {
  switch (verdict) {
    case RecipeVerdict::Baseline:
      return "baseline";
    case RecipeVerdict::Holds:
      return "holds";
    case RecipeVerdict::DoesNotHold:
      return "does not hold";
    case RecipeVerdict::CannotTell:
      return "cannot tell";
    case RecipeVerdict::NotRun:
      return "not run";
  }
  return "unknown";
}

std::string difference_text(const PairedDifference& difference) {
  const auto signed_percent = [](double share) {
    char text[64];
    std::snprintf(text, sizeof text, "%+.3f%%", 100 * share);
    return std::string(text);
  };
  std::string text = signed_percent(difference.mean);
  if (difference.half_width)
    text += " (" + signed_percent(difference.low()) + " to " + signed_percent(difference.high()) + ")";
  return text;
}

RehearsalJudgement judge(const Rehearsal& rehearsal) {
  HALFSTEP_CHECK(!rehearsal.recipes.empty() && !rehearsal.recipes.front().runs.empty(),
                 "rehearse: the baseline has no run to compare with.");
  const RehearsedRecipe& baseline = rehearsal.recipes.front();
  for (const RehearsedRecipe& recipe : rehearsal.recipes)
    HALFSTEP_CHECK(recipe.runs.empty() || recipe.runs.size() == baseline.runs.size(),
                   "rehearse: ", recipe.name, " has ", recipe.runs.size(), " runs and ", baseline.name,
                   " has ", baseline.runs.size(), "; each needs one for each seed.");
  RehearsalJudgement judgement;
  judgement.first_step = rehearsal.steps - rehearsal.steps / 3 + 1;
  for (const RehearsedRecipe& recipe : rehearsal.recipes)
    judgement.rows.push_back(measured(recipe, rehearsal.steps, judgement.first_step));
  judgement.by_held_out = baseline.runs.size() > 1 && judgement.rows.front().held_out_loss.has_value();
  judgement.meaning = meaning_of(rehearsal, judgement);

  RecipeRow& first = judgement.rows.front();
  first.verdict = RecipeVerdict::Baseline;
  for (const RunHistory& run : baseline.runs) {
    std::string fault = lost_sentence(run, rehearsal.steps, judgement.first_step);
    if (fault.empty() && !is_complete(run, rehearsal.steps)) fault = "has not taken all its steps";
    if (fault.empty()) continue;
    first.verdict = RecipeVerdict::DoesNotHold;
    first.why = fault;
  }
  const Judge against(rehearsal, judgement);
  for (size_t i = 1; i < judgement.rows.size(); ++i) {
    if (first.verdict == RecipeVerdict::Baseline)
      against.decide(rehearsal.recipes[i], judgement.rows[i]);
    else
      judgement.rows[i].why = "there is no baseline to compare with";
  }
  judgement.recommended = cheapest_that_holds(rehearsal, judgement);
  judgement.recommendation = recommendation(rehearsal, judgement);
  return judgement;
}

}  // namespace halfstep
