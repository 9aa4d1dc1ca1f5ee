#include <gtest/gtest.h>
#include <halfstep/run_log.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>

#include "log/records.h"
#include "support/error_of.h"
#include "support/sanitized.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

using testing::error_of;
using testing::full_record;
using testing::plain_record;
using testing::read_text;
using testing::some_header;

TEST(RunLog, ARowHasTheColumnsInOrder) {
  const testing::ScratchFolder run;
  RunLog::create(run.path(), some_header()).step(full_record(2));
  EXPECT_EQ(read_text(run / "log.csv"),
            "step,seconds,loss,lr,grad_norm,items,items_per_second,loss_scale,skipped,why,parameter,"
            "stalled_share,"
            "share_of_peak,evaluation_loss,forward_seconds,backward_seconds,inspect_seconds,step_seconds,"
            "data_seconds,other_seconds,memory_live_bytes,memory_peak_bytes\r\n"
            "2,0.500000,0.3333333333333333,3e-04,12.75,4096,16384.5,65536,1,"
            "\"the gradient of 'h.0, w' is not finite\",\"h.0, "
            "\"\"w\"\"\",0.125,0.5,2.5,0.100000,0.200000,0.010000,"
            "0.020000,0.003000,0.000400,30,40\r\n");
}

TEST(RunLog, WhatAStepDoesNotHaveIsLeftOut) {
  const testing::ScratchFolder run;
  RunLog::create(run.path(), some_header()).step(plain_record(1));
  const std::string csv = read_text(run / "log.csv");
  EXPECT_TRUE(
      csv.ends_with("\r\n1,0.500000,4,0.001,0,64,0,,0,,,,,,0.000000,0.000000,0.000000,0.000000,0.000000,"
                    "0.000000,,\r\n"))
      << csv;
  const std::string jsonl = read_text(run / "log.jsonl");
  const auto record = nlohmann::json::parse(jsonl.substr(jsonl.find('\n') + 1));
  for (const char* absent :
       {"loss_scale", "why", "parameter", "stalled_share", "share_of_peak", "evaluation_loss", "memory"})
    EXPECT_FALSE(record.contains(absent)) << absent;
}

TEST(RunLog, ALogThatIsThereIsNotBegunAnew) {
  const testing::ScratchFolder run;
  RunLog::create(run.path(), some_header()).step(plain_record(1));
  const std::string before = read_text(run / "log.jsonl");
  try {
    (void)RunLog::create(run.path(), some_header());
    FAIL() << "begun over a log";
  } catch (const FileError& error) {
    EXPECT_EQ(error.code(), EEXIST);
  }
  EXPECT_EQ(read_text(run / "log.jsonl"), before);
}

TEST(RunLog, AFolderThatIsNotThereIsAFileError) {
  const testing::ScratchFolder run;
  for (const bool resumed : {false, true}) try {
      const auto folder = run / "none";
      (void)(resumed ? RunLog::resume(folder, some_header(), 1) : RunLog::create(folder, some_header()));
      FAIL() << "no folder";
    } catch (const FileError& error) {
      EXPECT_EQ(error.code(), ENOENT);
    }
}

TEST(RunLog, AStepThatStandsInTheLogIsRefused) {
  const testing::ScratchFolder run;
  RunLog log = RunLog::create(run.path(), some_header());
  log.step(plain_record(3));
  const std::string before = read_text(run / "log.jsonl");
  EXPECT_NE(error_of([&] { log.step(plain_record(3)); }).find("step 3 after step 3"), std::string::npos);
  EXPECT_NE(error_of([&] { log.note(2, 0.0, "late"); }).find("a record of step 2 after one of step 3"),
            std::string::npos);
  EXPECT_EQ(read_text(run / "log.jsonl"), before);
}

double thread_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Logging every step may cost 1% of it: 20 us of a step of 2 ms. The thread's own time, so that neighbours on
// the machine do not count; the least of several rounds. (A sanitizer's own work is four times ours.)
TEST(RunLog, AStepCostsLessThan20Microseconds) {
  if (testing::kSanitized) GTEST_SKIP() << "a sanitizer's time is not ours";
  const testing::ScratchFolder run;
  RunLog log = RunLog::create(run.path(), some_header());
  constexpr int kSteps = 1000;
  StepRecord record = full_record(0);
  double least = std::numeric_limits<double>::infinity();
  for (int round = 0; round < 9; ++round) {
    const double begin = thread_seconds();
    for (int i = 0; i < kSteps; ++i) {
      ++record.step;
      record.loss = 1.0 / static_cast<double>(record.step);
      log.step(record);
    }
    least = std::min(least, (thread_seconds() - begin) / kSteps);
  }
  RecordProperty("microseconds", std::to_string(least * 1e6));
  std::printf("a step's record: %.2f us\n", least * 1e6);
  EXPECT_LT(least, 20e-6);
}

}  // namespace
}  // namespace halfstep
