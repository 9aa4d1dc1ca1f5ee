
#include "report/report.h"
#include "report/html.h"
#include "words/numbers.h"
#include "report/run_plots.h"
#include "report/run_tables.h"

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
  if (summary.tokens_per_second)
    html += figure(
        "Speed, " + escaped(run.sittings.back().header.unit) + "/s", with_suffix(*summary.tokens_per_second),
        summary.share_of_peak ? percent(*summary.share_of_peak) + " of peak" : "median of the steps");
  html += figure(
      "Time", duration(summary.seconds),
      with_suffix(static_cast<double>(summary.tokens)) + " " + escaped(run.sittings.back().header.unit));
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
  body += warnings(run, summary) + key_figures(run, summary);
  body += "<section><div class=\"plots training\">" + training_plots(run) + "</div></section>\n";
  body += skipped_section(run);
  body += plots_section("Time", speed_plots(run)) + plots_section("Memory", memory_plots(run));
  body += sample_section(run);
  body += "<div class=\"pairs\"><div>" + evaluation_section(run) + machine_section(run) + "</div><div>" +
          sitting_section(run) + note_section(run) + "</div></div>\n";
  body += configuration_section(run);
  body += "<footer>Made by Halfstep " HALFSTEP_VERSION " from log.jsonl.</footer>\n</main>\n";
  return page(run.name + " – Halfstep", body);
}

}  // namespace halfstep
