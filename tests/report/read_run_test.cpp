// What was written is read back, and what is damaged is told with its line.
#include <gtest/gtest.h>
#include <halfstep/error.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <limits>

#include "log/records.h"
#include "report/run_report.h"
#include "report/synthetic_run.h"
#include "support/error_of.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

using testing::error_of;
using testing::full_record;
using testing::read_text;
using testing::ScratchFolder;
using testing::some_header;
using testing::write_text;

constexpr const char* kRun =
    R"({"kind":"run","step":0,"schema":1,"halfstep":"0.1.0","unix_time":1,"unit":"tokens","configuration":"","machine":{}})";

std::string step_line(int64_t step) {
  return R"({"kind":"step","step":)" + std::to_string(step) +
         R"(,"seconds":1,"loss":2,"lr":3,"grad_norm":4,"items":5,"items_per_second":6,"skipped":false,"phases":)"
         R"({"forward":0,"backward":0,"inspect":0,"step":0,"data":0,"other":0}})";
}

RunHistory read_lines(const std::string& text) {
  const ScratchFolder folder;
  write_text(folder / "log.jsonl", text);
  return read_run(folder.path());
}

TEST(ReadRun, GivesBackEveryFieldOfAStep) {
  const ScratchFolder folder;
  RunLog::create(folder.path(), some_header()).step(full_record(7));
  const RunHistory run = read_run(folder.path());
  ASSERT_EQ(run.steps.size(), 1u);
  const StepRecord wrote = full_record(7), read = run.steps.front();
  EXPECT_EQ(read.step, wrote.step);
  EXPECT_EQ(read.seconds, wrote.seconds);
  EXPECT_EQ(read.loss, wrote.loss);
  EXPECT_EQ(read.lr, wrote.lr);
  EXPECT_EQ(read.grad_norm, wrote.grad_norm);
  EXPECT_EQ(read.items, wrote.items);
  EXPECT_EQ(read.items_per_second, wrote.items_per_second);
  EXPECT_EQ(read.loss_scale, wrote.loss_scale);
  EXPECT_EQ(read.skipped, wrote.skipped);
  EXPECT_EQ(read.why, wrote.why);
  EXPECT_EQ(read.parameter, wrote.parameter);
  EXPECT_EQ(read.stalled_share, wrote.stalled_share);
  EXPECT_EQ(read.saturated_share, wrote.saturated_share);
  EXPECT_EQ(read.vanished_share, wrote.vanished_share);
  EXPECT_EQ(read.stalled_most, wrote.stalled_most);
  EXPECT_EQ(read.saturated_most, wrote.saturated_most);
  EXPECT_EQ(read.vanished_most, wrote.vanished_most);
  EXPECT_EQ(read.share_of_peak, wrote.share_of_peak);
  EXPECT_EQ(read.evaluation_loss, wrote.evaluation_loss);
  ASSERT_EQ(read.rank_losses.size(), 3u);
  EXPECT_EQ(read.rank_losses[0], 0.25);
  EXPECT_TRUE(std::isnan(read.rank_losses[1]));
  EXPECT_EQ(read.rank_losses[2], 3.0);
  EXPECT_EQ(read.phases.forward, wrote.phases.forward);
  EXPECT_EQ(read.phases.backward, wrote.phases.backward);
  EXPECT_EQ(read.phases.inspect, wrote.phases.inspect);
  EXPECT_EQ(read.phases.step, wrote.phases.step);
  EXPECT_EQ(read.phases.data, wrote.phases.data);
  EXPECT_EQ(read.phases.other, wrote.phases.other);
  ASSERT_TRUE(read.memory);
  EXPECT_EQ(read.memory->live_bytes, 30);
  EXPECT_EQ(read.memory->peak_bytes, 40);
  ASSERT_EQ(read.memory->classes.size(), 2u);
  EXPECT_EQ(read.memory->classes[1].name, "activation");
  EXPECT_EQ(read.memory->classes[1].live_bytes, 20);
  EXPECT_EQ(read.memory->classes[1].peak_bytes, 29);
}

TEST(ReadRun, GivesBackEveryOtherKind) {
  const ScratchFolder folder;
  RunLog log = RunLog::create(folder.path(), some_header());
  log.evaluation(
      {.step = 1, .seconds = 2.5, .loss = 3.5, .accuracy = 0.25, .items = 9, .duration_seconds = 0.5});
  log.sample({.step = 2, .seconds = 3.0, .prompt = "The", .text = " \"end\"\n"});
  log.note(3, 4.0, "saved");
  log.end(4, 5.0, "diverged", "too far");
  const RunHistory run = read_run(folder.path());
  ASSERT_EQ(run.evaluations.size(), 1u);
  EXPECT_EQ(run.evaluations[0].loss, 3.5);
  EXPECT_EQ(run.evaluations[0].accuracy, 0.25);
  EXPECT_EQ(run.evaluations[0].items, 9);
  ASSERT_EQ(run.samples.size(), 1u);
  EXPECT_EQ(run.samples[0].text, " \"end\"\n");
  ASSERT_EQ(run.notes.size(), 1u);
  EXPECT_EQ(run.notes[0].text, "saved");
  ASSERT_TRUE(run.end());
  EXPECT_EQ(run.end()->outcome, "diverged");
  EXPECT_EQ(run.end()->why, "too far");
  EXPECT_EQ(run.sittings[0].header.configuration, some_header().configuration);
  EXPECT_EQ(run.sittings[0].header.machine, some_header().machine);
  EXPECT_EQ(run.sittings[0].header.ranks, 3);
}

TEST(ReadRun, GivesBackWhatWasSeenInsideAStep) {
  const ScratchFolder folder;
  RunLog log = RunLog::create(folder.path(), some_header());
  const ProbeRecord probe = testing::some_probe(1);
  const CulpritRecord culprit = testing::some_culprit(2);
  const Finding finding = testing::some_finding(1);
  log.probe(probe);
  log.culprit(culprit);
  const ShadowRecord shadow = testing::some_shadow(2);
  log.shadow(shadow);
  log.finding({.step = 3, .seconds = 4.0, .finding = finding});
  const RunHistory run = read_run(folder.path());
  ASSERT_EQ(run.probes.size(), 1u);
  EXPECT_EQ(run.probes[0].role, probe.role);
  EXPECT_EQ(run.probes[0].name, probe.name);
  EXPECT_EQ(run.probes[0].stats().packed(), probe.stats.packed());
  EXPECT_EQ(run.probes[0].stats().count, 5);
  EXPECT_EQ(run.probes[0].summed_parts, 7);
  EXPECT_EQ(run.probes[0].sum_type, "bf16");
  ASSERT_EQ(run.shadows.size(), 1u);
  EXPECT_EQ(run.shadows[0].step, shadow.step);
  EXPECT_EQ(run.shadows[0].precision, shadow.precision);
  EXPECT_EQ(run.shadows[0].layer, shadow.layer);
  EXPECT_EQ(run.shadows[0].output_error, shadow.output_error);
  EXPECT_EQ(run.shadows[0].input_grad_error, shadow.input_grad_error);
  EXPECT_EQ(run.shadows[0].weight_grad_error, shadow.weight_grad_error);
  EXPECT_EQ(run.shadows[0].forward_noise, shadow.forward_noise);
  EXPECT_EQ(run.shadows[0].backward_noise, shadow.backward_noise);
  EXPECT_EQ(run.shadows[0].gradient_share, shadow.gradient_share);
  ASSERT_EQ(run.culprits.size(), 1u);
  EXPECT_EQ(run.culprits[0].rank, culprit.rank);
  EXPECT_EQ(run.culprits[0].ranks, culprit.ranks);
  EXPECT_EQ(run.culprits[0].op, culprit.op);
  EXPECT_EQ(run.culprits[0].inside, culprit.inside);
  EXPECT_EQ(run.culprits[0].layer, culprit.layer);
  EXPECT_EQ(run.culprits[0].direction, culprit.direction);
  EXPECT_EQ(run.culprits[0].inputs, culprit.inputs);
  EXPECT_EQ(run.culprits[0].output, culprit.output);
  EXPECT_EQ(run.culprits[0].precision_is_cause, culprit.precision_is_cause);
  EXPECT_EQ(run.culprits[0].verdict, culprit.verdict);
  EXPECT_EQ(run.culprits[0].propagated, culprit.propagated);
  ASSERT_EQ(run.findings.size(), 1u);
  const Finding& read = run.findings[0].finding;
  EXPECT_EQ(run.findings[0].step, 3);
  EXPECT_EQ(read.code, finding.code);
  EXPECT_EQ(read.severity, finding.severity);
  EXPECT_EQ(read.step, finding.step);
  EXPECT_EQ(read.what, finding.what);
  EXPECT_EQ(read.evidence, finding.evidence);
  EXPECT_EQ(read.remedy, finding.remedy);
  EXPECT_EQ(read.layer, finding.layer);
  EXPECT_EQ(read.op, finding.op);
}

TEST(ReadRun, LogsThatDoNotCountRanksAreRead) {
  const RunHistory run = read_lines(
      std::string(kRun) + "\n" +
      R"({"kind":"culprit","step":1,"seconds":1,"rank":2,"op":"exp","inside":"","layer":"a","direction":"forward",)"
      R"("inputs":[],"output":"","precision_is_cause":true,"verdict":"","propagated":0})"
      "\n");
  EXPECT_EQ(run.sittings[0].header.ranks, 1);
  ASSERT_EQ(run.culprits.size(), 1u);
  EXPECT_EQ(run.culprits[0].rank, 2);
  EXPECT_TRUE(run.culprits[0].ranks.empty());
}

// 64 ranks are what BF16 can add up with an eighth of a part lost (findings_test has the bound).
TEST(FindingsOf, GoByTheNumberOfRanksInTheLog) {
  for (const int64_t ranks : {1, 63, 64}) {
    const ScratchFolder folder;
    RunLog log = RunLog::create(folder.path(),
                                {.configuration = "[model]\nkind = \"own\"\n[run]\nreduction = \"bf16\"\n",
                                 .machine = {},
                                 .ranks = ranks});
    log.step(testing::plain_record(1));
    const auto found = findings_of(read_run(folder.path()));
    EXPECT_EQ(std::ranges::count(found, "accumulation-rounding", &Finding::code), ranks == 64) << ranks;
  }
}

TEST(ReadRun, ProbesOfALongRunAreThinnedByWholeSteps) {
  const ScratchFolder folder;
  {
    RunLog log = RunLog::create(folder.path(), some_header());
    for (int64_t step = 1; step <= 30'000; ++step)
      for (const char* name : {"a", "b"}) {
        ProbeRecord probe = testing::some_probe(step);
        probe.name = name;
        log.probe(probe);
      }
  }
  const RunHistory run = read_run(folder.path());
  EXPECT_LT(run.probes.size(), 20'000u);
  EXPECT_GT(run.probes.size(), 10'000u);
  ASSERT_EQ(run.probes.size() % 2, 0u);
  for (size_t i = 0; i < run.probes.size(); i += 2) {
    EXPECT_EQ(run.probes[i].step, run.probes[i + 1].step);
    EXPECT_EQ(run.probes[i].step % 4, 0) << run.probes[i].step;
  }
  EXPECT_EQ(run.probes.back().step, 30'000);
}

TEST(ReadRun, RefusesStatisticsThatNoTensorHas) {
  const std::string fault = error_of([] {
    (void)read_lines(std::string(kRun) + "\n" +
                     R"({"kind":"probe","step":1,"seconds":0,"role":"weight","name":"w","zeros":0,"nans":0,)"
                     R"("infinities":0,"sum":0,"amax":0,"first_exponent":0,"exponents":[1],"fractions":[1],)"
                     R"("saturated":[0,0,0,0,0]})" +
                     "\n");
  });
  EXPECT_NE(fault.find("line 2 has lists"), std::string::npos) << fault;
}

TEST(ReadRun, KeepsWhatIsNotFinite) {
  const RunHistory run =
      read_lines(std::string(kRun) + "\n" +
                 R"({"kind":"evaluation","step":1,"seconds":"NaN","loss":"Infinity","accuracy":)"
                 R"("-Infinity","items":0,"duration_seconds":0})" +
                 "\n");
  EXPECT_TRUE(std::isnan(run.evaluations[0].seconds));
  EXPECT_EQ(run.evaluations[0].loss, std::numeric_limits<double>::infinity());
  EXPECT_EQ(run.evaluations[0].accuracy, -std::numeric_limits<double>::infinity());
}

TEST(ReadRun, AResumedRunHasASittingForEachStart) {
  const ScratchFolder folder;
  testing::write_synthetic_run(folder.path(), {.steps = 50, .resumed_after = 20});
  const RunHistory run = read_run(folder.path());
  ASSERT_EQ(run.sittings.size(), 2u);
  EXPECT_EQ(run.sittings[0].end->outcome, "interrupted");
  EXPECT_EQ(run.sittings[1].after_step, 20);
  EXPECT_EQ(run.end()->outcome, "done");
  EXPECT_EQ(run.steps.size(), 50u);
}

TEST(ReadRun, ACutLastLineIsLeftOutAndTold) {
  const RunHistory run = read_lines(std::string(kRun) + "\n" + step_line(1) + "\n" + step_line(2));
  EXPECT_TRUE(run.last_line_cut);
  EXPECT_EQ(run.steps.size(), 1u);
  EXPECT_FALSE(read_lines(std::string(kRun) + "\n" + step_line(1) + "\n").last_line_cut);
}

// Every prefix of a log is what a process that died there leaves behind.
TEST(ReadRun, EveryPrefixThatHasARecordIsRead) {
  const ScratchFolder folder;
  testing::write_synthetic_run(folder.path(), {.steps = 4, .compute = "fp16"});
  const std::string whole = read_text(folder / "log.jsonl");
  const size_t first_line = whole.find('\n') + 1;
  for (size_t length = first_line; length <= whole.size(); ++length)
    EXPECT_EQ(error_of([&] { (void)read_lines(whole.substr(0, length)); }), "no error") << length;
}

TEST(ReadRun, LaterFieldsAreLeftAloneAndLaterKindsCounted) {
  const RunHistory run =
      read_lines(std::string(kRun) + "\n" + R"({"kind":"histogram","step":1,"bins":[1,{"a":2}]})" + "\n" +
                 R"({"kind":"note","step":1,"seconds":0,"text":"x","colour":{"deep":[1]}})" + "\n");
  EXPECT_EQ(run.unknown_kinds.at("histogram"), 1);
  EXPECT_EQ(run.notes.at(0).text, "x");
}

TEST(ReadRun, TokensThatNobodyCanHaveReadDoNotRunOver) {
  const auto step = [](int i) {
    std::string line = step_line(i);
    const std::string_view field = "\"items\":";
    const size_t begin = line.find(field) + field.size();
    return line.replace(begin, line.find(',', begin) - begin, std::to_string(int64_t{1} << 53)) + "\n";
  };
  std::string log = std::string(kRun) + "\n";
  for (int i = 1; i <= 1100; ++i) log += step(i);  // 1,024 of them are 2^63
  EXPECT_EQ(summarize(read_lines(log)).items, int64_t{1} << 53);
}

TEST(ReadRun, DamageIsToldWithFileAndLine) {
  const std::string head = std::string(kRun) + "\n";
  const std::pair<std::string, std::string> cases[] = {
      {head + "{\"kind\":\"st\n", "line 2 is not valid JSON"},
      {head + "[1]\n", "line 2 is not a JSON object"},
      {head + "\n", "line 2 is not valid JSON"},
      {head + std::string(3, '\0') + "\n", "line 2 has a NUL byte"},
      {head + "{\"step\":1}\n", "line 2 has no 'kind'"},
      {head + R"({"kind":"note","step":-1,"seconds":0,"text":""})" + "\n",
       "'step' that is not a whole number"},
      {head + R"({"kind":"note","step":9007199254740993,"seconds":0,"text":""})" + "\n",
       "'step' that is not a whole number from 0 to 2^53"},
      {head + R"({"kind":"note","step":1,"seconds":"soon","text":""})" + "\n",
       "'seconds' that is not a number"},
      {head + R"({"kind":"note","step":1,"seconds":1,"text":2})" + "\n", "'text' that is not a text"},
      {head + step_line(2) + "\n" + step_line(1) + "\n", "line 3 is of step 1, after one of step 2"},
      {head + step_line(2) + "\n" + step_line(2) + "\n", "line 3 repeats step 2"},
      {step_line(1) + "\n", "line 1 is of kind 'step'; a log begins with 'run'"},
      {R"({"kind":"run","step":0,"schema":2})"
       "\n",
       "line 1 is of schema 2; this Halfstep"},
      {"", "has no record yet"},
      {"{\"kind\":\"run\"", "has no record yet"},
  };
  for (const auto& [text, words] : cases) {
    const std::string error = error_of([&] { (void)read_lines(text); });
    EXPECT_NE(error.find(words), std::string::npos) << error << "\nexpected: " << words;
    EXPECT_NE(error.find("log.jsonl"), std::string::npos) << error;
  }
}

TEST(ReadRun, DamageAndAbsenceAreFileErrors) {
  const ScratchFolder folder;
  try {
    (void)read_run(folder / "none");
    FAIL();
  } catch (const FileError& error) {
    EXPECT_EQ(error.code(), ENOENT);
  }
  write_text(folder / "log.jsonl", "what\n");
  EXPECT_THROW((void)read_run(folder.path()), FileError);
  std::filesystem::create_directories(folder / "x/log.jsonl");
  EXPECT_THROW((void)read_run(folder / "x"), FileError);
}

}  // namespace
}  // namespace halfstep
