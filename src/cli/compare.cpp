// `halfstep compare`: which runs are the same within noise, first in a sentence, then in a table.
#include <halfstep/printable.h>
#include "report/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/paragraph.h"
#include "cli/report_json.h"

namespace halfstep::cli {
namespace {

using nlohmann::ordered_json;

struct Request {
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
                    row.summary.tokens_per_second ? formatted("%.0f", *row.summary.tokens_per_second) : "-",
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

void compare(const Request& request) {
  keep_answer_out_of(request.html);
  const std::vector<RunHistory> runs = read_all(request.runs);
  const RunComparison comparison = compare_runs(runs);
  if (!request.html.empty()) write_page(request.html, compare_html(runs));
  if (request.json) {
    ordered_json answer = json_of(comparison);
    if (!request.html.empty()) answer["page"] = request.html;
    std::cout << answer.dump(2, ' ', false, ordered_json::error_handler_t::replace) << "\n";
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
  const auto request = std::make_shared<Request>();
  compare_app
      ->add_option("runs", request->runs, std::string("Two folders or more; the first is the reference"))
      ->required()
      ->expected(2, -1);
  compare_app->add_option("--html", request->html, std::string("Write the curves into this page"));
  compare_app->add_flag("--json", request->json, std::string("As JSON"));
  compare_app->callback([request] { compare(*request); });
}

}  // namespace halfstep::cli
