// Against TensorBoard, which shares no line with us.
#include <gtest/gtest.h>
#include <halfstep/error.h>
#include <halfstep/event_file.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <limits>
#include <random>

#include "log/records.h"
#include "support/error_of.h"
#include "support/python.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

using nlohmann::json;

json ask(const char* what, const std::filesystem::path& where) {
  return testing::ask_python("tests/log/log_readers.py", {{what, where.string()}});
}

double number(const json& hex) { return std::strtod(hex.get<std::string>().c_str(), nullptr); }

std::vector<double> numbers(const json& list) {
  std::vector<double> result;
  for (const json& one : list) result.push_back(number(one));
  return result;
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(EventFile, TensorBoardReadsEveryScalarBitForBit) {
  const testing::ScratchFolder run;
  const std::vector<float> values = {0.0f, -0.0f, 1.0f / 3.0f, -3e38f, 1e-45f, kInfinity, -kInfinity};
  {
    EventFile file(run.path());
    for (size_t i = 0; i < values.size(); ++i)
      file.scalar("loss", values[i], static_cast<int64_t>(i) * 1'000'000'007);
    file.scalar("grad norm/ä", std::nan(""), 7);
  }
  const json told = ask("events", run.path())["scalars"];
  ASSERT_EQ(told.size(), 2u) << told;
  ASSERT_EQ(told["loss"].size(), values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(told["loss"][i][0].get<int64_t>(), static_cast<int64_t>(i) * 1'000'000'007);
    EXPECT_EQ(number(told["loss"][i][1]), values[i]);
    EXPECT_EQ(std::signbit(number(told["loss"][i][1])), std::signbit(values[i]));
  }
  EXPECT_TRUE(std::isnan(number(told["grad norm/ä"][0][1])));
}

TEST(EventFile, TensorBoardReadsHistogramsBitForBit) {
  const testing::ScratchFolder run;
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, 1e-3f);
  std::vector<float> values(5000);
  std::ranges::generate(values, [&] { return normal(random); });
  const Histogram of_values = histogram_of(values);
  const Histogram binned{.min = -1.5,
                         .max = 9,
                         .count = 4,
                         .sum = 8,
                         .sum_of_squares = 99.25,
                         .limits = {-1, 0, 10},
                         .counts = {1, 0, 3}};
  {
    EventFile file(run.path());
    file.histogram("grads", values, 3);
    file.histogram("binned", binned, 4);
  }
  const json told = ask("events", run.path())["histograms"];
  const auto expect_same = [](const json& one, const Histogram& ours, int64_t step) {
    EXPECT_EQ(one["step"].get<int64_t>(), step);
    EXPECT_EQ(numbers(one["summary"]),
              (std::vector{ours.min, ours.max, ours.count, ours.sum, ours.sum_of_squares}));
    EXPECT_EQ(numbers(one["limits"]), ours.limits);
    EXPECT_EQ(numbers(one["counts"]), ours.counts);
  };
  expect_same(told.at("grads")[0], of_values, 3);
  expect_same(told.at("binned")[0], binned, 4);
}

// Of 0, NaN, 0.125, -0.125 and 3.5: logarithms -3, -3 and 1.81.
TEST(EventFile, TensorBoardReadsMagnitudesOfAProbeAsLogarithms) {
  const testing::ScratchFolder run;
  {
    EventFile file(run.path());
    file.histogram("log2", histogram_of(testing::some_probe(3).stats), 3);
    file.histogram("nothing", histogram_of(TensorStats()), 3);
  }
  const json told = ask("events", run.path())["histograms"];
  const json& read = told.at("log2")[0];
  EXPECT_EQ(numbers(read["limits"]), (std::vector<double>{-3, -2, -1, 0, 1, 2}));
  EXPECT_EQ(numbers(read["counts"]), (std::vector<double>{0, 2, 0, 0, 0, 1}));
  EXPECT_EQ(numbers(read["summary"]),
            (std::vector<double>{-3, std::log2(3.5), 3, 2 * -2.5 + 1.5, 2 * 2.5 * 2.5 + 1.5 * 1.5}));
  EXPECT_EQ(numbers(told.at("nothing")[0]["counts"]), std::vector<double>{0});
}

TEST(EventFile, TensorBoardNoticesEveryFlippedBit) {
  const testing::ScratchFolder run;
  EventFile file(run.path());
  file.scalar("loss", 2.5, 1);
  file.histogram("grads", std::vector<float>{1.0f, -2.0f}, 1);
  file.flush();
  const json told = ask("damaged", file.path());
  EXPECT_EQ(told["whole"], 3);  // with the version
  EXPECT_GT(told["bits"], 1000);
  EXPECT_EQ(told["unnoticed"], json::array());
}

TEST(EventFile, TensorBoardForgetsTheStepsThatAResumedRunRepeats) {
  const testing::ScratchFolder run;
  {
    EventFile file(run.path());
    for (int64_t step = 1; step <= 5; ++step) file.scalar("loss", 1.0, step);
  }
  {
    EventFile file(run.path(), 3);  // within the same second, so under another name
    for (int64_t step = 4; step <= 6; ++step) file.scalar("loss", 2.0, step);
  }
  std::vector<int64_t> steps;
  std::vector<double> values;
  const json told = ask("events", run.path())["scalars"]["loss"];
  for (const json& event : told) {
    steps.push_back(event[0]);
    values.push_back(number(event[1]));
  }
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(values, (std::vector<double>{1, 1, 1, 2, 2, 2}));
}

TEST(EventFile, ResumedRunIsReadLastAlsoIfTheClockWasSetBack) {
  const testing::ScratchFolder run;
  std::vector<std::filesystem::path> paths;
  for (int64_t start = 0; start < 12; ++start) {  // more than one digit of them within a second
    EventFile file(run.path(), start == 0 ? std::nullopt : std::optional(start));
    for (int64_t step = start + 1; step <= start + 3; ++step)
      file.scalar("loss", static_cast<double>(start), step);
    file.flush();
    paths.push_back(file.path());
    if (start > 0) continue;
    // A run of tomorrow, as it looks once the clock is set back by a day.
    const std::string name = file.path().filename().string();
    const std::string tomorrow = std::to_string(std::stoll(name.substr(20, 10)) + 86400);
    paths.back() = run.path() / (name.substr(0, 20) + tomorrow + name.substr(30));
    std::filesystem::rename(file.path(), paths.back());
  }
  EXPECT_TRUE(std::ranges::is_sorted(paths));
  const json told = ask("events", run.path())["scalars"]["loss"];
  ASSERT_EQ(told.size(), 14u) << told;
  for (int64_t step = 1; step <= 14; ++step) {
    EXPECT_EQ(told[static_cast<size_t>(step - 1)][0].get<int64_t>(), step);
    EXPECT_EQ(number(told[static_cast<size_t>(step - 1)][1]),
              std::min<double>(static_cast<double>(step - 1), 11));
  }
}

TEST(EventFile, HoldsNothingBackAfterAFlush) {
  const testing::ScratchFolder run;
  EventFile file(run.path());
  const auto empty = std::filesystem::file_size(file.path());
  file.scalar("loss", 1.0, 1);
  EXPECT_EQ(std::filesystem::file_size(file.path()), empty);
  file.flush();
  EXPECT_GT(std::filesystem::file_size(file.path()), empty);
  EXPECT_TRUE(file.path().filename().string().starts_with("events.out.tfevents.")) << file.path();
}

/// Files may not grow beyond so many bytes while it lives: what a full disk is to a process.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : signal_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{.rlim_cur = bytes, .rlim_max = before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, signal_);
  }

 private:
  void (*signal_)(int);
  rlimit before_{};
};

TEST(EventFile, WhatTheDiskRefusesIsKeptAndFlushAloneThrows) {
  const testing::ScratchFolder run;
  EventFile file(run.path());
  constexpr int64_t kSteps = 20'000;  // of about 50 bytes: a megabyte
  {
    const FileSizeLimit limit(100'000);
    for (int64_t step = 1; step <= kSteps; ++step) file.scalar("loss", static_cast<double>(step), step);
    EXPECT_THROW(file.flush(), FileError);
  }
  file.flush();
  EXPECT_EQ(file.lost_bytes(), 0);
  EXPECT_EQ(ask("events", run.path())["scalars"]["loss"].size(), static_cast<size_t>(kSteps));
}

TEST(EventFile, ADiskThatStaysFullDoesNotFillTheMemory) {
  const testing::ScratchFolder run;
  EventFile file(run.path());
  const std::string tag(60'000, 't');
  const FileSizeLimit limit(1000);
  for (int64_t step = 1; step <= 1500; ++step) file.scalar(tag, 1.0, step);  // 90 MB
  EXPECT_GT(file.lost_bytes(), 10'000'000);
  EXPECT_LT(file.lost_bytes(), 40'000'000);
}

TEST(EventFile, ALimitWithoutABucketIsRefused) {
  const testing::ScratchFolder run;
  EventFile file(run.path());
  EXPECT_NE(testing::error_of([&] {
              file.histogram("h", Histogram{.limits = {1, 2}, .counts = {1}}, 1);
            }).find("2 limits for 1 buckets"),
            std::string::npos);
}

// Oracle: look for each value's bucket among the limits.
TEST(HistogramOf, CountsEveryFiniteValueInTheBucketThatHoldsIt) {
  std::mt19937 random(11);
  std::vector<float> values;
  for (int exponent = -149; exponent <= 127; ++exponent)
    for (const float sign : {-1.0f, 1.0f}) {
      const float power = sign * std::ldexp(1.0f, exponent);
      values.insert(values.end(),
                    {power, std::nextafter(power, 0.0f), std::nextafter(power, sign * kInfinity)});
    }
  values.insert(values.end(), {0.0f, -0.0f, 3.4028235e38f, -3.4028235e38f});
  for (const size_t kept : {size_t{1}, size_t{5}, size_t{200}, values.size()}) {
    std::ranges::shuffle(values, random);
    const std::span<const float> some(values.data(), kept);
    const Histogram ours = histogram_of(some);
    std::vector<double> counts(ours.limits.size(), 0.0);
    double sum = 0.0;
    for (const float value : some) {
      const auto bucket = std::ranges::upper_bound(ours.limits, static_cast<double>(value));
      ASSERT_NE(bucket, ours.limits.end()) << std::hexfloat << value;
      ++counts[static_cast<size_t>(bucket - ours.limits.begin())];
      sum += value;
    }
    EXPECT_EQ(ours.counts, counts);
    EXPECT_TRUE(std::ranges::is_sorted(ours.limits));
    EXPECT_EQ(ours.count, static_cast<double>(kept));
    EXPECT_EQ(ours.min, *std::ranges::min_element(some));
    EXPECT_EQ(ours.max, *std::ranges::max_element(some));
    EXPECT_EQ(ours.sum, sum);
  }
}

TEST(HistogramOf, HasOneBucketAPowerOfTwoAndOneForAnEmptyStretch) {
  const Histogram ours = histogram_of(std::vector<float>{1.0f, 1.5f, 2.0f, 64.0f});
  EXPECT_EQ(ours.limits, (std::vector<double>{2, 4, 64, 128}));
  EXPECT_EQ(ours.counts, (std::vector<double>{2, 1, 0, 1}));
}

TEST(HistogramOf, CountsApartWhatIsNotFinite) {
  const Histogram ours = histogram_of(std::vector<float>{kInfinity, std::nanf(""), 1.0f});
  EXPECT_EQ(ours.not_finite, 2);
  EXPECT_EQ(ours.count, 1.0);
  EXPECT_EQ(ours.max, 1.0);
  const Histogram nothing = histogram_of(std::vector<float>{-kInfinity});
  EXPECT_EQ(nothing.not_finite, 1);
  EXPECT_EQ(nothing.min, 0.0);
  EXPECT_TRUE(nothing.limits.empty());
}

}  // namespace
}  // namespace halfstep
