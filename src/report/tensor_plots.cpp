#include "report/tensor_plots.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "report/figures.h"
#include "report/html.h"
#include "words/numbers.h"

namespace halfstep::report {
namespace {

constexpr size_t kMostFindings = 12, kMostLayers = 24, kMostSteps = 40;
// Of a figure, in its own units: so narrow that a telephone shows all of it with letters that can be read.
constexpr double kNames = 132, kCell = 6, kRow = 13, kBars = 90, kWindow = 15, kAxis = 34;
constexpr size_t kMostLetters = 19;
constexpr int kLeast = -30, kMost = 16;  // exponents that are drawn; what is beyond stands at the edge
constexpr int kColumns = kMost - kLeast + 1;

std::string at(double value) { return short_digits(std::round(value * 10) / 10, 6); }

std::string text_at(double x, double y, std::string_view anchor, const std::string& text) {
  return "<text x=\"" + at(x) + "\" y=\"" + at(y) + "\" text-anchor=\"" + std::string(anchor) + "\">" + text +
         "</text>";
}

/// "2^-14" as SVG writes it.
std::string power_text(int exponent) {
  return "2<tspan dy=\"-4\" font-size=\"9\">" + std::string(exponent < 0 ? "−" : "") +
         std::to_string(std::abs(exponent)) + "</tspan>";
}

/// Where names are long: what all begin with, up to a dot. It tells no layer from another.
std::string common_part(const auto& layers) {
  const auto fits = [](const auto& layer) { return layer.first.size() <= kMostLetters; };
  if (layers.size() < 2 || std::ranges::all_of(layers, fits)) return "";
  std::string_view common = layers.front().first;
  for (const auto& [name, values] : layers) {
    size_t same = 0;
    while (same < std::min(common.size(), name.size()) && common[same] == name[same]) ++same;
    common = common.substr(0, same);
  }
  common = common.substr(0, common.rfind('.') + 1);  // nothing without a dot
  const std::string_view rest = std::string_view(layers.front().first).substr(common.size());
  if (!common.empty() && !rest.empty() && rest.front() >= '0' && rest.front() <= '9')  // "h.0", and not "0"
    common = common.substr(0, common.substr(0, common.size() - 1).rfind('.') + 1);
  return std::string(common);
}

/// Of "h.0.attn.c_attn.weight" "h.0.a.c_attn.weight": numbers and the end tell more than the words before.
std::string shortened(std::string name) {
  for (size_t begin = 0; name.size() > kMostLetters;) {
    const size_t dot = name.find('.', begin);
    if (dot == std::string::npos) return "…" + escaped(name.substr(name.size() - (kMostLetters - 1)));
    const bool is_number = name[begin] >= '0' && name[begin] <= '9';
    if (!is_number && dot > begin + 1) name.erase(begin + 1, dot - begin - 1);
    begin = name.find('.', begin) + 1;
  }
  return escaped(name);
}

/// All of the name where the pointer is.
std::string row_name(double y, const std::string& name, const std::string& common) {
  return text_at(kNames - 6, y, "end",
                 shortened(name.substr(common.size())) + "<title>" + bounded(name, 200) + "</title>");
}

std::string box(double x, double y, double width, double height, const std::string& fill, double opacity,
                const std::string& title = "") {
  return "<rect x=\"" + at(x) + "\" y=\"" + at(y) + "\" width=\"" + at(width) + "\" height=\"" + at(height) +
         "\" fill=\"" + fill + "\" fill-opacity=\"" + short_digits(opacity, 2) + "\">" +
         (title.empty() ? "" : "<title>" + title + "</title>") + "</rect>";
}

/// As wide as the page, within bounds in which its letters can be read; what is wider can be scrolled.
std::string svg(double width, double height, const std::string& label, const std::string& body) {
  constexpr double kLargest = 1.25, kSmallest = 0.8;
  return "<div class=\"scroll\"><svg role=\"img\" aria-label=\"" + label + "\" viewBox=\"0 0 " + at(width) +
         " " + at(height) +
         "\" style=\"display:block;font:11px system-ui,sans-serif;fill:var(--ink);width:100%;min-width:" +
         at(kSmallest * width) + "px;max-width:" + at(kLargest * width) + "px\">" + body + "</svg></div>\n";
}

/// A format's normal numbers and, below them, its subnormals.
struct Window {
  const char* name;
  const char* colour;
  int subnormal, normal, largest;  // exponents
};
// BF16 and FP32 hold all that is drawn.
constexpr std::array<Window, 4> kWindows = {{{"FP16", "var(--c1)", -24, -14, 15},
                                             {"E5M2", "var(--c4)", -16, -14, 15},
                                             {"E4M3", "var(--c2)", -9, -6, 8},
                                             {"E2M1", "var(--c3)", -1, 0, 2}}};

double x_of(int exponent) { return kNames + kCell * (std::clamp(exponent, kLeast, kMost) - kLeast); }

std::array<double, kColumns> shares_of(const TensorStats& stats) {
  std::array<double, kColumns> shares{};
  for (int exponent = TensorStats::kLeastExponent; exponent <= TensorStats::kLargestExponent; ++exponent)
    if (const int64_t count = stats.in_binade(exponent); count > 0)
      shares[static_cast<size_t>(std::clamp(exponent, kLeast, kMost) - kLeast)] +=
          static_cast<double>(count) / static_cast<double>(stats.count);
  return shares;
}

using Named = std::vector<std::pair<std::string, TensorStats>>;

/// Shares of a tensor's values that a format loses at either end.
struct Lost {
  double underflow = 0, saturation = 0;
};
using LostByStep = std::vector<std::pair<std::string, std::map<int64_t, Lost>>>;  // by layer

double most_of(const std::pair<std::string, std::map<int64_t, Lost>>& layer) {
  double most = 0;
  for (const auto& [step, lost] : layer.second) most = std::max(most, lost.underflow + lost.saturation);
  return most;
}

constexpr const char *kUnderflowColour = "var(--c1)", *kSaturationColour = "var(--bad)";
constexpr double kLeastShare = 1e-4;  // is seen just so; all of the values are the full colour

double opacity_of(double share) {
  return std::clamp(1 - std::log10(share) / std::log10(kLeastShare), 0.0, 1.0) * 0.9 + 0.1;
}

/// What the colours mean: two bars over one axis of shares.
std::string legend_of_losses(double y) {
  constexpr double kStep = 42, kBarHeight = 11;
  constexpr std::array<std::pair<double, const char*>, 5> kTicks = {
      {{1e-4, "0.01%"}, {1e-3, "0.1%"}, {1e-2, "1%"}, {0.1, "10%"}, {1, "100%"}}};
  std::string body;
  const auto bar = [&](double top, const char* colour, const char* name) {
    body += text_at(kNames - 6, top + 9, "end", name);
    for (size_t i = 0; i < kTicks.size(); ++i)
      body += box(kNames + kStep * static_cast<double>(i), top, kStep, kBarHeight, colour,
                  opacity_of(kTicks[i].first));
  };
  bar(y, kSaturationColour, "upper: too large");
  bar(y + kBarHeight + 3, kUnderflowColour, "lower: becomes zero");
  for (size_t i = 0; i < kTicks.size(); ++i)
    body += text_at(kNames + kStep * (static_cast<double>(i) + 0.5), y + 2 * kBarHeight + 16, "middle",
                    kTicks[i].second);
  return body + text_at(kNames, y + 2 * kBarHeight + 31, "start",
                        "share of the layer's values, or less; grey: none");
}

/// Layers by steps: in each cell above what is too large for a format, below what becomes zero.
std::string losses_over_steps(const std::string& label, const std::vector<int64_t>& steps,
                              LostByStep layers) {
  const auto all = std::ssize(layers);
  const std::string common = common_part(layers);
  const auto healthy =
      static_cast<int64_t>(std::erase_if(layers, [](const auto& layer) { return most_of(layer) == 0; }));
  constexpr double kHead = 18, kCellRow = 18, kLegend = 58;
  const size_t shown = std::min(layers.size(), kMostLayers);
  const double cell = std::clamp(600.0 / static_cast<double>(steps.size()), 8.0, 40.0);
  const double bottom = kHead + kCellRow * static_cast<double>(shown),
               right = kNames + cell * static_cast<double>(steps.size()),
               width = std::max(right + 24, kNames + 270);
  std::string body = text_at(kNames - 6, 11, "end", "layer");
  for (size_t row = 0; row < shown; ++row) {
    const auto& [name, by_step] = layers[row];
    const double y = kHead + kCellRow * static_cast<double>(row), half = (kCellRow - 2) / 2;
    body += row_name(y + 13, name, common);
    for (size_t i = 0; i < steps.size(); ++i) {
      const auto found = by_step.find(steps[i]);
      if (found == by_step.end()) continue;
      const auto& [underflow, saturation] = found->second;
      const double x = kNames + cell * static_cast<double>(i);
      const std::string title = bounded(name, 120) + ", step " + with_commas(steps[i]) + ": " +
                                percent(saturation) + " too large, " + percent(underflow) + " become zero";
      const auto part = [&](double top, double share, const char* colour) {
        body += box(x, top, cell - 1, half, share > 0 ? colour : "var(--grid)",
                    share > 0 ? opacity_of(share) : 1, title);
      };
      part(y + 1, saturation, kSaturationColour);
      part(y + 1 + half, underflow, kUnderflowColour);
    }
  }
  const size_t every = std::max<size_t>(1, static_cast<size_t>(std::ceil(52 / cell)));
  for (size_t i = 0; i < steps.size(); i += every)
    body +=
        text_at(kNames + cell * (static_cast<double>(i) + 0.5), bottom + 14, "middle", with_commas(steps[i]));
  body += text_at((kNames + right) / 2, bottom + 30, "middle", "step");
  body += legend_of_losses(bottom + 44);
  std::string html = svg(width, bottom + 44 + kLegend, label, body);
  std::string note;
  if (shown < layers.size())
    note += "The " + with_commas(static_cast<int64_t>(shown)) + " of " + with_commas(all) +
            " with the largest share lost in any of these steps, that one first; " +
            with_commas(std::ssize(layers) - static_cast<int64_t>(shown)) + " more lose some. ";
  if (healthy > 0) note += with_commas(healthy) + " of " + with_commas(all) + " lose nothing.";
  if (!note.empty()) html += "<p class=\"note\">" + note + "</p>\n";
  return html;
}

/// What the run's products take in, and FP16, each with what is to be said of it.
std::vector<std::pair<ProductFormat, std::string>> formats_of(const RunHistory& run,
                                                              const std::string& role) {
  std::vector<std::pair<ProductFormat, std::string>> formats;
  if (const auto config = configuration_of(run))
    if (const auto own = product_format(config->precision.compute, role))
      formats.emplace_back(*own, own->scaled ? " would lose with one scale for each tensor, a power of two"
                                             : ", this run's format, loses");
  if (formats.empty() || formats.front().first.format != Format::FP16)
    formats.emplace_back(ProductFormat{.format = Format::FP16}, " would lose");
  return formats;
}

/// What is lost to the worst of these formats.
double lost_to(const std::vector<std::pair<ProductFormat, std::string>>& formats, const TensorStats& stats) {
  double most = 0;
  for (const auto& [format, sentence] : formats) {
    const FormatShares shares = format.shares(stats);
    most = std::max(most, shares.zero + shares.saturated + shares.non_finite);
  }
  return most;
}

/// In the model's order; of more than are drawn, those that lose most: the first ones may all be healthy.
Named worst_of(const Named& layers, const std::vector<std::pair<ProductFormat, std::string>>& formats) {
  if (layers.size() <= kMostLayers) return layers;
  std::vector<std::pair<double, size_t>> by_loss;
  for (size_t i = 0; i < layers.size(); ++i) by_loss.emplace_back(-lost_to(formats, layers[i].second), i);
  std::ranges::sort(by_loss);
  std::vector<size_t> chosen;
  for (size_t i = 0; i < kMostLayers; ++i) chosen.push_back(by_loss[i].second);
  std::ranges::sort(chosen);
  Named worst;
  for (const size_t i : chosen) worst.push_back(layers[i]);
  return worst;
}

/// Bars of all values together; below them a row for each layer; above them the windows of formats.
std::string magnitudes(const std::string& role, const Named& layers,
                       const std::vector<std::pair<ProductFormat, std::string>>& formats) {
  TensorStats all;
  for (const auto& [name, stats] : layers) all.merge(stats);
  const Named drawn = worst_of(layers, formats);
  const std::string common = common_part(layers);
  const bool has_others = all.nans + all.infinities > 0;
  const double bars = kWindow * static_cast<double>(kWindows.size()) + 6, rows = bars + kBars + 20;
  const double bottom = rows + kRow * static_cast<double>(drawn.size());
  const double others = x_of(kMost) + 2 * kCell, width = others + (has_others ? 2 * kCell + 10 : 0);
  std::string body;
  for (size_t i = 0; i < kWindows.size(); ++i) {
    const Window& window = kWindows[i];
    const double y = kWindow * static_cast<double>(i);
    body += text_at(kNames - 6, y + 11, "end", std::string(window.name) + (i == 0 ? " holds" : ""));
    body += box(x_of(window.subnormal), y + 2, x_of(window.normal) - x_of(window.subnormal), 10,
                window.colour, 0.35, std::string(window.name) + ": subnormal, fewer digits");
    body += box(x_of(window.normal), y + 2, x_of(window.largest) + kCell - x_of(window.normal), 10,
                window.colour, 0.85, std::string(window.name) + ": normal");
  }
  const auto shares = shares_of(all);
  const double tallest = std::max(1e-9, *std::ranges::max_element(shares));
  body += text_at(kNames - 6, bars + 9, "end", percent(tallest));
  body += text_at(kNames - 6, bars + kBars / 2 + 4, "end", "share of all values");
  body += text_at(kNames - 6, bars + kBars, "end", "0%");
  body += text_at(kNames - 6, rows - 4, "end", "layer");
  for (int column = 0; column < kColumns; ++column) {
    const double share = shares[static_cast<size_t>(column)], height = kBars * share / tallest;
    if (share > 0)
      body += box(x_of(kLeast + column) + 0.5, bars + kBars - height, kCell - 1, height, "var(--c1)", 0.8,
                  "2^" + std::to_string(kLeast + column) + ": " + percent(share));
  }
  for (size_t row = 0; row < drawn.size(); ++row) {
    const auto& [name, stats] = drawn[row];
    const double y = rows + kRow * static_cast<double>(row);
    body += row_name(y + 10, name, common);
    const auto of_row = shares_of(stats);
    for (int column = 0; column < kColumns; ++column)
      if (const double share = of_row[static_cast<size_t>(column)]; share > 0)
        // One in ten thousand can be seen, and a fifth is full.
        body += box(x_of(kLeast + column), y + 1, kCell, kRow - 2, "var(--c1)",
                    std::clamp(1 + std::log10(share / 0.2) / 4, 0.08, 1.0));
    if (const int64_t count = stats.nans + stats.infinities; count > 0)
      body += box(others, y + 1, 2 * kCell, kRow - 2, "var(--bad)", 1,
                  with_commas(count) + " of " + with_commas(stats.count) + " are NaN or Inf");
  }
  for (int exponent = kLeast; exponent <= kMost; exponent += 10)
    body += text_at(x_of(exponent) + kCell / 2, bottom + 14, "middle",
                    (exponent == kLeast ? "≤" : "") + power_text(exponent));
  if (has_others) body += text_at(others + kCell, bottom + 14, "middle", "NaN");
  body +=
      text_at((kNames + x_of(kMost)) / 2, bottom + 30, "middle", "magnitude of the values, powers of two");
  std::string html = svg(width, bottom + kAxis, "Magnitudes of " + role + " values", body);
  if (drawn.size() < layers.size()) {
    std::string names;
    for (const auto& [format, sentence] : formats)
      names += (names.empty() ? "" : " or ") + std::string(traits(format.format).name);
    html +=
        "<p class=\"note\">The " + with_commas(std::ssize(drawn)) + " of " + with_commas(std::ssize(layers)) +
        " with the largest share that becomes zero or is too large in " + names + ", in the model's order; " +
        with_commas(std::ssize(layers) - std::ssize(drawn)) + " are left out. The bars are of all.</p>\n";
  }
  return html;
}

/// In the model's order; of more than are drawn, those that lose most.
LostByStep lost_in(const RunHistory& run, const std::string& role, const ProductFormat& format,
                   const std::vector<int64_t>& steps) {
  LostByStep layers;
  std::map<std::string, size_t> place;
  for (const RunHistory::Probe& probe : run.probes) {
    if (probe.role != role || !std::ranges::binary_search(steps, probe.step)) continue;
    const auto [entry, is_new] = place.try_emplace(probe.name, layers.size());
    if (is_new) layers.push_back({probe.name, {}});
    const FormatShares shares = format.shares(probe.stats());
    layers[entry->second].second[probe.step] = {.underflow = shares.zero,
                                                .saturation = shares.saturated + shares.non_finite};
  }
  if (layers.size() <= kMostLayers) return layers;
  std::vector<std::pair<double, size_t>> by_loss;
  for (size_t i = 0; i < layers.size(); ++i) by_loss.emplace_back(-most_of(layers[i]), i);
  std::ranges::sort(by_loss);
  LostByStep sorted;
  for (const auto& [less, i] : by_loss) sorted.push_back(std::move(layers[i]));
  return sorted;
}

/// At most so many, evenly chosen, the last among them.
std::vector<int64_t> thinned(const std::vector<int64_t>& steps, size_t most) {
  if (steps.size() <= most) return steps;
  std::vector<int64_t> kept;
  for (size_t i = 0; i < most; ++i) kept.push_back(steps[(i + 1) * steps.size() / most - 1]);
  return kept;
}

}  // namespace

std::string findings_section(const RunHistory& run) {
  std::vector<Finding> findings = findings_of(run);
  std::erase_if(findings, [](const Finding& finding) { return finding.severity == Severity::Note; });
  if (findings.empty()) return "";
  std::string body;
  for (const Finding& finding : std::span(findings).first(std::min(kMostFindings, findings.size())))
    body += "<p class=\"warning\"><b>" + bounded(finding.code, 100) + ", " +
            std::string(to_string(finding.severity)) + ".</b> " + bounded(finding.what, 600) + " " +
            bounded(finding.remedy, 600) + "<br><span class=\"note\">" + bounded(finding.evidence, 800) +
            "</span></p>\n";
  return "<section><h2>Findings</h2>\n" + body + "</section>\n";
}

std::string tensor_section(const RunHistory& run) {
  if (run.probes.empty()) return "";
  const std::array<std::pair<std::string, std::string>, 4> roles = {
      {{"activation", "Outputs of layers"},
       {"gradient", "Gradients, with their loss scale"},
       {"weight", "Weights"},
       {"update", "Updates"}}};
  std::string html;
  for (const auto& [role, heading] : roles) {
    std::set<int64_t> all_steps;
    for (const RunHistory::Probe& probe : run.probes)
      if (probe.role == role) all_steps.insert(probe.step);
    if (all_steps.empty()) continue;
    const auto steps = thinned({all_steps.begin(), all_steps.end()}, kMostSteps);
    const auto formats = formats_of(run, role);
    Named latest;
    for (const RunHistory::Probe& probe : run.probes)
      if (probe.role == role && probe.step == steps.back()) latest.emplace_back(probe.name, probe.stats());
    html += "<h3>" + heading + ", step " + with_commas(steps.back()) + "</h3>\n" +
            magnitudes(role, latest, formats);
    for (const auto& [format, sentence] : formats) {
      const LostByStep lost = lost_in(run, role, format, steps);
      const bool is_any =
          std::ranges::any_of(lost, [](const auto& layer) { return most_of(layer) > kLeastShare; });
      if (!is_any || steps.size() < 2) continue;
      const std::string what = std::string(traits(format.format).name) + sentence;
      html += "<h3>" + heading + ": what " + what + "</h3>\n" +
              losses_over_steps("Share of " + role + " values: what " + what + ", by layer and step", steps,
                                lost);
    }
  }
  return "<section><h2>Numbers</h2>\n<p>How large the values are, in powers of two, under what formats hold "
         "without a "
         "scale; FP8 and FP4 are used with one, which moves their window.</p>\n" +
         html + "</section>\n";
}

}  // namespace halfstep::report
