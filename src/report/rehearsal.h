// Which precision a run can be trained in: the same seeds and batches under several recipes, each judged
// against FP32. docs/rehearse.md tells how. Knows no Torch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "report/run_report.h"

namespace halfstep {

/// What became of one recipe.
struct RehearsedRecipe {
  std::string name;  ///< a word of precision.compute: "mxfp8"
  std::vector<RunHistory>
      runs{};                 ///< one for each seed, the same order in every recipe; none if it cannot run
  std::string why_not_run{};  ///< one sentence, if there are none
  /// This machine computes it in FP32 and rounds: what a step takes here says nothing of other machines.
  bool emulated = false;
  std::optional<double> forecast_seconds{};  ///< of a step on Rehearsal::device
  std::optional<double> forecast_bytes{};    ///< of its memory at the peak of a step
  std::string why_no_forecast{};             ///< one sentence: the device has no such products, for instance
};

/// All runs of a rehearsal.
struct Rehearsal {
  std::string name;                        ///< of what is rehearsed, for headings: "tiny"
  int64_t steps = 0;                       ///< of each run
  double bound = 0.005;                    ///< share of FP32's loss that a recipe may cost
  std::string device{};                    ///< that times are forecast for; empty: none
  std::vector<RehearsedRecipe> recipes{};  ///< the baseline first
};

enum class RecipeVerdict {
  Baseline,
  Holds,        ///< the interval of its difference ends below the bound
  DoesNotHold,  ///< the interval begins above the bound, or the run diverged
  CannotTell,   ///< the interval contains the bound, or there is none
  NotRun,
};

/// "baseline", "holds", "does not hold", "cannot tell", "not run".
std::string_view to_string(RecipeVerdict verdict);

/// Of a recipe's loss less the baseline's, as a share of the baseline's.
struct PairedDifference {
  double mean = 0.0;
  std::optional<double> half_width{};  ///< of the 95% interval; none of a single number

  double low() const { return mean - half_width.value_or(0.0); }
  double high() const { return mean + half_width.value_or(0.0); }
};

struct RecipeRow {
  std::string name;
  RecipeVerdict verdict = RecipeVerdict::CannotTell;
  std::string why;                             ///< one sentence with the figures that decided
  std::optional<double> training_loss{};       ///< mean over the last third of the steps, and over seeds
  std::optional<double> held_out_loss{};       ///< after the last step, mean over seeds
  std::optional<PairedDifference> training{};  ///< from the baseline; none of the baseline itself
  std::optional<PairedDifference> held_out{};
  int64_t peak_bytes = 0;        ///< measured, the most of any step; 0 if not measured
  int64_t activation_bytes = 0;  ///< of those, what forward makes and keeps for backward, at its own highest
  std::optional<double> seconds_per_step{};  ///< measured here, median; none of an emulated recipe
  int64_t skipped = 0;                       ///< steps, of all seeds
};

struct RehearsalJudgement {
  int64_t first_step = 0;               ///< of the last third, over which training losses are compared
  bool by_held_out = false;             ///< what verdicts go by; else training losses
  std::string meaning;                  ///< one sentence: where the intervals come from
  std::vector<RecipeRow> rows{};        ///< by recipe
  std::optional<size_t> recommended{};  ///< a row
  std::string recommendation;           ///< one sentence, with figures
};

/// The runs' logs must hold every step (log.every = 1). Without a finished baseline nothing is recommended.
[[nodiscard]] RehearsalJudgement judge(const Rehearsal& rehearsal);

/// "+0.012% (-0.031% to +0.055%)": without the brackets where there is no interval.
std::string difference_text(const PairedDifference& difference);

/// One page with everything in it, as report_html makes it. At most 8 recipes: so many colours can be told
/// apart.
inline constexpr size_t kMostRehearsedRecipes = 8;
[[nodiscard]] std::string rehearsal_html(const Rehearsal& rehearsal, const RehearsalJudgement& judgement);

}  // namespace halfstep
