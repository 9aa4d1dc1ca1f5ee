// Logs that were made, or damaged, to take all time, memory or disk.
#include <gtest/gtest.h>
#include <halfstep/error.h>
#include "report/run_report.h"

#include <nlohmann/json.hpp>

#include "support/cost_of.h"
#include "support/error_of.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

using nlohmann::json;
using testing::error_of;
using testing::expect_cheap;
using testing::ScratchFolder;
using testing::write_text;

// Everything that a page repeats is cut somewhere; these are their sums, times six for what HTML makes of
// "<".
constexpr size_t kMostPageBytes = 4'000'000;

json run_record(int64_t step, const std::string& configuration) {
  return {{"kind", "run"},
          {"step", step},
          {"schema", 1},
          {"halfstep", "0"},
          {"unix_time", 1},
          {"unit", "tokens"},
          {"machine", json::object()},
          {"configuration", configuration}};
}

json step_record(int64_t step) {
  return {
      {"kind", "step"},
      {"step", step},
      {"seconds", 1},
      {"loss", 2},
      {"lr", 3},
      {"grad_norm", 4},
      {"items", 5},
      {"items_per_second", 6},
      {"skipped", false},
      {"phases", {{"forward", 0}, {"backward", 0}, {"inspect", 0}, {"step", 0}, {"data", 0}, {"other", 0}}}};
}

std::string line(const json& record) { return record.dump() + "\n"; }

RunHistory read_lines(const std::string& text) {
  const ScratchFolder folder;
  write_text(folder / "log.jsonl", text);
  return read_run(folder.path());
}

void expect_small_page(const char* what, const std::string& log) {
  EXPECT_LT(report_html(read_lines(log)).size(), kMostPageBytes) << what;
  expect_cheap(what, [&] { (void)report_html(read_lines(log)); });
}

/// Of `bytes` bytes, with a line for each of so many keys.
std::string configuration_of(char name, size_t bytes) {
  std::string text;
  for (int i = 0; text.size() < bytes; ++i) text += name + std::to_string(i) + " = 1\n";
  return text;
}

TEST(HostileLog, ConfigurationsOfManyLinesAreComparedQuickly) {
  const std::string a = configuration_of('a', 330'000), b = configuration_of('b', 330'000);
  expect_small_page("660 KB of configurations", line(run_record(0, a)) + line(run_record(0, b)));
  expect_cheap("660 KB of configurations in two runs", [&] {
    const std::string log = line(step_record(1)) + line(step_record(2));
    const std::vector<RunHistory> runs = {read_lines(line(run_record(0, a)) + log),
                                          read_lines(line(run_record(0, b)) + log)};
    EXPECT_LT(compare_html(runs).size(), kMostPageBytes);
  });
}

TEST(HostileLog, LineWithoutAnEndIsRefusedBeforeItFillsTheMemory) {
  const ScratchFolder folder;
  write_text(folder / "log.jsonl", line(run_record(0, "")));
  std::filesystem::resize_file(folder / "log.jsonl", uintmax_t{12} << 30);  // a hole: it takes no disk
  expect_cheap("a hole of 12 GB", [&] {
    const std::string fault = error_of([&] { (void)read_run(folder.path()); });
    if (fault.find("line 2 has more than 16777216 bytes") == std::string::npos) throw Error(fault);
  });
}

TEST(HostileLog, LongestLineThatIsReadFitsIntoMemory) {
  const std::string log = line(run_record(0, std::string((16 << 20) - 200, 'x')));
  expect_cheap("a line of 16 MiB", [&] { (void)read_lines(log); });
}

TEST(HostileLog, PageStaysSmallWhateverTheLogHolds) {
  std::string resumed = line(run_record(0, ""));
  for (int64_t step = 1; step <= 40'000; ++step) {
    resumed += line(step_record(step));
    resumed += line(run_record(step, ""));
  }
  expect_small_page("40,000 restarts", resumed);

  std::string changed;
  for (int i = 0; i < 3'000; ++i)
    changed += line(run_record(0, configuration_of(i % 2 == 0 ? '<' : '&', 4'000)));
  expect_small_page("3,000 configurations", changed);

  json machine = run_record(0, "");
  for (int i = 0; i < 50'000; ++i) machine["machine"][std::to_string(i)] = std::string(200, '<');
  expect_small_page("a machine of 50,000 parts", line(machine));

  json classes = step_record(1);
  classes["memory"] = {{"live_bytes", 1}, {"peak_bytes", 1}, {"classes", json::object()}};
  for (int i = 0; i < 30'000; ++i)
    classes["memory"]["classes"][std::to_string(i)] = {{"live_bytes", 1}, {"peak_bytes", i}};
  expect_small_page("30,000 classes of memory", line(run_record(0, "")) + line(classes));

  std::string kinds = line(run_record(0, ""));
  for (int i = 0; i < 100'000; ++i) kinds += line({{"kind", "<" + std::to_string(i)}, {"step", 0}});
  expect_small_page("100,000 kinds of records", kinds);

  json end = {{"kind", "end"},
              {"step", 0},
              {"seconds", 1},
              {"outcome", "failed"},
              {"why", std::string(13 << 20, '<')}};
  expect_small_page("a reason of 13 MB", line(run_record(0, "")) + line(end));
}

TEST(HostileLog, WordThatAPageRepeatsIsRefusedIfItIsNoWord) {
  json record = run_record(0, "");
  record["unit"] = std::string(1'000'000, '<');
  EXPECT_NE(error_of([&] { (void)read_lines(line(record)); }).find("'unit' of 1000000 bytes"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep
