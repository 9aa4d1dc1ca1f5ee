// `halfstep doctor`: what a run's log says is wrong with its precision, and what to do.
#include <halfstep/findings.h>
#include <halfstep/printable.h>

#include <algorithm>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/commands.h"
#include "cli/terminal_text.h"
#include "report/run_report.h"
#include "words/numbers.h"

namespace halfstep::cli {
namespace {

using nlohmann::ordered_json;

/// What the findings could be made from, and what they could not.
struct Examined {
  std::vector<std::string> looked_at{};
  std::vector<std::string> not_looked_at{};  ///< with how to have it
};

Examined examined(const RunHistory& run) {
  const auto any = [&](auto value) { return std::ranges::any_of(run.steps, value); };
  const auto skips = std::ranges::count_if(run.steps, &StepRecord::skipped);
  Examined all;
  all.looked_at.push_back("loss of " + counted(std::ssize(run.steps), "logged step") + ", " +
                          with_commas(skips) + " of them skipped");
  if (any([](const StepRecord& r) { return r.loss_scale.has_value(); }))
    all.looked_at.push_back("loss scale");
  if (any([](const StepRecord& r) { return r.stalled_share.has_value(); }))
    all.looked_at.push_back("updates lost to rounding");
  else
    all.not_looked_at.push_back("updates lost to rounding, which are counted on the CPU only");
  if (any([](const StepRecord& r) { return r.saturated_share.has_value(); }))
    all.looked_at.push_back("values that the recipe saturated or flushed to zero");
  if (!run.probes.empty()) {
    std::set<int64_t> steps;
    for (const RunHistory::Probe& probe : run.probes) steps.insert(probe.step);
    all.looked_at.push_back("exponents of tensors in " + counted(std::ssize(steps), "step"));
  } else {
    all.not_looked_at.push_back(
        "exponents of weights, activations and gradients: train with --set watch.every=50");
  }
  if (!run.culprits.empty())
    all.looked_at.push_back("the first operation that was not finite in " +
                            counted(std::ssize(run.culprits), "step"));
  return all;
}

std::string page_of(const Finding& finding) { return "docs/findings.md#" + finding.code; }

/// In the log of somebody else anything may stand.
std::string shown(const std::string& text) { return printable(text, Unprintable::Replaced); }

std::string in_a_row(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text.append(text.empty() ? "" : "; ").append(part);
  return text + ".";
}

void print(const RunHistory& run, const std::vector<Finding>& findings) {
  for (const Finding& finding : findings) {
    std::cout << to_string(finding.severity) << "  " << shown(finding.code) << ", since step "
              << with_commas(finding.step) << "\n";
    print_paragraph(shown(finding.what), 2);
    print_paragraph("Evidence: " + shown(finding.evidence), 2);
    print_paragraph("Remedy: " + shown(finding.remedy), 2);
    std::cout << "  " << shown(page_of(finding)) << "\n\n";
  }
  const int64_t last_step = run.steps.empty() ? 0 : run.steps.back().step;
  if (run.steps.empty()) return print_paragraph("No step is logged yet: there is nothing to examine.");
  if (findings.empty()) std::cout << "Nothing found in " << counted(last_step, "step") << ".\n\n";
  const Examined all = examined(run);
  print_paragraph("Examined: " + in_a_row(all.looked_at));
  if (!all.not_looked_at.empty()) print_paragraph("Not examined: " + in_a_row(all.not_looked_at));
}

ordered_json json_of(const RunHistory& run, const std::vector<Finding>& findings) {
  ordered_json list = ordered_json::array();
  for (const Finding& finding : findings)
    list.push_back({{"code", finding.code},
                    {"severity", to_string(finding.severity)},
                    {"step", finding.step},
                    {"what", finding.what},
                    {"evidence", finding.evidence},
                    {"remedy", finding.remedy},
                    {"layer", finding.layer},
                    {"op", finding.op},
                    {"page", page_of(finding)}});
  const Examined all = examined(run);
  return {{"run", run.name},
          {"last_step", run.steps.empty() ? 0 : run.steps.back().step},
          {"findings", list},
          {"looked_at", all.looked_at},
          {"not_looked_at", all.not_looked_at}};
}

struct DoctorRequest {
  std::string run;
  bool json = false;
};

void examine(const DoctorRequest& request) {
  const RunHistory run = read_run(request.run);
  const std::vector<Finding> findings = findings_of(run);
  if (request.json)
    print_answer(json_of(run, findings));
  else
    print(run, findings);
  const bool ill =
      std::ranges::any_of(findings, [](const Finding& finding) { return finding.severity > Severity::Note; });
  if (ill) throw ExitWith(kFindings, "");
}

}  // namespace

void add_doctor(CLI::App& program) {
  CLI::App* const doctor = program.add_subcommand("doctor", "Diagnose a run's precision");
  const auto request = std::make_shared<DoctorRequest>();
  doctor->add_option("run", request->run, std::string("Folder of the run; it may still be running"))
      ->required();
  doctor->add_flag("--json", request->json, std::string("As JSON"));
  doctor->footer(
      "The most serious finding is first; docs/findings.md has a section for each.\n"
      "Exit codes: 0 nothing above a note, 9 something, 3 the log cannot be read.");
  doctor->callback([request] { examine(*request); });
}

}  // namespace halfstep::cli
