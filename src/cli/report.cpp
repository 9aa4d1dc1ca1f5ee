// `halfstep report`: what became of a run, as one page.
#include <halfstep/printable.h>
#include "report/report.h"

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
  std::string run;
  std::string out;
  bool json = false;
};

void write_report(const Request& request) {
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
    std::cout << answer.dump(2, ' ', false, ordered_json::error_handler_t::replace) << "\n";
    return;
  }
  std::cout << printable(path, Unprintable::Escaped) << "\n\n";
  print_paragraph(printable(summary.verdict, Unprintable::Replaced));
}

}  // namespace

void add_report(CLI::App& program) {
  CLI::App* const report = program.add_subcommand("report", "Write a run as one HTML page with plots");
  const auto request = std::make_shared<Request>();
  report->add_option("run", request->run, std::string("Folder of the run"))->required();
  report->add_option("-o,--out", request->out, std::string("File to write [report.html of the run]"));
  report->add_flag("--json", request->json, std::string("As JSON"));
  report->callback([request] { write_report(*request); });
}

}  // namespace halfstep::cli
