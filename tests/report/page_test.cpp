// The pages, as parsers of others see them.
#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>

#include "report/run_report.h"
#include "report/synthetic_run.h"
#include "support/python.h"
#include "support/sanitized.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

using nlohmann::json;
using testing::ScratchFolder;
using testing::SyntheticRun;

json ask(const char* what, const std::filesystem::path& where) {
  return testing::ask_python("tests/report/page_reader.py", {{what, where.string()}});
}

struct Made {
  json page, log;
  std::string html;
};

Made report_of(const SyntheticRun& run) {
  const ScratchFolder folder;
  testing::write_synthetic_run(folder.path(), run);
  Made made{
      .page = {}, .log = ask("log", folder / "log.jsonl"), .html = report_html(read_run(folder.path()))};
  write_page(folder / "report.html", made.html);
  made.page = ask("page", folder / "report.html");
  return made;
}

void expect_stands_alone(const json& page) {
  EXPECT_EQ(page["faults"], json::array());
  EXPECT_EQ(page["references"], json::array({"http://www.w3.org/2000/svg"}));
  EXPECT_EQ(page["fetches"], json::array());
  EXPECT_EQ(page["handlers"], json::array());
  EXPECT_EQ(page["scripts"], 1);
}

const json& plot(const json& page, const std::string& title) {
  for (const json& data : page["data"])
    if (data["title"] == title) return data;
  ADD_FAILURE() << "no plot is called " << title;
  static const json none = {{"series", json::array({json::object()})}};
  return none;
}

double number(const json& value) {
  if (value.is_number()) return value.get<double>();
  return value == "Infinity" ? INFINITY : std::nan("");
}

/// Six digits are written.
void expect_close(double drawn, double logged) { EXPECT_NEAR(drawn, logged, 1e-5 * std::abs(logged)); }

const SyntheticRun kFp16{.steps = 500, .compute = "fp16", .resumed_after = 200};

TEST(ReportPage, IsValidAndStandsAlone) {
  for (const SyntheticRun& run :
       {kFp16, SyntheticRun{.steps = 300, .planned_steps = 900, .compute = "fp16", .nan_from = 250},
        SyntheticRun{
            .steps = 1, .planned_steps = 9, .evaluates = false, .samples = false, .has_memory = false},
        SyntheticRun{.steps = 40, .planned_steps = 90, .ends = false, .cut_last_line = true}}) {
    const Made made = report_of(run);
    expect_stands_alone(made.page);
    EXPECT_GE(made.page["drawings"], 4);
  }
}

TEST(ReportPage, EveryPlottedNumberIsTheLogs) {
  const Made made = report_of(kFp16);
  std::map<int64_t, json> steps;
  for (const json& record : made.log)
    if (record["kind"] == "step") steps[record["step"]] = record;
  const auto compare = [&](const std::string& title, double factor, auto value) {
    const json& series = plot(made.page, title)["series"][0];
    ASSERT_EQ(series["steps"].size(), steps.size()) << title;
    for (size_t i = 0; i < series["steps"].size(); ++i) {
      const double logged = number(value(steps.at(series["steps"][i])));
      if (std::isfinite(logged))
        expect_close(series["value"][i].get<double>(), factor * logged);
      else
        EXPECT_TRUE(series["value"][i].is_null()) << title;
    }
  };
  const auto field = [](const char* name) { return [name](const json& record) { return record[name]; }; };
  compare("Loss", 1, field("loss"));
  compare("Learning rate", 1, field("lr"));
  compare("Gradient norm", 1, field("grad_norm"));
  compare("Loss scale", 1, field("loss_scale"));
  compare("Updates too small to move a weight", 100, field("stalled_share"));
  compare("Speed", 1, field("items_per_second"));
  compare("Share of the machine's peak", 100, field("share_of_peak"));
  compare("Memory of tensors", 1e-6, [](const json& record) { return record["memory"]["peak_bytes"]; });
}

TEST(ReportPage, PhasesAreTheMeansOfTheirSteps) {
  const Made made = report_of(kFp16);
  for (const json& series : plot(made.page, "Time of a step")["series"])
    for (size_t i = 0; i < series["steps"].size(); ++i) {
      double sum = 0;
      int64_t count = 0;
      for (const json& record : made.log) {
        if (record["kind"] != "step" || record["step"] < series["steps"][i] ||
            record["step"] > series["to"][i])
          continue;
        sum += record["phases"][series["name"].get<std::string>()].get<double>();
        ++count;
      }
      expect_close(series["mean"][i].get<double>(), 1e3 * sum / static_cast<double>(count));
    }
}

TEST(ReportPage, TellsTheVerdictAndEverySkippedStepWithItsParameter) {
  const Made made = report_of(kFp16);
  const std::string words = made.page["words"];
  int64_t skipped = 0;
  double last = 0;
  for (const json& record : made.log) {
    if (record["kind"] != "step") continue;
    if (record["step"] > 450) last += record["loss"].get<double>() / 50;
    if (!record["skipped"].get<bool>()) continue;
    ++skipped;
    EXPECT_NE(words.find(record["parameter"].get<std::string>()), std::string::npos);
  }
  ASSERT_GT(skipped, 3);
  EXPECT_NE(words.find(std::to_string(skipped) + " steps were skipped"), std::string::npos)
      << words.substr(0, 600);
  char loss[64];
  std::snprintf(loss, sizeof loss, "to %.3f, the mean of the last 50 steps", last);
  EXPECT_NE(words.find(loss), std::string::npos) << loss << "\n" << words.substr(0, 600);
  EXPECT_NE(words.find("gpt2, 6 blocks of width 384, fp16"), std::string::npos);
  EXPECT_NE(words.find("interrupted: SIGTERM: saved after step 200"), std::string::npos);
  for (const char* heading :
       {"Loss cross-entropy, nats", "Learning rate factor on the update", "Gradient norm L2, before clipping",
        "Loss scale factor on the loss", "Skipped steps", "Time by phase mean of a step", "Memory by class",
        "Samples", "Evaluations", "Notes", "Configuration", "Machine"})
    EXPECT_NE(std::ranges::count(made.page["headings"], json(heading)), 0) << heading;
}

TEST(ReportPage, EveryAxisHasANameAndAUnit) {
  const Made made = report_of(kFp16);
  EXPECT_GE(made.page["data"].size(), 9u);
  for (const json& data : made.page["data"]) {
    EXPECT_NE(data["title"], "");
    EXPECT_NE(data["unit"], "") << data["title"];
  }
  size_t plots = 0, steps = 0;
  for (size_t at = 0; (at = made.html.find("<div class=\"frame\"", at)) != std::string::npos; ++at) ++plots;
  for (size_t at = 0; (at = made.html.find("<div class=\"corner\">step</div>", at)) != std::string::npos;
       ++at)
    ++steps;
  EXPECT_EQ(plots, made.page["data"].size());
  EXPECT_EQ(steps, plots);
}

TEST(ReportPage, WhatIsNotFiniteIsMarked) {
  const Made made = report_of({.steps = 300, .compute = "bf16", .nan_from = 250});
  const std::string words = made.page["words"];
  EXPECT_NE(words.find("NaN or Inf: 51 steps"), std::string::npos);
  EXPECT_NE(words.find("The loss was NaN or infinite in 51 steps"), std::string::npos);
  EXPECT_NE(made.html.find("<path class=\"bad\""), std::string::npos);
  EXPECT_EQ(report_of(kFp16).html.find("The loss was NaN"), std::string::npos);
}

// Everything that a log can hold of others' words tries to be HTML.
TEST(ReportPage, AHostileLogInjectsNothing) {
  const ScratchFolder folder;
  const std::string evil =
      "</script></style></pre><script>alert(1)</script><img src=x onerror=alert(2)>\"'><a "
      "href=\"http://x\">&lt;\x1b[2J"
      "\xe2\x80\xae<!--";
  RunLog log =
      RunLog::create(folder.path(), {.configuration = evil, .machine = {{evil, evil}}, .unit = evil});
  for (int64_t step = 1; step <= 3; ++step)
    log.step({.step = step,
              .loss = 2.0,
              .lr = 1.0,
              .grad_norm = 1.0,
              .items = 1,
              .skipped = true,
              .why = evil,
              .parameter = evil,
              .memory = MemoryRecord{
                  .live_bytes = 1, .peak_bytes = 2, .classes = {{.name = evil, .peak_bytes = 2}}}});
  log.sample({.step = 3, .prompt = evil, .text = evil});
  log.note(3, 0, evil);
  log.evaluation({.step = 3, .loss = 1.0});
  log.end(3, 0, evil, evil);
  RunHistory run = read_run(folder.path());
  run.name = evil;
  run.unknown_kinds[evil] = 1;
  const RunHistory runs[] = {run, run};
  for (const std::string& html : {report_html(run), compare_html(runs)}) {
    write_page(folder / "evil.html", html);
    const json page = ask("page", folder / "evil.html");
    EXPECT_EQ(page["faults"], json::array());
    EXPECT_EQ(page["scripts"], 1);
    EXPECT_EQ(page["handlers"], json::array());
    EXPECT_EQ(page["fetches"], json::array());
    for (const char* tag : {"img", "a"}) EXPECT_EQ(std::ranges::count(page["tags"], json(tag)), 0) << tag;
    EXPECT_NE(page["words"].get<std::string>().find("<script>alert(1)</script>"), std::string::npos);
    EXPECT_EQ(html.find('\x1b'), std::string::npos);
    EXPECT_EQ(html.find("\xe2\x80\xae"), std::string::npos);
  }
}

double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

TEST(ReportPage, AHundredThousandStepsAreOneSmallPageInTwoSeconds) {
  const ScratchFolder folder;
  SyntheticRun run{.steps = 100'000, .compute = "fp16", .resumed_after = 40'000};
  testing::write_synthetic_run(folder.path(), run);
  // Another program on the same core's caches is not this one's time: the fastest of a few counts.
  std::string html;
  double seconds = std::numeric_limits<double>::infinity();
  for (int attempt = 0; attempt < 4 && seconds >= 2.0; ++attempt) {
    const double before = cpu_seconds();
    html = report_html(read_run(folder.path()));
    seconds = std::min(seconds, cpu_seconds() - before);
  }

  RecordProperty("cpu_milliseconds", static_cast<int>(1e3 * seconds));
  EXPECT_LT(html.size(), 1'000'000u);
#ifdef NDEBUG
  if (!testing::kSanitized) {
    EXPECT_LT(seconds, 2.0);
  }
#endif
  write_page(folder / "report.html", html);
  const json page = ask("page", folder / "report.html");
  expect_stands_alone(page);
  // No spike is lost: least and greatest of the columns are those of the run.
  const json& series = plot(page, "Loss")["series"][0];
  const auto losses = testing::synthetic_losses(run);
  expect_close(std::ranges::max(series["greatest"]).get<double>(), std::ranges::max(losses));
  expect_close(std::ranges::min(series["least"]).get<double>(), std::ranges::min(losses));
}

/// A run with so many layers and looks, whose gradients are `scale` times those of the first layer each.
RunHistory looked_at(int64_t layers, int64_t looks, const std::string& name) {
  const ScratchFolder folder;
  testing::write_synthetic_run(folder.path(), {});
  RunHistory run = read_run(folder.path());
  for (int64_t look = 0; look < looks; ++look)
    for (int64_t layer = 0; layer < layers; ++layer) {
      TensorStats stats{.count = 300, .zeros = 100, .sum = 0, .amax = 0x1.8p-10f};
      stats.exponents[static_cast<size_t>(127 - 27)] = 50;  // zero in FP16
      stats.exponents[static_cast<size_t>(127 - 10)] = 150;
      stats.exponents[0] = 100;
      run.probes.push_back({.step = 50 * (look + 1),
                            .role = look % 2 == 0 ? "gradient" : "activation",
                            .name = name + std::to_string(layer),
                            .packed = stats.packed()});
    }
  return run;
}

TEST(ReportPage, ShowsTheMagnitudesOfTensorsAndWhatFp16WouldLose) {
  const ScratchFolder folder;
  write_page(folder / "report.html", report_html(looked_at(3, 4, "layers.")));
  const json page = ask("page", folder / "report.html");
  expect_stands_alone(page);
  const std::string html = report_html(looked_at(3, 4, "layers."));
  for (const char* text :
       {"Gradients, with their loss scale, step 150", "Outputs of layers, step 200", "FP16 holds",
        "FP16 would lose", "too large, 16.7% become zero", "layers.2, step 150: ", "magnitude"})
    EXPECT_NE(html.find(text), std::string::npos) << text;
}

TEST(ReportPage, ManyLayersAndLooksAreABoundedPart) {
  const std::string name = "<b>\"layers\"</b>" + std::string(300, 'x') + ".";
  const std::string html = report_html(looked_at(200, 60, name));
  EXPECT_LT(html.size(), 1'500'000u);
  EXPECT_EQ(html.find("<b>\"layers"), std::string::npos);
  EXPECT_NE(html.find("The 24 of 200 with the largest share that becomes zero or is too large in "),
            std::string::npos);
  EXPECT_NE(html.find("; 176 are left out. The bars are of all."), std::string::npos);
}

/// The first drawing with this label.
std::string drawing_of(const std::string& html, const std::string& label) {
  const size_t begin = html.find("aria-label=\"" + label);
  return begin == std::string::npos ? "" : html.substr(begin, html.find("</svg>", begin) - begin);
}

TEST(ReportPage, OfManyLayersTheSickOnesAreDrawn) {
  RunHistory run = looked_at(200, 1, "layers.");
  const auto sick = [&](size_t layer, TensorStats stats) { run.probes[layer].packed = stats.packed(); };
  TensorStats too_large{.count = 300, .sum = 0, .amax = 0x1.8p17f};
  too_large.exponents[static_cast<size_t>(127 + 17)] = 300;
  too_large.saturated[1] = 300;  // FP16
  sick(190, too_large);
  TensorStats not_numbers{.count = 300, .nans = 300};
  not_numbers.exponents[255] = 300;
  sick(150, not_numbers);
  TensorStats all_vanish{.count = 300, .sum = 0, .amax = 0x1.8p-28f};
  all_vanish.exponents[static_cast<size_t>(127 - 28)] = 300;
  sick(90, all_vanish);
  const std::string drawing = drawing_of(report_html(run), "Magnitudes of gradient values");
  for (const char* name : {">layers.90<", ">layers.150<", ">layers.190<", "300 of 300 are NaN or Inf"})
    EXPECT_NE(drawing.find(name), std::string::npos) << name;
  // In the model's order, and 21 of the others, which lose the same.
  EXPECT_LT(drawing.find(">layers.90<"), drawing.find(">layers.150<"));
  EXPECT_NE(drawing.find(">layers.20<"), std::string::npos);
  EXPECT_EQ(drawing.find(">layers.21<"), std::string::npos);
}

TEST(ReportPage, ALongNameKeepsItsNumberAndItsEnd) {
  RunHistory run = looked_at(3, 1, "transformer.h.");
  for (RunHistory::Probe& probe : run.probes) probe.name += ".attention.c_attn.weight";
  const std::string drawing = drawing_of(report_html(run), "Magnitudes of gradient values");
  for (const char* name : {">h.0.a.c_attn.weight<", ">h.1.a.c_attn.weight<", ">h.2.a.c_attn.weight<",
                           "<title>transformer.h.2.attention.c_attn.weight</title>"})
    EXPECT_NE(drawing.find(name), std::string::npos) << name;
}

TEST(ReportPage, PicturesOfTensorsFitATelephone) {
  const std::string html = report_html(looked_at(3, 4, "layers."));
  for (const std::string label : {"Magnitudes of gradient values", "Magnitudes of activation values"}) {
    const std::string drawing = drawing_of(html, label);
    const size_t at = drawing.find("min-width:");
    ASSERT_NE(at, std::string::npos) << label;
    EXPECT_LE(std::stod(drawing.substr(at + 10)), 390 - 2 * 14) << "of its 390 pixels 14 are a margin, twice";
    EXPECT_NE(drawing.find("width:100%"), std::string::npos);
  }
}

TEST(ReportPage, IsForTheLightAndTheDarkForScreensAndPaper) {
  const std::string html = report_of(kFp16).html;
  for (const char* words :
       {"color-scheme: light dark", "@media (prefers-color-scheme: dark)", "@media (max-width: 820px)",
        "@media print", "name=\"viewport\"", "Content-Security-Policy"})
    EXPECT_NE(html.find(words), std::string::npos) << words;
}

TEST(ComparePage, IsValidAndShowsEveryRun) {
  const ScratchFolder folder;
  std::vector<RunHistory> runs;
  for (const auto& [name, run] : std::map<std::string, SyntheticRun>{
           {"a", {.own_noise = 0.0005}},
           {"b", {.compute = "fp16", .own_seed = 2, .own_noise = 0.0005, .nan_from = 990}},
           {"c", {.batch_seed = 5}}}) {
    std::filesystem::create_directories(folder / name);
    testing::write_synthetic_run(folder / name, run);
    runs.push_back(read_run(folder / name));
  }
  write_page(folder / "compare.html", compare_html(runs));
  const json page = ask("page", folder / "compare.html");
  expect_stands_alone(page);
  const std::string words = page["words"];
  EXPECT_NE(words.find(compare_runs(runs).sentence), std::string::npos);
  EXPECT_NE(words.find("precision.compute \"bf16\" \"fp16\" \"bf16\""), std::string::npos)
      << "of the configurations";
  EXPECT_NE(words.find("Not here, for other batches: c."), std::string::npos);
  EXPECT_NE(words.find("NaN or Inf: 11 steps"), std::string::npos);
  EXPECT_EQ(plot(page, "Loss")["series"].size(), 6u);  // three curves, three rows of dots
}

}  // namespace
}  // namespace halfstep
