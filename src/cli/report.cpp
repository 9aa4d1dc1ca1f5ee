// `halfstep report`: what became of a run, as one page.
#include <halfstep/printable.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/terminal_text.h"
#include "report/run_report.h"

namespace halfstep::cli {
namespace {

// What `report` and `compare` answer to programs.

/// What is not known is null; what is not finite, a word as in log.jsonl.
nlohmann::ordered_json json_of(const RunSummary& summary);
nlohmann::ordered_json json_of(const RunComparison& comparison);

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

ordered_json json_of(const RunSummary& summary) {
  return {{"trained", summary.trained},
          {"planned_steps", summary.planned_steps},
          {"last_step", summary.last_step},
          {"seconds", summary.seconds},
          {"items", summary.items},
          {"first_loss", number(summary.first_loss)},
          {"final_loss", number(summary.final_loss)},
          {"final_steps", summary.final_steps},
          {"evaluation_loss", number(summary.evaluation_loss)},
          {"accuracy", number(summary.accuracy)},
          {"items_per_second", number(summary.items_per_second)},
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
                        {"items_per_second", number(row.summary.items_per_second)},
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

using nlohmann::ordered_json;

struct ReportRequest {
  std::string run;
  std::string out;
  bool json = false;
};

void write_report(const ReportRequest& request) {
  const RunHistory run = read_run(request.run);
  const std::string page = report_html(run);
  const std::string path =
      request.out.empty() ? (std::filesystem::path(request.run) / "report.html").string() : request.out;
  keep_answer_out_of(path);
  write_page(path, page);
  const RunSummary summary = summarize(run);
  if (request.json) {
    ordered_json answer = {{"run", run.name}, {"page", path}, {"bytes", page.size()}};
    answer.update(json_of(summary));
    print_answer(answer);
    return;
  }
  std::cout << printable(path, Unprintable::Escaped) << "\n\n";
  print_paragraph(printable(summary.verdict, Unprintable::Replaced));
}

}  // namespace

void add_report(CLI::App& program) {
  CLI::App* const report = program.add_subcommand("report", "Write a run as one HTML page with plots");
  const auto request = std::make_shared<ReportRequest>();
  report->add_option("run", request->run, std::string("Folder of the run"))->required();
  report->add_option("-o,--out", request->out, std::string("File to write [report.html of the run]"));
  report->add_flag("--json", request->json, std::string("As JSON"));
  report->callback([request] { write_report(*request); });
}

namespace {

using nlohmann::ordered_json;

struct CompareRequest {
  std::vector<std::string> runs;
  std::string html;
  bool json = false;
};

/// Runs of the same name are told apart by the paths that were given.
std::vector<RunHistory> read_all(const std::vector<std::string>& folders) {
  std::vector<RunHistory> runs;
  for (const std::string& folder : folders) runs.push_back(read_run(folder));
  std::vector<std::string> names;
  for (const RunHistory& run : runs) names.push_back(run.name);
  for (size_t i = 0; i < runs.size(); ++i)
    if (std::ranges::count(names, names[i]) > 1) runs[i].name = folders[i];
  return runs;
}

std::string formatted(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string loss_text(const std::optional<double>& loss) {
  if (!loss) return "-";
  return std::isnan(*loss) ? "NaN" : formatted("%.4f", *loss);
}

/// The mean of the finite ones says little where others are not.
std::string loss_text(const RunComparison::Row& row) {
  const std::string lost = row.not_finite > 0 ? " (" + std::to_string(row.not_finite) + " NaN or Inf)" : "";
  return loss_text(row.final_loss) + lost;
}

std::string difference_text(const LossDifference& difference, bool of_the_first) {
  if (of_the_first) return "-";
  if (difference.identical) return "identical";
  if (difference.likeness == Likeness::NotFinite || difference.likeness == Likeness::TooShort)
    return std::string(to_string(difference.likeness));
  return formatted("%+.4f", difference.mean) + " +- " + formatted("%.4f", difference.half_width) + "  " +
         std::string(to_string(difference.likeness));
}

void print_table(const RunComparison& comparison) {
  std::vector<std::vector<std::string>> rows = {
      {"run", "loss", "difference, 95%", "held out", "per second", "peak MB", "skipped", "steps"}};
  for (size_t i = 0; i < comparison.rows.size(); ++i) {
    const auto& row = comparison.rows[i];
    rows.push_back({printable(row.name, Unprintable::Escaped), loss_text(row),
                    difference_text(row.from_first, i == 0), loss_text(row.evaluation_loss),
                    row.summary.items_per_second ? formatted("%.0f", *row.summary.items_per_second) : "-",
                    row.summary.peak_bytes > 0
                        ? formatted("%.0f", static_cast<double>(row.summary.peak_bytes) / 1e6)
                        : "-",
                    std::to_string(row.summary.skipped), std::to_string(row.summary.last_step)});
  }
  std::vector<size_t> widths(rows.front().size(), 0);
  for (const auto& row : rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i)
      std::cout << (i == 0 ? "" : "  ") << (i == 0 ? std::left : std::right)
                << std::setw(static_cast<int>(widths[i])) << row[i];
    std::cout << "\n";
  }
}

void compare(const CompareRequest& request) {
  keep_answer_out_of(request.html);
  const std::vector<RunHistory> runs = read_all(request.runs);
  const RunComparison comparison = compare_runs(runs);
  if (!request.html.empty()) write_page(request.html, compare_html(runs));
  if (request.json) {
    ordered_json answer = json_of(comparison);
    if (!request.html.empty()) answer["page"] = request.html;
    print_answer(answer);
    return;
  }
  print_paragraph(printable(comparison.sentence, Unprintable::Replaced));
  std::cout << "\n";
  print_table(comparison);
  if (!request.html.empty()) std::cout << "\n" << printable(request.html, Unprintable::Escaped) << "\n";
}

}  // namespace

void add_compare(CLI::App& program) {
  CLI::App* const compare_app = program.add_subcommand("compare", "Say which runs are the same within noise");
  const auto request = std::make_shared<CompareRequest>();
  compare_app
      ->add_option("runs", request->runs, std::string("Two folders or more; the first is the reference"))
      ->required()
      ->expected(2, -1);
  compare_app->add_option("--html", request->html, std::string("Write the curves into this page"));
  compare_app->add_flag("--json", request->json, std::string("As JSON"));
  compare_app->callback([request] { compare(*request); });
}

}  // namespace halfstep::cli
