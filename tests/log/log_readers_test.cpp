// log.jsonl by Python's json, which is told to refuse NaN, and log.csv by its csv.
#include <gtest/gtest.h>
#include <halfstep/run_log.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <regex>
#include <set>

#include "log/records.h"
#include "support/python.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

using nlohmann::json;
using testing::full_record;
using testing::plain_record;
using testing::some_culprit;
using testing::some_finding;
using testing::some_header;
using testing::some_probe;
using testing::some_shadow;

json ask(const char* what, const std::filesystem::path& where) {
  return testing::ask_python("tests/log/log_readers.py", {{what, where.string()}});
}

StepRecord diverged_record(int64_t step) {
  StepRecord record = plain_record(step);
  record.loss = std::nan("");
  record.grad_norm = std::numeric_limits<double>::infinity();
  record.lr = -std::numeric_limits<double>::infinity();
  return record;
}

/// Every kind of record, every field.
void write_all_kinds(const std::filesystem::path& folder) {
  RunLog log = RunLog::create(folder, some_header());
  log.step(full_record(1));
  log.evaluation(
      {.step = 1, .seconds = 0.5, .loss = 2.25, .accuracy = 0.75, .items = 999, .duration_seconds = 0.125});
  log.sample({.step = 1, .seconds = 0.5, .prompt = "Once", .text = "a \"cat\"\\\n\t\x01 \xc3\xa4 \xff end"});
  log.step(diverged_record(2));
  log.note(2, 1.0, "loss is not finite");
  log.checkpoint({.step = 2, .seconds = 1.0, .saved_step = 1, .tensor_bytes = 4096});
  log.probe(some_probe(2));
  log.shadow(some_shadow(2));
  log.culprit(some_culprit(2));
  log.finding({.step = 2, .seconds = 1.0, .finding = some_finding(1)});
  log.end(2, 1.0, "diverged", "loss was NaN at step 2");
}

struct Field {
  std::string type;
  bool always = false;
};

/// The tables of docs/run-log.md, by kind: | `loss` | number | always | ... |
std::map<std::string, std::map<std::string, Field>> documented() {
  std::map<std::string, std::map<std::string, Field>> result;
  std::ifstream page(HALFSTEP_SOURCE_DIR "/docs/run-log.md");
  const std::regex heading("^### `(.*)`$"), row("^\\| `([^`]+)` \\| (\\w+) \\| (\\w+) \\|.*$");
  std::string kind;
  for (std::string line; std::getline(page, line);) {
    std::smatch match;
    if (std::regex_match(line, match, heading)) kind = match[1];
    if (std::regex_match(line, match, row) && !kind.empty())
      result[kind][match[1]] = {.type = match[2], .always = match[3] == "always"};
  }
  return result;
}

bool is_of(const std::string& type, const json& value) {
  if (type == "integer") return value.is_number_integer();
  if (type == "number")
    return value.is_number() || value == "NaN" || value == "Infinity" || value == "-Infinity";
  if (type == "boolean") return value.is_boolean();
  if (type == "text") return value.is_string();
  if (type == "object") return value.is_object();
  if (type == "list") return value.is_array();
  return false;
}

TEST(RunLogReaders, EveryRecordIsAsDocumented) {
  const testing::ScratchFolder run;
  write_all_kinds(run.path());
  const auto schema = documented();
  std::set<std::string> kinds;
  std::map<std::string, std::set<std::string>> seen;
  for (const json& record : ask("jsonl", run / "log.jsonl")) {
    const std::string kind = record.at("kind");
    ASSERT_TRUE(schema.contains(kind)) << kind;
    for (const auto& [name, field] : schema.at(kind)) {
      EXPECT_TRUE(!field.always || record.contains(name))
          << kind << ": " << name << " is always there, they say";
      if (record.contains(name)) seen[kind].insert(name);
    }
    for (const auto& [name, value] : record.items()) {
      ASSERT_TRUE(schema.at(kind).contains(name)) << kind << ": " << name << " is not documented";
      EXPECT_TRUE(is_of(schema.at(kind).at(name).type, value)) << kind << ": " << name << " is " << value;
    }
  }
  for (const auto& [kind, fields] : schema)
    for (const auto& [name, field] : fields)
      EXPECT_TRUE(seen[kind].contains(name)) << kind << ": " << name << " is documented, and never written";
}

TEST(RunLogReaders, JsonGivesBackEveryNumberOfAStep) {
  const testing::ScratchFolder run;
  write_all_kinds(run.path());
  const json lines = ask("jsonl", run / "log.jsonl");
  ASSERT_EQ(lines.size(), 12u);
  EXPECT_EQ(lines[0]["configuration"], some_header().configuration);
  EXPECT_EQ(lines[0]["ranks"], 3);
  EXPECT_EQ(lines[0]["machine"], json({{"cpu", "two of them"}, {"threads", "2"}}));
  EXPECT_EQ(lines[1], json({{"kind", "step"},
                            {"step", 1},
                            {"seconds", 0.25},
                            {"loss", 1.0 / 3.0},
                            {"lr", 3e-4},
                            {"grad_norm", 12.75},
                            {"items", 4096},
                            {"items_per_second", 16384.5},
                            {"loss_scale", 65536},
                            {"skipped", true},
                            {"why", "the gradient of 'h.0, w' is not finite"},
                            {"parameter", "h.0, \"w\""},
                            {"stalled_share", 0.125},
                            {"saturated_share", 0.0625},
                            {"vanished_share", 0.03125},
                            {"stalled_most", "h.1.w"},
                            {"saturated_most", "h.2.w"},
                            {"vanished_most", "h.3.w"},
                            {"share_of_peak", 0.5},
                            {"evaluation_loss", 2.5},
                            {"rank_losses", {0.25, "NaN", 3}},
                            {"phases",
                             {{"forward", 0.1},
                              {"backward", 0.2},
                              {"inspect", 0.01},
                              {"step", 0.02},
                              {"data", 0.003},
                              {"other", 0.0004}}},
                            {"memory",
                             {{"live_bytes", 30},
                              {"peak_bytes", 40},
                              {"classes",
                               {{"parameter", {{"live_bytes", 10}, {"peak_bytes", 11}}},
                                {"activation", {{"live_bytes", 20}, {"peak_bytes", 29}}}}}}}}));
  EXPECT_EQ(lines[3]["text"], "a \"cat\"\\\n\t\x01 \xc3\xa4 \xef\xbf\xbd end");  // U+FFFD for the byte 0xff
}

TEST(RunLogReaders, HistogramBeginsAtItsFirstExponent) {
  const testing::ScratchFolder run;
  write_all_kinds(run.path());
  const json probe = ask("jsonl", run / "log.jsonl")[7];
  ASSERT_EQ(probe["kind"], "probe");
  EXPECT_EQ(probe["first_exponent"], -3);  // of 0.125
  EXPECT_EQ(probe["exponents"], json({2, 0, 0, 0, 1}));
  EXPECT_EQ(probe["fractions"].size(), 30u);
  EXPECT_EQ(probe["count"], 5);
  EXPECT_EQ(probe["amax"], 3.5);
}

TEST(RunLogReaders, NumbersThatAreNotFiniteSurvive) {
  const testing::ScratchFolder run;
  write_all_kinds(run.path());
  const json step = ask("jsonl", run / "log.jsonl")[4];
  EXPECT_EQ(step["loss"], "NaN");
  EXPECT_EQ(step["grad_norm"], "Infinity");
  EXPECT_EQ(step["lr"], "-Infinity");
  const json row = ask("csv", run / "log.csv")[1];
  EXPECT_EQ(row["loss"], "NaN");
  EXPECT_EQ(row["grad_norm"], "Infinity");
  EXPECT_EQ(row["lr"], "-Infinity");
}

TEST(RunLogReaders, CsvGivesBackTheWords) {
  const testing::ScratchFolder run;
  StepRecord record = full_record(1);
  record.why = "two\r\nlines, \xc3\xa4 and \xff";
  RunLog::create(run.path(), some_header()).step(record);
  const json rows = ask("csv", run / "log.csv");
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].size(), 22u);
  EXPECT_EQ(rows[0]["why"], "two  lines, \xc3\xa4 and \xef\xbf\xbd");
  EXPECT_EQ(rows[0]["parameter"], "h.0, \"w\"");
  EXPECT_EQ(rows[0]["memory_peak_bytes"], "40");
}

}  // namespace
}  // namespace halfstep
