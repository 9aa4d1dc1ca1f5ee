#include "cli/train_screen.h"

#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "support/scratch.h"

namespace halfstep::cli {
namespace {

RunPlan plan_of(int64_t steps) {
  return {.model = "gpt2: 6 blocks of width 384",
          .parameters = 10745088,
          .precision = "FP16, weights fp32_master, moments fp32",
          .data = "10,741,003 tokens to train on, 565,210 held out",
          .folder = "runs/first",
          .steps = steps,
          .items_per_step = 8192,
          .threads = 2};
}

StepRecord record_of(int64_t step, double seconds) {
  return {.step = step,
          .seconds = seconds,
          .loss = 3.21449,
          .lr = 3e-4,
          .grad_norm = 1.2345,
          .items = 8192,
          .items_per_second = 12345,
          .loss_scale = 65536,
          .stalled_share = 0.12,
          .share_of_peak = 0.414};
}

StepRecord skipped_of(int64_t step, double seconds, double loss_scale) {
  StepRecord record = record_of(step, seconds);
  record.skipped = true;
  record.parameter = "h.5.mlp.weight";
  record.why = "skipped: the gradient of h.5.mlp.weight is not finite at loss scale " +
               std::to_string((int)loss_scale);
  record.loss_scale = loss_scale;
  record.grad_norm = std::numeric_limits<double>::infinity();
  return record;
}

/// What a terminal shows: it knows \r, \n, ESC [ K and colours, and begins a new row where one is full.
class Terminal {
 public:
  explicit Terminal(size_t columns) : columns_(columns) {}

  void feed(std::string_view text) {
    for (size_t at = 0; at < text.size(); ++at) {
      const char letter = text[at];
      if (letter == '\r') {
        column_ = 0;
      } else if (letter == '\n') {
        rows_.emplace_back();
        column_ = 0;
      } else if (letter == '\033') {
        const size_t end = text.find_first_of("Km", at);
        if (text[end] == 'K') rows_.back().resize(std::min(rows_.back().size(), column_));
        at = end;
      } else {
        if (column_ == columns_) {
          rows_.emplace_back();
          column_ = 0;
        }
        rows_.back().resize(std::max(rows_.back().size(), column_ + 1), ' ');
        rows_.back()[column_++] = letter;
      }
    }
  }

  const std::vector<std::string>& rows() const { return rows_; }

 private:
  size_t columns_;
  size_t column_ = 0;
  std::vector<std::string> rows_{""};
};

struct Shown {
  std::ostringstream out{};
  std::unique_ptr<TrainScreen> screen{};

  explicit Shown(ScreenMode mode, size_t columns = 200, bool colour = false)
      : screen(std::make_unique<TrainScreen>(
            out, ScreenOptions{.mode = mode, .colour = colour, .columns = [columns] { return columns; }})) {}

  /// Since the last time.
  std::string text() {
    std::string result = out.str();
    out.str("");
    return result;
  }
};

TEST(TrainScreen, PlainRunReadsLikeThis) {
  Shown shown(ScreenMode::Plain);
  shown.screen->begin(plan_of(2));
  shown.screen->step(record_of(1, 10.0));
  shown.screen->step(record_of(2, 10.5));
  shown.screen->evaluation(
      {.step = 2, .seconds = 13.7, .loss = 3.1, .items = 131072, .duration_seconds = 3.2});
  shown.screen->note(2, "checkpoint saved");
  shown.screen->end({.step = 2, .why = "all steps are done"});
  EXPECT_EQ(shown.text(),
            "model      gpt2: 6 blocks of width 384, 10.7M parameters\n"
            "precision  FP16, weights fp32_master, moments fp32\n"
            "data       10,741,003 tokens to train on, 565,210 held out\n"
            "steps      2 of 8,192 tokens, 2 threads\n"
            "folder     runs/first\n\n"
            "step 1/2  loss 3.2145  lr 3.00e-4  grad 1.23  12.3k tok/s  peak 41%  scale 65536  skips 0  "
            "stalled 12%\n"
            "step 2: held-out loss 3.1000, 131k tokens in 3.20s\n"
            "step 2: checkpoint saved\n"
            "step 2/2  loss 3.2145  lr 3.00e-4  grad 1.23  12.3k tok/s  peak 41%  scale 65536  skips 0  "
            "stalled 12%\n"
            "done after step 2, 14s: all steps are done\n"
            "a page about the run: halfstep report runs/first\n");
}

TEST(TrainScreen, ARunOfOneStepShowsItOnce) {
  Shown shown(ScreenMode::Plain);
  shown.screen->begin(plan_of(1));
  shown.text();
  shown.screen->step(record_of(1, 1.0));
  shown.screen->end({.step = 1, .why = ""});
  EXPECT_EQ(shown.text(),
            "step 1/1  loss 3.2145  lr 3.00e-4  grad 1.23  12.3k tok/s  peak 41%  scale 65536  skips 0  "
            "stalled 12%\n"
            "done after step 1, 1.00s\n"
            "a page about the run: halfstep report runs/first\n");
}

TEST(TrainScreen, ARunThatWasDoneSaysSoAndWhereItsModelIs) {
  const testing::ScratchFolder scratch;
  std::filesystem::create_directories(scratch.path() / "model");
  RunPlan plan = plan_of(2);
  plan.steps_done = 2;
  plan.folder = scratch.path();
  Shown shown(ScreenMode::Plain);
  shown.screen->begin(plan);
  shown.text();
  shown.screen->end({.step = 2, .why = "all steps were taken"});
  EXPECT_EQ(
      shown.text(),
      "this run is already done: all 2 steps were taken. Continue it with a higher train.steps, or start "
      "another run in another folder\n"
      "the model is in " +
          plan.folder +
          "/model\n"
          "a page about the run: halfstep report " +
          plan.folder + "\n");
}

TEST(TrainScreen, LineOnATerminalDropsTheLeastImportantFirst) {
  const std::vector<std::pair<size_t, std::string>> lines{
      {9, "step   1"},
      {40, "step   12/5000  loss 3.2145  ETA 41m34s"},
      {60, "step   12/5000  loss 3.2145  12.3k tok/s  ETA 41m34s"},
      {80, "step   12/5000  loss 3.2145  lr 3.00e-4  grad 1.23  12.3k tok/s  ETA 41m34s"},
      {120,
       "step   12/5000  loss 3.2145  lr 3.00e-4  grad 1.23  12.3k tok/s  peak 41%  scale 65536  stalled 12%  "
       "ETA "
       "41m34s"},
      {200,
       "step   12/5000  loss 3.2145  lr 3.00e-4  grad 1.23  12.3k tok/s  peak 41%  scale 65536  skips 0  "
       "stalled "
       "12%  ETA 41m34s"}};
  for (const auto& [columns, line] : lines) {
    Shown shown(ScreenMode::Terminal, columns);
    shown.screen->begin(plan_of(5000));
    shown.screen->step(record_of(11, 10.0));
    shown.text();
    shown.screen->step(record_of(12, 10.5));
    EXPECT_EQ(shown.text(), "\r" + line + "\033[K");
  }
}

TEST(TrainScreen, LiveLineStaysOneRowAtAnyWidthAndWhatIsToldStandsAbove) {
  for (size_t columns = 1; columns <= 220; ++columns) {
    Shown shown(ScreenMode::Terminal, columns, /*colour=*/true);
    Terminal terminal(columns);
    shown.screen->step(record_of(1, 1.0));
    terminal.feed(shown.text());
    for (int64_t step = 2; step <= 5; ++step) {
      shown.screen->step(record_of(step, static_cast<double>(step)));
      terminal.feed(shown.text());
      EXPECT_EQ(terminal.rows().size(), 1u) << columns;
    }
    shown.screen->note(5, "saved");
    terminal.feed(shown.text());
    if (columns < 15) continue;
    ASSERT_EQ(terminal.rows().size(), 2u) << columns;
    EXPECT_EQ(terminal.rows()[0], "step 5: saved");
    EXPECT_TRUE(terminal.rows()[1].starts_with("step 5/0")) << terminal.rows()[1];
  }
}

TEST(TrainScreen, WindowIsAskedAgainForEveryLine) {
  size_t columns = 200;
  std::ostringstream out;
  TrainScreen screen(out, {.mode = ScreenMode::Terminal, .columns = [&] { return columns; }});
  screen.step(record_of(1, 1.0));
  out.str("");
  columns = 30;
  screen.step(record_of(2, 2.0));
  EXPECT_LE(out.str().size(), 29 + std::string("\r\033[K").size());
}

TEST(TrainScreen, TerminalIsRedrawnTenTimesASecondAtMostAndShowsTheLastStep) {
  Shown shown(ScreenMode::Terminal);
  shown.screen->begin(plan_of(1000));
  int drawn = 0;
  for (int64_t step = 1; step <= 1000; ++step) {
    shown.text();
    shown.screen->step(record_of(step, 0.002 * static_cast<double>(step)));
    drawn += shown.out.str().empty() ? 0 : 1;
  }
  EXPECT_LE(drawn, 22);  // 2 s, the first and the last
  EXPECT_GE(drawn, 19);
  EXPECT_NE(shown.out.str().find("step 1000/1000"), std::string::npos);
}

TEST(TrainScreen, AfterARollbackItGoesOnShowingSteps) {
  for (const ScreenMode mode : {ScreenMode::Terminal, ScreenMode::Plain}) {
    Shown shown(mode);
    shown.screen->begin(plan_of(1000));
    for (int64_t step = 1; step <= 500; ++step)
      shown.screen->step(record_of(step, 100.0 * static_cast<double>(step)));
    shown.text();
    shown.screen->step(record_of(401, 40100.0));
    EXPECT_NE(shown.text().find("401"), std::string::npos);
  }
}

TEST(TrainScreen, PlainLogsStayShort) {
  const auto lines_of = [](int64_t steps, double step_seconds) {
    Shown shown(ScreenMode::Plain);
    shown.screen->begin(plan_of(steps));
    shown.text();
    for (int64_t step = 1; step <= steps; ++step)
      shown.screen->step(record_of(step, step_seconds * static_cast<double>(step)));
    const std::string text = shown.text();
    return std::count(text.begin(), text.end(), '\n');
  };
  EXPECT_EQ(lines_of(100'000, 0.5), 20);  // 14 hours: one a twentieth
  EXPECT_EQ(lines_of(1000, 0.03), 3);     // 30 s: one in 10 s
}

TEST(TrainScreen, ASkippedStepSaysWhichParameterWhyAndWhatTheScaleBecame) {
  Shown shown(ScreenMode::Plain);
  shown.screen->begin(plan_of(1000));
  shown.screen->step(record_of(1, 1.0));
  shown.text();
  shown.screen->step(skipped_of(2, 2.0, 65536));
  StepRecord next = record_of(3, 3.0);
  next.loss_scale = 32768;
  shown.screen->step(next);
  EXPECT_EQ(
      shown.text(),
      "step 2 skipped: the gradient of h.5.mlp.weight is not finite at loss scale 65536; the loss scale is "
      "now 32768\n");
  StepRecord patient = skipped_of(4, 4.0, 32768);
  patient.why = "a gradient is not finite";
  shown.screen->step(patient);
  next.step = 5;
  shown.screen->step(next);
  EXPECT_EQ(shown.text(),
            "step 4 skipped: a gradient is not finite (h.5.mlp.weight); the loss scale stays 32768\n");
}

TEST(TrainScreen, ManySkippedStepsInARowAreOneLine) {
  Shown shown(ScreenMode::Plain);
  shown.screen->begin(plan_of(1000));
  shown.screen->step(record_of(1, 0.1));
  shown.text();
  double scale = 65536;
  for (int64_t step = 2; step <= 6; ++step, scale /= 2)
    shown.screen->step(skipped_of(step, 0.1 * static_cast<double>(step), scale));
  StepRecord next = record_of(7, 0.7);
  next.loss_scale = scale;
  shown.screen->step(next);
  EXPECT_EQ(
      shown.text(),
      "5 steps skipped, 2 to 6; the last: the gradient of h.5.mlp.weight is not finite at loss scale 4096; "
      "the loss scale is now 2048\n");
}

TEST(TrainScreen, SkipsThatDoNotEndAreToldWhileTheyLastAndAtTheEnd) {
  Shown shown(ScreenMode::Plain);
  shown.screen->begin(plan_of(1000));
  shown.screen->step(record_of(1, 1.0));
  shown.text();
  for (int64_t step = 2; step <= 13; ++step)
    shown.screen->step(skipped_of(step, static_cast<double>(step), 1));
  EXPECT_TRUE(shown.text().starts_with("10 steps skipped, 2 to 11; the last: "));
  shown.screen->end({.outcome = RunOutcome::Diverged, .step = 13, .why = "12 steps in a row were skipped"});
  const std::string text = shown.text();
  EXPECT_TRUE(text.starts_with("2 steps skipped, 12 to 13; the last: ")) << text;
  EXPECT_TRUE(text.ends_with("diverged after step 13, 13s: 12 steps in a row were skipped\n")) << text;
  EXPECT_NE(text.find("skips 12"), std::string::npos);
}

TEST(TrainScreen, WhatIsNotFiniteIsShown) {
  Shown shown(ScreenMode::Plain);
  StepRecord record = record_of(1, 1.0);
  record.loss = std::numeric_limits<double>::quiet_NaN();
  record.grad_norm = std::numeric_limits<double>::infinity();
  shown.screen->step(record);
  EXPECT_NE(shown.text().find("loss NaN     lr 3.00e-4  grad Inf "), std::string::npos);
}

TEST(TrainScreen, AnFp32RunHasNoScale) {
  Shown shown(ScreenMode::Plain);
  StepRecord record = record_of(1, 1.0);
  record.loss_scale.reset();
  shown.screen->step(record);
  const std::string text = shown.text();
  EXPECT_EQ(text.find("scale"), std::string::npos);
  EXPECT_EQ(text.find("skips"), std::string::npos);
}

TEST(TrainScreen, EvaluationsSayHowTheLossMoved) {
  Shown shown(ScreenMode::Plain);
  RunPlan plan = plan_of(10);
  plan.unit = "images";
  shown.screen->begin(plan);
  shown.text();
  EvaluationRecord record{.step = 5, .loss = 0.5, .accuracy = 0.81, .items = 10000, .duration_seconds = 75};
  shown.screen->evaluation(record);
  record.loss = 0.4;
  record.accuracy = 0.9123;
  shown.screen->evaluation(record);
  EXPECT_EQ(shown.text(),
            "step 5: held-out loss 0.5000, 81.00% right, 10.0k images in 1m15s\n"
            "step 5: held-out loss 0.4000 (-0.1000), 91.23% right, 10.0k images in 1m15s\n");
}

TEST(TrainScreen, SamplesKeepTheirLinesAndCannotMoveTheCursor) {
  Shown shown(ScreenMode::Plain);
  shown.screen->sample({.step = 5, .prompt = "The ", .text = "ship\nsank.\033[2J\n"});
  EXPECT_EQ(shown.text(), "step 5: the model writes\n    The ship\n    sank.\uFFFD[2J\n");
}

TEST(TrainScreen, WithoutColourOrTerminalThereAreNoEscapeCodes) {
  for (const bool terminal : {false, true}) {
    Shown shown(terminal ? ScreenMode::Terminal : ScreenMode::Plain);
    shown.screen->begin(plan_of(3));
    shown.screen->step(record_of(1, 1.0));
    shown.screen->step(skipped_of(2, 2.0, 65536));
    shown.screen->step(record_of(3, 3.0));
    shown.screen->evaluation({.step = 3, .loss = 1});
    shown.screen->sample({.step = 3, .prompt = "", .text = "x"});
    shown.screen->end({.step = 3, .why = ""});
    std::string text = shown.text();
    for (size_t at; terminal && (at = text.find("\033[K")) != std::string::npos;) text.erase(at, 3);
    EXPECT_EQ(text.find('\033'), std::string::npos);
    EXPECT_EQ(text.find('\r') != std::string::npos, terminal);
  }
}

TEST(TrainScreen, ARunThatIsBrokenOffLeavesTheCursorOnALineOfItsOwn) {
  Shown shown(ScreenMode::Terminal);
  shown.screen->step(record_of(1, 1.0));
  shown.screen.reset();
  EXPECT_TRUE(shown.text().ends_with("\n"));
}

TEST(TrainScreen, JsonIsTheLogsRecordsAndNothingElse) {
  Shown shown(ScreenMode::Json);
  shown.screen->begin(plan_of(2));
  shown.screen->step(skipped_of(1, 1.5, 65536));
  shown.screen->evaluation({.step = 1, .seconds = 2.0, .loss = 3});
  shown.screen->sample({.step = 1, .seconds = 2.5, .prompt = "The ", .text = "\n"});
  shown.screen->note(1, "checkpoint \"saved\"");
  shown.screen->end({.outcome = RunOutcome::Interrupted, .step = 1, .why = "SIGTERM"});
  std::istringstream lines(shown.text());
  std::vector<nlohmann::json> records;
  for (std::string line; std::getline(lines, line);) records.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(records.size(), 6u);
  EXPECT_EQ(records[0]["kind"], "plan");
  EXPECT_EQ(records[0]["parameters"], 10745088);
  EXPECT_EQ(records[1]["grad_norm"], "Infinity");
  EXPECT_EQ(records[1]["parameter"], "h.5.mlp.weight");
  EXPECT_EQ(records[2]["kind"], "evaluation");
  EXPECT_EQ(records[3]["text"], "\n");
  EXPECT_EQ(records[4]["text"], "checkpoint \"saved\"");
  EXPECT_EQ(records[4]["seconds"], 2.5);
  EXPECT_EQ(records[5]["outcome"], "interrupted");
}

TEST(TrainScreen, PipesArePlain) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const ScreenOptions options = screen_options(ends[1], false);
  EXPECT_EQ(options.mode, ScreenMode::Plain);
  EXPECT_FALSE(options.colour);
  EXPECT_EQ(screen_options(ends[1], true).mode, ScreenMode::Json);
  close(ends[0]);
  close(ends[1]);
}

TEST(TrainScreen, TerminalsAreInColourAndAskedForTheirWidthUnlessTheEnvironmentRefuses) {
  int keyboard = -1, terminal = -1;
  winsize size{.ws_row = 24, .ws_col = 97, .ws_xpixel = 0, .ws_ypixel = 0};
  ASSERT_EQ(openpty(&keyboard, &terminal, nullptr, nullptr, &size), 0);
  setenv("TERM", "xterm", 1);
  unsetenv("NO_COLOR");
  ScreenOptions options = screen_options(terminal, false);
  EXPECT_EQ(options.mode, ScreenMode::Terminal);
  EXPECT_TRUE(options.colour);
  EXPECT_EQ(options.columns(), 97u);
  size.ws_col = 61;
  ioctl(terminal, TIOCSWINSZ, &size);
  EXPECT_EQ(options.columns(), 61u);
  size.ws_col = 0;  // a serial line does not know
  ioctl(terminal, TIOCSWINSZ, &size);
  EXPECT_EQ(options.columns(), 80u);

  setenv("NO_COLOR", "", 1);  // no-color.org: empty does not count
  EXPECT_TRUE(screen_options(terminal, false).colour);
  setenv("NO_COLOR", "1", 1);
  EXPECT_FALSE(screen_options(terminal, false).colour);
  EXPECT_EQ(screen_options(terminal, false).mode, ScreenMode::Terminal);
  setenv("TERM", "dumb", 1);
  EXPECT_EQ(screen_options(terminal, false).mode, ScreenMode::Plain);
  close(keyboard);
  close(terminal);
}

}  // namespace
}  // namespace halfstep::cli
