#include "report/shadow.h"

#include <halfstep/error.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "report/html.h"
#include "words/numbers.h"

namespace halfstep {
namespace {

using namespace report;

/// A layer is suggested where it suffers so many times more than the middle one does.
constexpr double kManyTimes = 2;

double median_of(std::vector<double> values) {
  std::ranges::sort(values);
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

struct Squares {
  double output = 0, input_grad = 0, weight_grad = 0, forward_noise = 0, backward_noise = 0;
  int64_t count = 0;
};

ShadowCell cell_of(const Squares& sums) {
  const auto root = [&](double sum) { return std::sqrt(sum / static_cast<double>(sums.count)); };
  return {.output_error = root(sums.output),
          .input_grad_error = root(sums.input_grad),
          .weight_grad_error = root(sums.weight_grad),
          .effect = std::hypot(root(sums.forward_noise), root(sums.backward_noise))};
}

/// Which layers to keep high, and for a precision in which none is finite that it does not suit the model.
void suggest(ShadowFindings& findings, size_t precision) {
  std::vector<double> effects, errors;
  for (const ShadowLayer& layer : findings.layers)
    if (const auto& cell = layer.cells[precision];
        cell && std::isfinite(cell->effect + cell->worst_error())) {
      effects.push_back(cell->effect);
      errors.push_back(cell->worst_error());
    }
  for (ShadowLayer& layer : findings.layers) {
    auto& cell = layer.cells[precision];
    if (!cell) continue;
    const auto exceeds = [&](double value, const std::vector<double>& all, const char* what) {
      if (all.size() < 3 || !(value > kManyTimes * median_of(all))) return;
      cell->why =
          detail::concat(what, " is ", short_digits(value / median_of(all), 2), " times the middle layer's");
    };
    exceeds(cell->worst_error(), errors, "its largest error");
    exceeds(cell->effect, effects, "its effect");
    if (!std::isfinite(cell->effect + cell->worst_error())) cell->why = "its products are not finite";
    cell->keep_high = !cell->why.empty();
  }
  if (!errors.empty()) return;
  findings.unsuited[precision] = "its products are not finite in any layer";
  for (ShadowLayer& layer : findings.layers)
    if (auto& cell = layer.cells[precision]) cell->keep_high = false;
}

std::string error_text(double value) { return std::isfinite(value) ? percent(value) : "not finite"; }

/// The share of the colour that says how bad it is: a tenth of a percent is none, all of the value is full.
std::string shade(double value) {
  const double strength =
      std::isfinite(value) ? std::clamp(1 + std::log10(std::max(value, 1e-9)) / 3, 0.0, 1.0) : 1;
  return " style=\"background:color-mix(in srgb,var(--c2) " + short_digits(std::round(60 * strength), 3) +
         "%,transparent);padding-left:6px;padding-right:6px\"";
}

std::string layers_table(const ShadowFindings& findings, size_t precision) {
  std::vector<std::vector<Cell>> rows;
  std::vector<std::pair<double, size_t>> order;
  for (size_t i = 0; i < findings.layers.size(); ++i)
    if (const auto& cell = findings.layers[i].cells[precision])
      order.emplace_back(std::isfinite(cell->effect) ? -cell->effect : -HUGE_VAL, i);
  std::ranges::sort(order);
  for (const auto& [less, i] : order) {
    const ShadowCell& cell = *findings.layers[i].cells[precision];
    const auto number = [](double value) {
      return Cell{.html = "<span" + shade(value) + ">" + error_text(value) + "</span>", .number = true};
    };
    rows.push_back(
        {{.html = bounded(findings.layers[i].name, 200)},
         {.html = std::isfinite(cell.effect) ? short_digits(cell.effect, 3) : "not finite", .number = true},
         number(cell.output_error),
         number(cell.input_grad_error),
         number(cell.weight_grad_error),
         {.html = cell.keep_high ? "keep high: " + bounded(cell.why, 300) : "follows the recipe"}});
  }
  return table({"layer", "effect, nats", "output error", "input gradient", "weight gradient", "suggestion"},
               rows);
}

}  // namespace

double ShadowCell::worst_error() const {
  // A NaN is the worst.
  double worst = 0;
  for (const double error : {output_error, input_grad_error, weight_grad_error})
    worst = std::isnan(error) || std::isnan(worst) ? NAN : std::max(worst, error);
  return worst;
}

std::vector<std::string> ShadowFindings::keep_high(size_t precision) const {
  std::vector<std::string> names;
  for (const ShadowLayer& layer : layers)
    if (layer.cells[precision] && layer.cells[precision]->keep_high) names.push_back(layer.name);
  std::ranges::sort(names);
  return names;
}

ShadowFindings shadow_findings(const RunHistory& run) {
  ShadowFindings findings{.steps = run.steps.empty() ? 0 : run.steps.back().step};
  std::map<std::string, std::map<std::string, Squares>> sums;  // by layer and precision
  std::set<int64_t> looks;
  for (const ShadowRecord& record : run.shadows) {
    looks.insert(record.step);
    if (std::ranges::find(findings.precisions, record.precision) == findings.precisions.end())
      findings.precisions.push_back(record.precision);
    Squares& sum = sums[record.layer][record.precision];
    const auto add = [](double& squares, double value) { squares += value * value; };
    add(sum.output, record.output_error);
    add(sum.input_grad, record.input_grad_error);
    add(sum.weight_grad, record.weight_grad_error);
    add(sum.forward_noise, record.forward_noise);
    add(sum.backward_noise, record.backward_noise);
    ++sum.count;
  }
  findings.looks = std::ssize(looks);
  for (const auto& [name, by_precision] : sums) {
    ShadowLayer layer{.name = name,
                      .cells = std::vector<std::optional<ShadowCell>>(findings.precisions.size())};
    for (size_t i = 0; i < findings.precisions.size(); ++i)
      if (const auto found = by_precision.find(findings.precisions[i]); found != by_precision.end())
        layer.cells[i] = cell_of(found->second);
    findings.layers.push_back(std::move(layer));
  }
  // By how much worse than the middle layer it is, where it is the worst; what is not finite, first.
  std::vector<double> middle(findings.precisions.size(), 1);
  for (size_t i = 0; i < middle.size(); ++i) {
    std::vector<double> effects;
    for (const ShadowLayer& layer : findings.layers)
      if (layer.cells[i] && std::isfinite(layer.cells[i]->effect)) effects.push_back(layer.cells[i]->effect);
    if (!effects.empty()) middle[i] = std::max(median_of(effects), 1e-300);
  }
  const auto badness = [&](const ShadowLayer& layer) {
    double most = 0;
    for (size_t i = 0; i < middle.size(); ++i)
      if (layer.cells[i])
        most = std::isfinite(layer.cells[i]->effect) ? std::max(most, layer.cells[i]->effect / middle[i])
                                                     : HUGE_VAL;
    return most;
  };
  std::ranges::sort(findings.layers, {},
                    [&](const ShadowLayer& layer) { return std::pair(-badness(layer), layer.name); });
  findings.unsuited.resize(findings.precisions.size());
  for (size_t i = 0; i < findings.precisions.size(); ++i)
    if (findings.precisions[i] != "bf16" && findings.precisions[i] != "fp16") suggest(findings, i);
  return findings;
}

std::string shadow_html(const std::string& name, const RunHistory& run, const ShadowFindings& findings,
                        const std::vector<std::string>& files) {
  std::string sections;
  for (size_t i = 0; i < findings.precisions.size(); ++i) {
    const auto kept = findings.keep_high(i);
    sections += "<section><h2>" + escaped(findings.precisions[i]) + "</h2><p>" +
                (!findings.unsuited[i].empty() ? "It does not suit this model: " + findings.unsuited[i] + ". "
                 : kept.empty()                ? "No layer stands out. "
                                               : counted(std::ssize(kept), "layer") + " to keep high. ") +
                "Configuration: " + bounded(files[i], 500) + "</p>" + layers_table(findings, i) +
                "</section>\n";
  }
  const std::string body =
      "<main>\n<header><div class=\"headline\"><h1>Shadow rehearsal of " + escaped(name) +
      "</h1></div>\n<p class=\"trained\">" + counted(findings.steps, "step") + " in FP32, " +
      with_commas(findings.looks) + " of them sampled; " +
      counted(std::ssize(findings.precisions), "precision") + ", " +
      counted(std::ssize(findings.layers), "linear layer") +
      "</p></header>\n<p class=\"note\">Each number compares a layer's product with FP32's of the same "
      "operands: "
      "the norm of the difference as a share of the norm of FP32's result. Effect: what the layer's two "
      "errors, of the output and of the input gradient, do to the step's loss if its elements err "
      "independently; layers are ranked by it (docs/rehearse.md).</p>\n" +
      sections + "<section><details><summary>Configuration</summary><pre class=\"configuration\">" +
      bounded(run.sittings.back().header.configuration, 20000) +
      "</pre></details></section>\n<footer>Made by Halfstep " HALFSTEP_VERSION
      " from the run's log.jsonl.</footer>\n</main>\n";
  return page("Shadow rehearsal of " + name + " – Halfstep", body);
}

}  // namespace halfstep
