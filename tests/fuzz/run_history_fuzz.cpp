// A log that is read gives a page of bounded size with no markup of the log's own; a run compared with itself
// is never different. The input is log.jsonl; what stands behind a line "#second" is the log of another run.
#include "report/run_report.h"

#include <optional>
#include <string>
#include <vector>

#include "fuzz/fuzz_target.h"
#include "support/scratch.h"

namespace {

using namespace halfstep;

constexpr size_t kMostPageBytes = 1'000'000;  // an input has 4,096 bytes

std::optional<RunHistory> read(std::string_view log) {
  static const testing::ScratchFolder folder;
  testing::write_text(folder / "log.jsonl", log);
  std::optional<RunHistory> run;
  testing::read_or_refuse([&] { run = read_run(folder.path()); });
  return run;
}

size_t count_of(std::string_view words, std::string_view text) {
  size_t count = 0;
  for (size_t at = text.find(words); at != text.npos; at = text.find(words, at + 1)) ++count;
  return count;
}

void check_page(const std::string& html) {
  testing::require(html.size() < kMostPageBytes, "a page is bounded");
  // Its own, and a figure's data.
  testing::require(count_of("<script", html) == 1 + count_of("<script type=\"application/json\">", html) &&
                       count_of("<script", html) == count_of("</script", html),
                   "a page has one script that runs");
  testing::require(count_of("<img", html) == 0, "a page shows no markup of the log's");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input = testing::text_of(data, size);
  constexpr std::string_view kSecond = "#second\n";
  const size_t cut = input.find(kSecond);
  std::vector<RunHistory> runs;
  if (auto first = read(input.substr(0, cut))) runs.push_back(std::move(*first));
  if (runs.empty()) return 0;
  check_page(report_html(runs[0]));

  testing::read_or_refuse([&] {  // runs without a step are not compared
    runs.push_back(runs[0]);
    const Likeness itself = compare_runs(runs).pairs[0].likeness;
    testing::require(itself != Likeness::Different && itself != Likeness::Unclear, "a run is like itself");
    if (cut == input.npos) return;
    if (auto second = read(input.substr(cut + kSecond.size()))) runs[1] = std::move(*second);
    check_page(compare_html(runs));
  });
  return 0;
}
