#include <halfstep/error.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "report/figures.h"
#include "report/html.h"
#include "report/plot.h"
#include "report/rehearsal.h"
#include "words/numbers.h"

namespace halfstep {
namespace {

using namespace report;

constexpr int64_t kSmoothedParts = 50;

int colour_of(size_t recipe) { return static_cast<int>(recipe) + 1; }

/// The mean over seeds, at the steps that all of them have; `value` gets the recipe's record and the
/// baseline's of the same seed and step.
std::vector<Point> mean_curve(const RehearsedRecipe& recipe, const RehearsedRecipe& baseline, auto value) {
  std::map<int64_t, std::pair<size_t, double>> sums;
  for (size_t seed = 0; seed < recipe.runs.size(); ++seed) {
    std::map<int64_t, double> reference;
    for (const StepRecord& record : baseline.runs[seed].steps) reference[record.step] = record.loss;
    for (const StepRecord& record : recipe.runs[seed].steps) {
      const auto same_step = reference.find(record.step);
      if (same_step == reference.end()) continue;
      auto& [count, sum] = sums[record.step];
      ++count;
      sum += value(record.loss, same_step->second);
    }
  }
  std::vector<Point> points;
  for (const auto& [step, counted_sum] : sums)
    if (counted_sum.first == recipe.runs.size())
      points.push_back({.step = step, .value = counted_sum.second / static_cast<double>(counted_sum.first)});
  return points;
}

std::vector<Point> mean_evaluations(const RehearsedRecipe& recipe) {
  std::map<int64_t, std::pair<size_t, double>> sums;
  for (const RunHistory& run : recipe.runs)
    for (const Point& point : evaluation_points(run)) {
      ++sums[point.step].first;
      sums[point.step].second += point.value;
    }
  std::vector<Point> points;
  for (const auto& [step, counted_sum] : sums)
    if (counted_sum.first == recipe.runs.size())
      points.push_back({.step = step, .value = counted_sum.second / static_cast<double>(counted_sum.first)});
  return points;
}

std::string smoothing_text(const Rehearsal& rehearsal) {
  const int64_t window = rehearsal.steps / kSmoothedParts | 1;
  return window > 1 ? ", smoothed over " + counted(window, "step") : "";
}

Series curve_of(const Rehearsal& rehearsal, size_t recipe, const std::vector<Point>& points) {
  return smooth_series(rehearsal.recipes[recipe].name, colour_of(recipe), points,
                       rehearsal.steps / kSmoothedParts | 1);
}

std::string over_seeds_text(const Rehearsal& rehearsal) {
  const int64_t seeds = std::ssize(rehearsal.recipes.front().runs);
  return seeds > 1 ? ", mean of " + counted(seeds, "seed") : "";
}

Plot plot_over_steps(const Rehearsal& rehearsal, const std::string& title) {
  return {.title = title, .wide = true, .first_step = 1, .last_step = rehearsal.steps};
}

std::string loss_plot(const Rehearsal& rehearsal) {
  Plot plot = plot_over_steps(rehearsal, "Loss");
  plot.unit = "nats, cross-entropy" + over_seeds_text(rehearsal);
  plot.caption = "Lines: training" + smoothing_text(rehearsal) + ". Dots: held out.";
  std::vector<Series> dots;
  for (size_t i = 0; i < rehearsal.recipes.size(); ++i) {
    const RehearsedRecipe& recipe = rehearsal.recipes[i];
    const auto points =
        mean_curve(recipe, rehearsal.recipes.front(), [](double loss, double) { return loss; });
    if (points.empty()) continue;
    plot.series.push_back(curve_of(rehearsal, i, points));
    auto held_out = mean_evaluations(recipe);
    std::erase_if(held_out, [](const Point& point) { return point.step < 1; });
    if (!held_out.empty())
      dots.push_back({.name = recipe.name + ", held out",
                      .colour = colour_of(i),
                      .drawn = Drawn::Dots,
                      .points = std::move(held_out),
                      .in_legend = false});
  }
  plot.series.insert(plot.series.end(), dots.begin(), dots.end());
  return plot_html(plot);
}

/// `shown` says which rows.
std::string difference_plot(const Rehearsal& rehearsal, const std::string& title, auto shown) {
  Plot plot = plot_over_steps(rehearsal, title);
  plot.unit =
      "% of its training loss at the same step" + smoothing_text(rehearsal) + over_seeds_text(rehearsal);
  plot.guides = {0.0, 100 * rehearsal.bound};
  plot.caption = "Dashed: no difference, and the bound of " + percent(rehearsal.bound) + ".";
  for (size_t i = 1; i < rehearsal.recipes.size(); ++i) {
    if (!shown(i)) continue;
    const auto points = mean_curve(
        rehearsal.recipes[i], rehearsal.recipes.front(),
        [](double loss, double reference) { return 100 * (loss - reference) / std::abs(reference); });
    if (!points.empty()) plot.series.push_back(curve_of(rehearsal, i, points));
  }
  return plot.series.empty() ? "" : plot_html(plot);
}

std::string place_text(double share) { return digits(share, 5); }

/// Each recipe's interval on one axis, with the bound: what the verdicts go by.
std::string interval_figure(const Rehearsal& rehearsal, const RehearsalJudgement& judgement) {
  std::vector<std::pair<size_t, PairedDifference>> found;
  for (size_t i = 0; i < judgement.rows.size(); ++i)
    if (const auto& difference =
            judgement.by_held_out ? judgement.rows[i].held_out : judgement.rows[i].training)
      found.emplace_back(i, *difference);
  if (found.empty()) return "";
  double low = 0.0, high = 100 * rehearsal.bound;
  for (const auto& [row, difference] : found) {
    low = std::min(low, 100 * difference.low());
    high = std::max(high, 100 * difference.high());
  }
  const Axis axis = axis_around(AxisKind::Linear, low, high, /*from_zero=*/false);
  const double row_share = 1.0 / static_cast<double>(found.size());
  const auto across = [&](double value) { return place_text(1000 * axis.place(value)); };
  const auto upright = [&](double value, const char* style) {
    return "<path class=\"" + std::string(style) + "\" d=\"M" + across(value) + " 0V1000\"/>\n";
  };
  std::string names, drawing;
  for (const Tick& tick : axis.ticks) drawing += upright(tick.value, "grid");
  drawing += upright(0.0, "resumed") + upright(100 * rehearsal.bound, "mark");
  for (size_t k = 0; k < found.size(); ++k) {
    const auto& [row, difference] = found[k];
    const double middle = (static_cast<double>(k) + 0.5) * row_share;
    const std::string colour = " c" + std::to_string(colour_of(row)), y = place_text(1000 * middle);
    names += "<span style=\"bottom:" + place_text(100 * (1 - middle)) + "%\">" +
             escaped(judgement.rows[row].name) + "</span>";
    drawing += "<path class=\"line" + colour + "\" d=\"M" + across(100 * difference.low()) + " " + y + "H" +
               across(100 * difference.high()) + "\"/>\n<path class=\"dots" + colour + "\" d=\"M" +
               across(100 * difference.mean) + " " + y + "h0\"/>\n";
  }
  std::string ticks;
  for (const Tick& tick : axis.ticks)
    ticks +=
        "<span style=\"left:" + place_text(100 * axis.place(tick.value)) + "%\">" + tick.label + "</span>";
  const std::string loss = judgement.by_held_out ? "held-out loss" : "training loss, last third";
  return "<figure class=\"plot wide\"><figcaption><h3>Difference from " +
         escaped(rehearsal.recipes.front().name) + " <span class=\"unit\">" + loss + ", % of " +
         escaped(rehearsal.recipes.front().name) +
         "'s, with its 95% interval</span></h3></figcaption><div class=\"frame\" "
         "style=\"grid-template-columns:92px minmax(0,1fr);grid-template-rows:" +
         std::to_string(34 * found.size()) + "px 22px\"><div class=\"y\">" + names +
         "</div><div class=\"box\"><svg viewBox=\"0 0 1000 1000\" preserveAspectRatio=\"none\" role=\"img\" "
         "xmlns=\"http://www.w3.org/2000/svg\" aria-label=\"Intervals of the differences\">\n" +
         drawing + "</svg></div><div class=\"corner\">%</div><div class=\"x\">" + ticks +
         "</div></div>\n<p class=\"note\">Dashed: no difference. Red: the bound of " +
         percent(rehearsal.bound) + "; intervals to the left of it hold.</p></figure>\n";
}

std::string pill(RecipeVerdict verdict) {
  const char* const kind = verdict == RecipeVerdict::Holds         ? "good"
                           : verdict == RecipeVerdict::DoesNotHold ? "bad"
                           : verdict == RecipeVerdict::CannotTell  ? "fair"
                                                                   : "open";
  return "<span class=\"outcome nowrap " + std::string(kind) + "\">" + std::string(to_string(verdict)) +
         "</span>";
}

Cell number(const std::optional<double>& value) {
  return {.html = value ? digits(*value, 5) : "–", .number = true};
}

Cell difference_cell(const std::optional<PairedDifference>& difference) {
  if (!difference) return {.html = "–", .number = true};
  return {.html = difference->half_width
                      ? with_uncertainty(100 * difference->mean, 100 * *difference->half_width) + "%"
                      : difference_text(*difference),
          .number = true};
}

/// With what it is of the baseline's.
Cell bytes_cell(double bytes, double baseline) {
  if (bytes <= 0) return {.html = "–", .number = true};
  return {
      .html = bytes_text(bytes) + (baseline > 0 && bytes != baseline
                                       ? " <span class=\"quiet\">" +
                                             std::to_string(std::lround(100 * bytes / baseline)) + "%</span>"
                                       : ""),
      .number = true};
}

std::string recipe_table(const Rehearsal& rehearsal, const RehearsalJudgement& judgement) {
  const bool skips =
      std::ranges::any_of(judgement.rows, [](const RecipeRow& row) { return row.skipped > 0; });
  const bool forecasts = !rehearsal.device.empty();
  std::vector<std::string> headings = {"recipe",        "verdict",    "held-out loss", "difference",
                                       "training loss", "difference", "peak memory",   "activations"};
  if (skips) headings.push_back("skipped");
  headings.push_back(forecasts ? "step on " + escaped(rehearsal.device) : "step here");
  const RecipeRow& first = judgement.rows.front();
  std::vector<std::vector<Cell>> rows;
  for (size_t i = 0; i < judgement.rows.size(); ++i) {
    const RecipeRow& row = judgement.rows[i];
    const RehearsedRecipe& recipe = rehearsal.recipes[i];
    std::vector<Cell> cells = {
        {.html = "<span class=\"nowrap\"><span class=\"swatch c" + std::to_string(colour_of(i)) +
                 "\"></span>" + escaped(row.name) + "</span>"},
        {.html = pill(row.verdict)},
        number(row.held_out_loss),
        difference_cell(row.held_out),
        number(row.training_loss),
        difference_cell(row.training),
        bytes_cell(static_cast<double>(row.peak_bytes), static_cast<double>(first.peak_bytes)),
        bytes_cell(static_cast<double>(row.activation_bytes), static_cast<double>(first.activation_bytes))};
    if (skips) cells.push_back({.html = with_commas(row.skipped), .number = true});
    const auto& seconds = forecasts ? recipe.forecast_seconds : row.seconds_per_step;
    cells.push_back({.html = seconds                         ? duration(*seconds)
                             : !forecasts && recipe.emulated ? "emulated"
                                                             : "–",
                     .number = true});
    rows.push_back(std::move(cells));
  }
  return table(headings, rows);
}

/// Paragraphs, not a table: sentences have to wrap on a telephone.
std::string reasons(const Rehearsal& rehearsal, const RehearsalJudgement& judgement) {
  std::string html = "<section><h2>Why</h2>";
  for (size_t i = 1; i < judgement.rows.size(); ++i) {
    const RecipeRow& row = judgement.rows[i];
    const std::string& no_forecast = rehearsal.recipes[i].why_no_forecast;
    html += "<p><b>" + escaped(row.name) + "</b> " + pill(row.verdict) + " " + bounded(row.why, 1000) +
            (no_forecast.empty() ? "" : ". No forecast: " + bounded(no_forecast, 500)) + "</p>\n";
  }
  return html + "</section>\n";
}

std::string notes(const Rehearsal& rehearsal, const RehearsalJudgement& judgement) {
  std::string emulated;
  for (const RehearsedRecipe& recipe : rehearsal.recipes)
    if (recipe.emulated) emulated += (emulated.empty() ? "" : ", ") + escaped(recipe.name);
  return "<p class=\"note\">" + escaped(judgement.meaning) + " A recipe holds if its interval ends below " +
         percent(rehearsal.bound) + " of " + escaped(rehearsal.recipes.front().name) +
         "'s loss, and does not if it begins above. Training loss: mean of steps " +
         with_commas(judgement.first_step) + " to " + with_commas(rehearsal.steps) +
         ". Memory: measured, the highest of any step, and its share of the baseline's; activations are what "
         "forward "
         "makes and keeps for backward." +
         (emulated.empty() ? ""
                           : " Emulated here: " + emulated +
                                 ". This machine computes them in FP32 and rounds, so that their losses are "
                                 "right and their time here says nothing.") +
         (rehearsal.device.empty() ? ""
                                   : " Steps on " + escaped(rehearsal.device) +
                                         " are forecast, not measured (docs/forecast.md).") +
         "</p>";
}

std::string configuration(const Rehearsal& rehearsal) {
  return "<section><h2>What was rehearsed</h2><details><summary>Configuration of " +
         escaped(rehearsal.recipes.front().name) + ", first seed</summary><pre class=\"configuration\">" +
         bounded(rehearsal.recipes.front().runs.front().sittings.back().header.configuration, 20000) +
         "</pre></details></section>\n";
}

}  // namespace

std::string rehearsal_html(const Rehearsal& rehearsal, const RehearsalJudgement& judgement) {
  HALFSTEP_CHECK(rehearsal.recipes.size() <= kMostRehearsedRecipes, "rehearse: ", rehearsal.recipes.size(),
                 " recipes in one page; at most ", kMostRehearsedRecipes,
                 " can be told apart. Rehearse fewer.");
  // One recipe that is far off would press all others onto the zero line.
  const auto is_near = [&](size_t i) {
    const auto& difference = judgement.rows[i].training;
    return difference && std::abs(difference->mean) <= 4 * rehearsal.bound;
  };
  const auto all = [](size_t) { return true; };
  bool some_are_far = false;
  for (size_t i = 1; i < judgement.rows.size(); ++i)
    some_are_far = some_are_far || (!is_near(i) && !rehearsal.recipes[i].runs.empty());
  const std::string from = "Difference from " + rehearsal.recipes.front().name;
  const std::string seeds = counted(std::ssize(rehearsal.recipes.front().runs), "seed");
  const std::string body =
      "<main>\n<header><div class=\"headline\"><h1>Rehearsal of " + escaped(rehearsal.name) +
      "</h1></div>\n<p class=\"trained\">" + counted(std::ssize(rehearsal.recipes), "recipe") + ", " +
      counted(rehearsal.steps, "step") + ", " + seeds +
      "; every recipe has the same first weights and batches</p>" + "<p class=\"verdict\">" +
      escaped(judgement.recommendation) + "</p></header>\n<section class=\"compared\">" +
      recipe_table(rehearsal, judgement) + notes(rehearsal, judgement) +
      "</section>\n<section><div class=\"plots\">" + interval_figure(rehearsal, judgement) +
      loss_plot(rehearsal) + difference_plot(rehearsal, from + " over steps", all) +
      (some_are_far ? difference_plot(rehearsal, from + ", those that are near", is_near) : "") +
      "</div></section>\n" + reasons(rehearsal, judgement) + configuration(rehearsal) +
      "<footer>Made by Halfstep " HALFSTEP_VERSION " from the runs' log.jsonl.</footer>\n</main>\n";
  return page("Rehearsal of " + rehearsal.name + " – Halfstep", body);
}

}  // namespace halfstep
