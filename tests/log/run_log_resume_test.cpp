#include <gtest/gtest.h>
#include <halfstep/run_log.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "log/records.h"
#include "support/error_of.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

using testing::error_of;
using testing::plain_record;
using testing::read_text;
using testing::some_header;
using testing::write_text;

/// "run 0", "step 1", ...
std::vector<std::string> told(const std::filesystem::path& folder) {
  std::vector<std::string> result;
  std::istringstream lines(read_text(folder / "log.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const auto record = nlohmann::json::parse(line);
    result.push_back(record["kind"].get<std::string>() + " " + std::to_string(record["step"].get<int64_t>()));
  }
  return result;
}

std::vector<std::string> rows(const std::filesystem::path& folder) {
  std::vector<std::string> result;
  std::istringstream lines(read_text(folder / "log.csv"));
  for (std::string line; std::getline(lines, line);) result.push_back(line.substr(0, line.find(',')));
  return result;
}

using Words = std::vector<std::string>;

TEST(RunLogResume, EachStepStandsOnce) {
  const testing::ScratchFolder run;
  {
    RunLog log = RunLog::create(run.path(), some_header());
    for (int64_t step = 1; step <= 5; ++step) log.step(plain_record(step));
    log.evaluation({.step = 5, .loss = 1.0});
    log.end(5, 2.5, "interrupted", "SIGKILL comes without a word, this did not");
  }
  RunLog log = RunLog::resume(run.path(), some_header(), 3);
  EXPECT_EQ(log.seconds_before(), 1.5);  // of step 3
  for (int64_t step = 4; step <= 6; ++step) log.step(plain_record(step));
  log.end(6, 3.0, "done", "");
  EXPECT_EQ(told(run.path()),
            (Words{"run 0", "step 1", "step 2", "step 3", "run 3", "step 4", "step 5", "step 6", "end 6"}));
  EXPECT_EQ(rows(run.path()), (Words{"step", "1", "2", "3", "4", "5", "6"}));
}

// A process can be killed within a write only in theory, a machine can lose power; so: at every byte.
TEST(RunLogResume, ALogCutAtAnyByteGoesOn) {
  const testing::ScratchFolder whole;
  {
    RunLog log = RunLog::create(whole.path(), some_header());
    for (int64_t step = 1; step <= 2; ++step) log.step(testing::full_record(step));
  }
  for (const std::string name : {"log.jsonl", "log.csv"}) {
    const std::string text = read_text(whole / name);
    for (size_t bytes = 0; bytes <= text.size(); ++bytes) {
      const testing::ScratchFolder run;
      std::filesystem::copy(whole.path(), run.path());
      write_text(run / name, std::string_view(text).substr(0, bytes));
      RunLog log = RunLog::resume(run.path(), some_header(), 2);
      log.step(plain_record(3));
      for (const std::string& line : told(run.path())) ASSERT_FALSE(line.empty());
      ASSERT_EQ(told(run.path()).back(), "step 3") << name << " cut at " << bytes;
      ASSERT_EQ(rows(run.path()).front(), "step") << name << " cut at " << bytes;
      ASSERT_EQ(rows(run.path()).back(), "3") << name << " cut at " << bytes;
    }
  }
}

// What was told before the first step (an evaluation, a note) is told again.
TEST(RunLogResume, OfARunThatBeginsAnewNothingIsKept) {
  const testing::ScratchFolder run;
  {
    RunLog log = RunLog::create(run.path(), some_header());
    log.evaluation({.step = 0, .loss = 5.0});
    log.step(plain_record(1));
  }
  RunLog log = RunLog::resume(run.path(), some_header(), 0);
  EXPECT_EQ(log.seconds_before(), 0.0);
  log.evaluation({.step = 0, .loss = 5.0});
  log.step(plain_record(1));
  EXPECT_EQ(told(run.path()), (Words{"run 0", "evaluation 0", "step 1"}));
  EXPECT_EQ(rows(run.path()), (Words{"step", "1"}));
}

TEST(RunLogResume, AMissingFileIsBegun) {
  const testing::ScratchFolder run;
  {
    RunLog::create(run.path(), some_header()).step(plain_record(1));
  }
  std::filesystem::remove(run / "log.jsonl");
  RunLog::resume(run.path(), some_header(), 1).step(plain_record(2));
  EXPECT_EQ(told(run.path()), (Words{"run 1", "step 2"}));
  EXPECT_EQ(rows(run.path()), (Words{"step", "1", "2"}));
}

TEST(RunLogResume, AFileThatIsNoLogIsRefusedAndNeitherIsTouched) {
  for (const std::string name : {"log.jsonl", "log.csv"}) {
    const testing::ScratchFolder run;
    {
      RunLog::create(run.path(), some_header()).step(plain_record(1));
    }
    write_text(run / name, "dear diary\n");
    const std::string jsonl = read_text(run / "log.jsonl"), csv = read_text(run / "log.csv");
    const std::string error = error_of([&] { (void)RunLog::resume(run.path(), some_header(), 0); });
    EXPECT_NE(error.find("line 1"), std::string::npos) << error;
    EXPECT_NE(error.find("'dear diary'"), std::string::npos) << error;
    EXPECT_EQ(read_text(run / "log.jsonl"), jsonl);
    EXPECT_EQ(read_text(run / "log.csv"), csv);
  }
}

// Longer than the block that the reader takes at once (1 MiB), with lines across its ends.
TEST(RunLogResume, FindsItsPlaceInALogOfManyBlocks) {
  const testing::ScratchFolder run;
  constexpr int64_t kSteps = 8000;
  {
    RunLog log = RunLog::create(run.path(), some_header());
    for (int64_t step = 1; step <= kSteps; ++step) log.step(testing::full_record(step));
  }
  ASSERT_GT(std::filesystem::file_size(run / "log.jsonl"), 3u << 20);
  ASSERT_GT(std::filesystem::file_size(run / "log.csv"), 1u << 20);
  RunLog log = RunLog::resume(run.path(), some_header(), kSteps - 1);
  const std::vector<std::string> lines = told(run.path()), steps = rows(run.path());
  ASSERT_EQ(lines.size(), static_cast<size_t>(kSteps) + 1);  // with "run" twice
  ASSERT_EQ(steps.size(), static_cast<size_t>(kSteps));      // with the columns
  EXPECT_EQ(lines[kSteps - 1], "step " + std::to_string(kSteps - 1));
  EXPECT_EQ(steps[kSteps - 1], std::to_string(kSteps - 1));
  EXPECT_EQ(log.seconds_before(), 0.25 * (kSteps - 1));
}

}  // namespace
}  // namespace halfstep
