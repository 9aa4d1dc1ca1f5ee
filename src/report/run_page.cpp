#include <algorithm>
#include <cmath>
#include <ctime>
#include <map>
#include <set>
#include <span>
#include <string>

#include "io/durable_file.h"
#include "report/html.h"
#include "report/run_plots.h"
#include "report/run_report.h"
#include "report/tensor_plots.h"
#include "words/numbers.h"

namespace halfstep::report {
namespace {

// What a run's report tells in words: skipped steps, evaluations, samples, notes, configuration, machine.

// Each is a section with its heading, or empty if the run has nothing of the kind.
std::string skipped_section(const RunHistory& run);
std::string evaluation_section(const RunHistory& run);
std::string sample_section(const RunHistory& run);
std::string note_section(const RunHistory& run);
std::string sitting_section(const RunHistory& run);
std::string configuration_section(const RunHistory& run);
std::string machine_section(const RunHistory& run);

constexpr int64_t kFewRows = 10;
constexpr int64_t kMostSkipped = 200, kMostEvaluations = 40, kMostSamples = 12, kMostNotes = 100,
                  kMostSittings = 50;
constexpr size_t kMostSampleBytes = 4000, kMostTextBytes = 64000, kMostMachineRows = 100;

using Rows = std::vector<std::vector<Cell>>;

Cell step_cell(int64_t step) { return {.html = with_commas(step), .number = true}; }

std::string section(const std::string& heading, const std::string& body) {
  return "<section><h2>" + heading + "</h2>\n" + body + "</section>\n";
}

/// A sentence if some are left out.
std::string left_out(int64_t shown, int64_t all, const std::string& which) {
  if (shown >= all) return "";
  return "<p class=\"note\">The " + which + " " + with_commas(shown) + " of " + with_commas(all) +
         "; log.jsonl has all.</p>\n";
}

template <typename Record>
std::span<const Record> last_of(const std::vector<Record>& records, int64_t most) {
  return std::span(records).last(static_cast<size_t>(std::min<int64_t>(most, std::ssize(records))));
}

std::string date_of(double unix_time) {
  if (!(std::abs(unix_time) < 1e11)) return "unknown";
  const auto whole = static_cast<std::time_t>(unix_time);
  std::tm parts{};
  char text[40];
  if (::gmtime_r(&whole, &parts) == nullptr) return "unknown";
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &parts)};
}

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    lines.push_back(text.substr(0, text.find('\n')));
    text.remove_prefix(std::min(lines.back().size() + 1, text.size()));
  }
  return lines;
}

/// Lines that only one of two configurations has.
std::string changed_lines(const std::string& before, const std::string& after) {
  const auto old_lines = lines_of(before), new_lines = lines_of(after);
  std::string text;
  const auto list = [&](const auto& from, const auto& other, const char* sign) {
    const std::set<std::string_view> in_other(other.begin(), other.end());
    for (const std::string_view line : from)
      if (!in_other.contains(line)) text.append(sign).append(line).append("\n");
  };
  list(old_lines, new_lines, "- ");
  list(new_lines, old_lines, "+ ");
  return text;
}

Rows machine_rows(const RunHistory::Sitting& sitting) {
  Rows rows;
  for (const auto& [name, value] :
       std::span(sitting.header.machine).first(std::min(kMostMachineRows, sitting.header.machine.size())))
    rows.push_back({{.html = bounded(name, 200)}, {.html = bounded(value, 2000)}});
  return rows;
}

std::string skipped_section(const RunHistory& run) {
  std::vector<const StepRecord*> skipped;
  std::map<std::string, int64_t> by_parameter;
  for (const StepRecord& record : run.steps) {
    if (!record.skipped) continue;
    skipped.push_back(&record);
    ++by_parameter[record.parameter];
  }
  if (skipped.empty()) return "";
  const auto most =
      std::ranges::max_element(by_parameter, {}, [](const auto& entry) { return entry.second; });
  std::string body = "<p>The optimizer did not step, and the weights stayed as they were. ";
  if (skipped.size() > 1 && !most->first.empty())
    body += "Most often the first gradient that was not finite was that of <code>" +
            bounded(most->first, 200) + "</code>: " + with_commas(most->second) + " of " +
            with_commas(std::ssize(skipped)) + ". ";
  body += "</p>\n";
  Rows rows;
  const auto shown = std::min<int64_t>(kMostSkipped, std::ssize(skipped));
  for (const StepRecord* record : std::span(skipped).first(static_cast<size_t>(shown)))
    rows.push_back({step_cell(record->step),
                    {.html = record->loss_scale ? short_digits(*record->loss_scale, 6) : "", .number = true},
                    {.html = digits(record->loss), .number = true},
                    {.html = "<code>" + bounded(record->parameter, 200) + "</code>"},
                    {.html = bounded(record->why, 400)}});
  const std::vector<std::string> headings = {"step", "loss scale", "loss", "parameter", "why"};
  const Rows first(rows.begin(), rows.begin() + std::min(kFewRows, shown)),
      rest(rows.begin() + std::ssize(first), rows.end());
  body += table(headings, first);
  if (!rest.empty())
    body += "<details><summary>" + with_commas(std::ssize(rest)) + " more</summary>" + table(headings, rest) +
            left_out(shown, std::ssize(skipped), "first") + "</details>\n";
  return section("Skipped steps", body);
}

std::string evaluation_section(const RunHistory& run) {
  if (run.evaluations.empty()) return "";
  Rows rows;
  const bool classified =
      std::ranges::any_of(run.evaluations, [](const auto& e) { return e.accuracy.has_value(); });
  for (const EvaluationRecord& record : last_of(run.evaluations, kMostEvaluations)) {
    rows.push_back({step_cell(record.step), {.html = digits(record.loss), .number = true}});
    if (classified)
      rows.back().push_back({.html = record.accuracy ? percent(*record.accuracy) : "", .number = true});
    rows.back().push_back({.html = with_commas(record.items), .number = true});
    rows.back().push_back({.html = duration(record.duration_seconds), .number = true});
  }
  std::vector<std::string> headings = {"after step", "loss"};
  if (classified) headings.emplace_back("right");
  headings.push_back(escaped(run.sittings.back().header.unit));
  headings.emplace_back("time");
  return section("Evaluations",
                 table(headings, rows) + left_out(std::ssize(rows), std::ssize(run.evaluations), "last"));
}

std::string sample_section(const RunHistory& run) {
  if (run.samples.empty()) return "";
  std::string body;
  const auto shown = last_of(run.samples, kMostSamples);
  for (size_t i = shown.size(); i-- > 0;)  // the best of them, one hopes, first
    body += "<div class=\"panel sample\"><h3>After step " + with_commas(shown[i].step) + "</h3><pre><b>" +
            bounded(shown[i].prompt, kMostSampleBytes) + "</b>" + bounded(shown[i].text, kMostSampleBytes) +
            "</pre></div>\n";
  return section("Samples",
                 "<p class=\"quiet\">The prompt is highlighted; the model wrote the rest.</p>\n<div "
                 "class=\"samples\">" +
                     body + "</div>\n" + left_out(std::ssize(shown), std::ssize(run.samples), "last"));
}

std::string note_section(const RunHistory& run) {
  if (run.notes.empty()) return "";
  Rows rows;
  for (const RunHistory::Note& note : last_of(run.notes, kMostNotes))
    rows.push_back({step_cell(note.step),
                    {.html = duration(note.seconds), .number = true},
                    {.html = bounded(note.text, 2000)}});
  return section("Notes", table({"after step", "time", ""}, rows) +
                              left_out(std::ssize(rows), std::ssize(run.notes), "last"));
}

std::string sitting_section(const RunHistory& run) {
  Rows rows;
  for (const auto& sitting : last_of(run.sittings, kMostSittings)) {
    std::string end = "no end record";
    if (sitting.end)
      end = escaped(sitting.end->outcome) +
            (sitting.end->why.empty() ? "" : ": " + bounded(sitting.end->why, 400));
    rows.push_back({step_cell(sitting.after_step),
                    {.html = date_of(sitting.unix_time)},
                    {.html = escaped(sitting.halfstep)},
                    {.html = end}});
  }
  std::string body = table({"after step", "began", "Halfstep", "ended"}, rows) +
                     left_out(std::ssize(rows), std::ssize(run.sittings), "last");
  for (size_t i = std::max<size_t>(1, run.sittings.size() - rows.size()); i < run.sittings.size(); ++i) {
    const std::string changed =
        changed_lines(run.sittings[i - 1].header.configuration, run.sittings[i].header.configuration);
    if (!changed.empty())
      body += "<p>The configuration changed after step " + with_commas(run.sittings[i].after_step) +
              ":</p><pre>" + bounded(changed, 4000) + "</pre>\n";
  }
  return section(run.sittings.size() == 1 ? "Run" : "Run, and where it was resumed", body);
}

std::string configuration_section(const RunHistory& run) {
  return section("Configuration", "<pre class=\"configuration\">" +
                                      bounded(run.sittings.back().header.configuration, kMostTextBytes) +
                                      "</pre>\n");
}

std::string machine_section(const RunHistory& run) {
  const RunHistory::Sitting &first = run.sittings.front(), &last = run.sittings.back();
  const Rows rows = machine_rows(last);
  if (rows.empty()) return "";
  std::string body =
      table({"", ""}, rows) + left_out(std::ssize(rows), std::ssize(last.header.machine), "first");
  if (first.header.machine != last.header.machine)
    body += "<p>It started on another machine:</p>" + table({"", ""}, machine_rows(first));
  return section("Machine", body);
}

}  // namespace
}  // namespace halfstep::report

namespace halfstep {
namespace {

using namespace report;

constexpr int64_t kMostKinds = 10;

std::string outcome_badge(const RunHistory& run) {
  if (!run.end()) return "<span class=\"outcome open\">no end</span>";
  const std::string& outcome = run.end()->outcome;
  const bool saved = outcome == "interrupted" || outcome == "out of time";
  const char* const colour = outcome == "done" ? "good" : saved ? "fair" : "bad";
  return std::string("<span class=\"outcome ") + colour + "\">" + escaped(outcome) + "</span>";
}

std::string figure(const std::string& name, const std::string& value, const std::string& beside) {
  return "<div><dt>" + name + "</dt><dd>" + value + (beside.empty() ? "" : "<small>" + beside + "</small>") +
         "</dd></div>\n";
}

std::string key_figures(const RunHistory& run, const RunSummary& summary) {
  std::string html = "<dl class=\"figures\">";
  if (summary.final_loss)
    html += figure("Training loss", digits(*summary.final_loss), "from " + digits(*summary.first_loss));
  if (summary.evaluation_loss)
    html += figure("Held-out loss", digits(*summary.evaluation_loss),
                   summary.accuracy ? percent(*summary.accuracy) + " right" : "last evaluation");
  if (summary.items_per_second)
    html += figure(
        "Speed, " + escaped(run.sittings.back().header.unit) + "/s", with_suffix(*summary.items_per_second),
        summary.share_of_peak ? percent(*summary.share_of_peak) + " of peak" : "median of the steps");
  html += figure(
      "Time", duration(summary.seconds),
      with_suffix(static_cast<double>(summary.items)) + " " + escaped(run.sittings.back().header.unit));
  html += figure("Skipped steps", with_commas(summary.skipped),
                 "of " + with_commas(static_cast<int64_t>(run.steps.size())) + " logged");
  if (summary.stalled_share)
    html += figure("Stalled updates", percent(*summary.stalled_share),
                   "last " + counted(summary.final_steps, "step"));
  if (summary.peak_bytes > 0)
    html += figure("Peak memory", bytes_text(static_cast<double>(summary.peak_bytes)), "of any step");
  return html + "</dl>\n";
}

std::string warnings(const RunHistory& run, const RunSummary& summary) {
  std::string html;
  const auto warn = [&](const std::string& text) { html += "<p class=\"warning\">" + text + "</p>\n"; };
  if (summary.not_finite > 0)
    warn("The loss was NaN or infinite in " + counted(summary.not_finite, "step") +
         "; red bars at the upper edge of its plot show where.");
  if (run.last_line_cut) warn("The last line of the log is cut and left out: a record was being written.");
  int64_t kinds = 0;
  for (const auto& [kind, count] : run.unknown_kinds) {
    if (++kinds > kMostKinds) break;
    warn(counted(count, "record") + " of the kind <code>" + escaped(kind) +
         "</code>, which this version does not know, are not shown.");
  }
  if (kinds > kMostKinds)
    warn("Records of " + with_commas(std::ssize(run.unknown_kinds) - kMostKinds) +
         " more kinds that this version does not know are not shown.");
  return html;
}

std::string plots_section(const std::string& heading, const std::string& plots) {
  if (plots.empty()) return "";
  return "<section><h2>" + heading + "</h2><div class=\"plots even\">" + plots + "</div></section>\n";
}

}  // namespace

std::string report_html(const RunHistory& run) {
  const RunSummary summary = summarize(run);
  std::string body = "<main>\n<header><div class=\"headline\"><h1>" + escaped(run.name) + "</h1>" +
                     outcome_badge(run) + "</div>\n";
  if (!summary.trained.empty()) body += "<p class=\"trained\">" + bounded(summary.trained, 400) + "</p>\n";
  body += "<p class=\"verdict\">" + escaped(summary.verdict) + "</p></header>\n";
  body += findings_section(run) + warnings(run, summary) + key_figures(run, summary);
  body += "<section><div class=\"plots training\">" + training_plots(run) + "</div></section>\n";
  body += skipped_section(run);
  body += plots_section("Time", speed_plots(run)) + plots_section("Memory", memory_plots(run));
  body += tensor_section(run);
  body += sample_section(run);
  body += "<div class=\"pairs\"><div>" + evaluation_section(run) + machine_section(run) + "</div><div>" +
          sitting_section(run) + note_section(run) + "</div></div>\n";
  body += configuration_section(run);
  body += "<footer>Made by Halfstep " HALFSTEP_VERSION " from log.jsonl.</footer>\n</main>\n";
  return page(run.name + " – Halfstep", body);
}

void write_page(const std::filesystem::path& path, std::string_view html) {
  files::write_durably(path, html);
}

}  // namespace halfstep
