#include "cli/report_json.h"

#include <cmath>

namespace halfstep::cli {
namespace {

using nlohmann::ordered_json;

ordered_json number(const std::optional<double>& value) {
  if (!value) return nullptr;
  if (std::isfinite(*value)) return *value;
  return std::isnan(*value) ? "NaN" : *value > 0 ? "Infinity" : "-Infinity";
}

ordered_json json_of(const LossDifference& difference) {
  const bool known = difference.likeness != Likeness::NotFinite && difference.likeness != Likeness::TooShort;
  return {{"likeness", to_string(difference.likeness)},
          {"identical", difference.identical},
          {"paired", difference.paired},
          {"why_unpaired", difference.why_unpaired},
          {"steps", difference.steps},
          {"mean", known ? number(difference.mean) : nullptr},
          {"half_width", known ? number(difference.half_width) : nullptr},
          {"margin", known ? number(difference.margin) : nullptr}};
}

}  // namespace

ordered_json json_of(const RunSummary& summary) {
  return {{"trained", summary.trained},
          {"planned_steps", summary.planned_steps},
          {"last_step", summary.last_step},
          {"seconds", summary.seconds},
          {"tokens", summary.tokens},
          {"first_loss", number(summary.first_loss)},
          {"final_loss", number(summary.final_loss)},
          {"final_steps", summary.final_steps},
          {"evaluation_loss", number(summary.evaluation_loss)},
          {"accuracy", number(summary.accuracy)},
          {"tokens_per_second", number(summary.tokens_per_second)},
          {"share_of_peak", number(summary.share_of_peak)},
          {"stalled_share", number(summary.stalled_share)},
          {"skipped", summary.skipped},
          {"not_finite", summary.not_finite},
          {"peak_bytes", summary.peak_bytes},
          {"verdict", summary.verdict}};
}

ordered_json json_of(const RunComparison& comparison) {
  ordered_json rows = ordered_json::array(), pairs = ordered_json::array();
  for (const auto& row : comparison.rows) {
    ordered_json one = {{"run", row.name},
                        {"final_loss", number(row.final_loss)},
                        {"not_finite", row.not_finite},
                        {"evaluation_loss", number(row.evaluation_loss)},
                        {"evaluation_step", row.evaluation_step},
                        {"tokens_per_second", number(row.summary.tokens_per_second)},
                        {"peak_bytes", row.summary.peak_bytes},
                        {"skipped", row.summary.skipped},
                        {"last_step", row.summary.last_step}};
    rows.push_back(std::move(one));
  }
  size_t next = 0;
  for (size_t i = 0; i < comparison.rows.size(); ++i)
    for (size_t k = i + 1; k < comparison.rows.size(); ++k) {
      ordered_json pair = {{"run", comparison.rows[k].name}, {"from", comparison.rows[i].name}};
      pair.update(json_of(comparison.pairs[next++]));
      pairs.push_back(std::move(pair));
    }
  return {{"sentence", comparison.sentence},
          {"first_step", comparison.first_step},
          {"last_step", comparison.last_step},
          {"margin", RunComparison::kMargin},
          {"runs", rows},
          {"pairs", pairs}};
}

}  // namespace halfstep::cli
