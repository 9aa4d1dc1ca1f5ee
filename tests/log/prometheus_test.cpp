// Against the parser of Prometheus' own client.
#include "log/prometheus.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <map>
#include <set>

#include "log/records.h"
#include "support/python.h"
#include "support/scratch.h"

namespace halfstep::log {
namespace {

using nlohmann::json;

/// By the name of the sample and its labels besides `run`.
std::map<std::pair<std::string, json>, double> parsed(const PrometheusFigures& figures,
                                                      const std::string& run) {
  const testing::ScratchFolder scratch;
  const auto path = scratch.path() / "metrics.prom";
  std::ofstream(path) << figures.text(1234.5);
  std::map<std::pair<std::string, json>, double> samples;
  std::set<std::string> families;
  for (const json& family :
       testing::ask_python("tests/log/log_readers.py", {{"prometheus", path.string()}})) {
    EXPECT_TRUE(families.insert(family.at("name")).second) << family;
    EXPECT_FALSE(family.at("help").get<std::string>().empty());
    for (const json& sample : family.at("samples")) {
      json labels = sample[1];
      EXPECT_EQ(labels.at("run"), run);
      labels.erase("run");
      const std::string hex = sample[2];
      const bool is_new =
          samples.emplace(std::pair(sample[0].get<std::string>(), labels), std::strtod(hex.c_str(), nullptr))
              .second;
      EXPECT_TRUE(is_new) << sample;
    }
  }
  return samples;
}

TEST(PrometheusFigures, TheClientReadsEveryFigure) {
  const std::string run = "a \\ \"b\"\nc";
  PrometheusFigures figures(run, "tokens", "fp16", 500);
  const StepRecord record = testing::full_record(17);  // skipped
  figures.take(record);
  figures.take(testing::full_record(18));
  figures.take(EvaluationRecord{.step = 17, .loss = 2.25});
  for (const Severity severity : {Severity::Note, Severity::Serious, Severity::Serious})
    figures.take(FindingRecord{.finding = {.severity = severity}});
  const auto samples = parsed(figures, run);
  const auto value = [&](const std::string& name, const json& labels = json::object()) {
    const auto found = samples.find({"halfstep_" + name, labels});
    EXPECT_NE(found, samples.end()) << name;
    return found == samples.end() ? -1 : found->second;
  };
  EXPECT_EQ(value("step"), 18);
  EXPECT_EQ(value("steps"), 500);
  EXPECT_EQ(value("loss"), record.loss);
  EXPECT_EQ(value("evaluation_loss"), 2.25);
  EXPECT_EQ(value("learning_rate"), record.lr);
  EXPECT_EQ(value("gradient_norm"), record.grad_norm);
  EXPECT_EQ(value("loss_scale"), 65536);
  EXPECT_EQ(value("items_per_second", {{"unit", "tokens"}}), record.items_per_second);
  EXPECT_EQ(value("stalled_share"), 0.125);
  EXPECT_EQ(value("peak_bytes"), 40);
  EXPECT_EQ(value("skipped_steps_total"), 2);
  EXPECT_EQ(value("findings_total", {{"severity", "note"}}), 1);
  EXPECT_EQ(value("findings_total", {{"severity", "warning"}}), 0);
  EXPECT_EQ(value("findings_total", {{"severity", "serious"}}), 2);
  EXPECT_EQ(value("written_timestamp_seconds"), 1234.5);
}

TEST(PrometheusFigures, NumbersThatAreNotFiniteAreNumbersThere) {
  PrometheusFigures figures("run", "tokens", "bf16", 1);
  StepRecord record = testing::plain_record(1);
  record.loss = std::nan("");
  record.grad_norm = std::numeric_limits<double>::infinity();
  figures.take(record);
  const auto samples = parsed(figures, "run");
  EXPECT_TRUE(std::isnan(samples.at({"halfstep_loss", json::object()})));
  EXPECT_EQ(samples.at({"halfstep_gradient_norm", json::object()}), std::numeric_limits<double>::infinity());
  EXPECT_FALSE(samples.contains({"halfstep_loss_scale", json::object()}));
}

TEST(PrometheusFigures, LayersHaveTheSharesOfTheRunsFormat) {
  PrometheusFigures figures("run", "tokens", "fp16", 1);
  ProbeRecord record{.step = 1, .role = "gradient", .name = "h.0.\"w\""};
  // Four values: 1, two of 2^-30, which FP16 makes zero, and 2^20, which is beyond its 65504.
  record.stats.count = 4;
  record.stats.amax = 0x1p20f;
  for (const auto& [exponent, count] : {std::pair{0, 1}, {-30, 2}, {20, 1}}) {
    record.stats.exponents[static_cast<size_t>(exponent + 127)] = count;
    record.stats.fractions[static_cast<size_t>(exponent - TensorStats::kLeastExponent)].powers_of_two = count;
  }
  record.stats.saturated = {0, 1, 1, 1, 1};
  figures.take(record);
  const auto samples = parsed(figures, "run");
  const json labels = {{"role", "gradient"}, {"layer", "h.0.\"w\""}, {"format", "FP16"}};
  EXPECT_EQ(samples.at({"halfstep_underflow_share", labels}), 0.5);
  EXPECT_EQ(samples.at({"halfstep_saturation_share", labels}), 0.25);
}

}  // namespace
}  // namespace halfstep::log
