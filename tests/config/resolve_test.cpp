#include <gtest/gtest.h>
#include <halfstep/run_config.h>
#include <stdlib.h>

#include <cmath>
#include <cstdio>
#include <random>

#include "support/error_of.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

using testing::error_of;

ConfigText file(std::string text) { return {"run.toml", std::move(text)}; }

TEST(Resolve, FlagBeforeEnvironmentBeforeFileBeforePresetBeforeDefault) {
  ConfigSources sources{.preset = "tiny"};
  const auto lr = [&] {
    const ResolvedConfig resolved = resolve_config(sources);
    return std::pair(resolved.config.optimizer.lr, resolved.origin("optimizer.lr"));
  };
  EXPECT_EQ(lr(), std::pair(1e-3, std::string("preset tiny")));
  sources.file = file("\n[optimizer]\nlr = 2e-3\n");
  EXPECT_EQ(lr(), std::pair(2e-3, std::string("run.toml:3")));
  sources.environment = {{"HALFSTEP_OPTIMIZER__LR", "4e-3"}};
  EXPECT_EQ(lr(), std::pair(4e-3, std::string("HALFSTEP_OPTIMIZER__LR")));
  sources.set = {"optimizer.lr=5e-3", "optimizer.lr=6e-3"};
  EXPECT_EQ(lr(), std::pair(6e-3, std::string("--set")));  // the last flag
  EXPECT_EQ(resolve_config(sources).origin("train.seed"), "default");
}

TEST(Resolve, EveryPresetIsAccepted) {
  for (const ConfigPreset& preset : config_presets())
    EXPECT_EQ(error_of([&] { (void)resolve_config({.preset = std::string(preset.name)}); }), "no error")
        << preset.name;
}

TEST(Resolve, WhatContradictsAPresetTakesThePlaceOfItsValueWithANote) {
  struct Flag {
    std::string set;
    std::vector<std::string> left_out;
  };
  const std::vector<Flag> flags = {
      {"optimizer.schedule=constant", {"optimizer.final_lr"}},
      {"optimizer.kind=sgd", {"optimizer.beta2"}},
      {"train.steps=10", {"optimizer.warmup_steps"}},
      {"data.validation=held-out.txt", {"data.validation_fraction"}},
      {"data.sequence_length=256", {"model.context"}},
      {"model.from=folder",
       {"model.layers", "model.width", "model.heads", "model.context", "data.tokenizer"}},
      {"optimizer.lr=1e-5", {"optimizer.final_lr"}},
  };
  for (const Flag& flag : flags) {
    const ResolvedConfig resolved = resolve_config({.preset = "tiny", .set = {flag.set}});
    ASSERT_EQ(resolved.notes.size(), flag.left_out.size()) << flag.set;
    for (std::size_t i = 0; i < flag.left_out.size(); ++i) {
      EXPECT_TRUE(resolved.notes[i].starts_with(flag.left_out[i] + " of preset tiny is left out: it "))
          << resolved.notes[i];
      EXPECT_EQ(resolved.origin(flag.left_out[i]), "default");
    }
    // What is left goes together: it reads back alike.
    const ResolvedConfig again = resolve_config({.file = file(to_toml(resolved, false))});
    EXPECT_EQ(again.config, resolved.config) << flag.set;
  }
  EXPECT_TRUE(resolve_config({.preset = "tiny", .set = {"optimizer.lr=2e-3"}}).notes.empty());
  // A value that cannot be done without stays, and so does the fault.
  EXPECT_TRUE(error_of([] {
                (void)resolve_config({.preset = "tiny", .set = {"model.heads=5"}});
              }).starts_with("preset tiny: model.width is 128, not a multiple of model.heads (--set), 5."));
  // A file is somebody's own words: it is not corrected.
  const ConfigText own = file("[optimizer]\nfinal_lr = 1e-5\n");
  EXPECT_TRUE(error_of([&] {
                (void)resolve_config({.preset = "tiny", .file = own, .set = {"optimizer.schedule=constant"}});
              }).starts_with("run.toml:2: optimizer.final_lr has no meaning with a constant schedule."));
}

TEST(Resolve, AKeyCanBeUnset) {
  ConfigSources sources{.preset = "tiny",
                        .file = file("precision.ops.softmax = \"low\"\noptimizer.eps = 1e-7\n"),
                        .unset = {"optimizer.final_lr", "optimizer.eps", "precision.ops"},
                        .set = {"optimizer.eps=1e-6"}};
  const ResolvedConfig resolved = resolve_config(sources);
  EXPECT_FALSE(resolved.config.optimizer.final_lr);
  EXPECT_EQ(resolved.origin("optimizer.final_lr"), "default");
  EXPECT_EQ(resolved.config.optimizer.eps, 1e-6);
  EXPECT_TRUE(resolved.config.precision.ops.empty());
  sources.unset = {"optimizer.final_rl"};
  EXPECT_EQ(error_of([&] { (void)resolve_config(sources); }),
            "--unset: unknown key 'optimizer.final_rl'. Did you mean 'optimizer.final_lr'?");
}

TEST(Resolve, WordsOfOthersAreUnderstood) {
  const auto error = [](std::string set) {
    return error_of([&] { (void)resolve_config({.preset = "tiny", .set = {set}}); });
  };
  EXPECT_TRUE(error("precision.compute=float16").ends_with("Did you mean 'fp16'?"));
  EXPECT_TRUE(error("precision.compute=bfloat16").ends_with("Did you mean 'bf16'?"));
  EXPECT_TRUE(error("precision.compute=fp8").ends_with("Did you mean 'fp8-delayed'?"));
  EXPECT_TRUE(error("optimizer.kind=adam").ends_with("Did you mean 'adamw'?"));
  EXPECT_TRUE(error("train.steps=1e3").ends_with("Write it without point and exponent: 1000."));
}

TEST(Resolve, FlagsAndVariablesNeedNoQuotes) {
  const RunConfig config =
      resolve_config(
          {.preset = "tiny",
           .environment = {{"HALFSTEP_PRECISION__LOSS_SCALE__INITIAL", "1024"}, {"HALFSTEP_DATA", "x"}},
           .set = {"precision.compute=fp16", "data.train=['c', \"d\"]", "run.folder=a b=c",
                   "train.sample_prompt=\"x\\ny\"", "log.tensorboard=true"}})
          .config;
  EXPECT_EQ(config.precision.compute, "fp16");
  EXPECT_EQ(config.precision.loss_scale.initial, 1024);
  EXPECT_EQ(config.data.train, (std::vector<std::string>{"c", "d"}));
  EXPECT_EQ(config.run.folder, "a b=c");
  EXPECT_EQ(config.train.sample_prompt, "x\ny");
  EXPECT_TRUE(config.log.tensorboard);
}

TEST(Resolve, OperationsOfAllSourcesAreJoined) {
  const ResolvedConfig resolved = resolve_config(
      {.preset = "tiny",
       .file = file("[precision.ops]\nsoftmax = \"low\"\n\"prod.dim_int\" = \"low\"\nsum.dim = \"stock\"\n"),
       .set = {"precision.ops.prod.dim_int=fp32"}});
  const std::map<std::string, std::string> expected = {
      {"softmax", "low"}, {"prod.dim_int", "fp32"}, {"sum.dim", "stock"}};
  EXPECT_EQ(resolved.config.precision.ops, expected);
  EXPECT_EQ(resolved.origin("precision.ops.softmax"), "run.toml:2");
  EXPECT_EQ(resolved.origin("precision.ops.prod.dim_int"), "--set");
}

TEST(Resolve, VariablesOfThisProcessAreThoseWithTwoUnderscores) {
  ::setenv("HALFSTEP_TRAIN__STEPS", "77", 1);
  ::setenv("HALFSTEP_TRAINSTEPS", "78", 1);
  const auto found = config_environment();
  ::unsetenv("HALFSTEP_TRAIN__STEPS");
  ::unsetenv("HALFSTEP_TRAINSTEPS");
  const std::vector<std::pair<std::string, std::string>> expected = {{"HALFSTEP_TRAIN__STEPS", "77"}};
  EXPECT_EQ(found, expected);
  EXPECT_EQ(resolve_config({.preset = "tiny", .environment = found}).config.train.steps, 77);
}

TEST(PrintedConfig, TellsWhereEachValueCameFrom) {
  const std::string page = to_toml(
      resolve_config({.preset = "tiny", .file = file("train.steps = 60\n"), .set = {"data.seed=7"}}), true);
  for (const char* line : {"steps = 60                              # run.toml:1\n",
                           "seed = 7                                # --set\n",
                           "layers = 4                              # preset tiny\n",
                           "accumulation = 1                        # default\n",
                           "# kv_heads                              # not given: model.heads\n"})
    EXPECT_NE(page.find(line), std::string::npos) << line << page;
}

TEST(PrintedConfig, SurvivesAFileNameThatIsNoText) {
  const ResolvedConfig resolved =
      resolve_config({.preset = "tiny", .file = ConfigText{"a\nsteps = 5 \xff", "train.seed = 3"}});
  EXPECT_EQ(resolve_config({.file = file(to_toml(resolved, true))}).config, resolved.config);
}

// TOML would read 20 digits as a whole number, and end at 19.
TEST(PrintedConfig, LargeNumbersKeepTheirExponent) {
  const ResolvedConfig resolved =
      resolve_config({.preset = "tiny", .set = {"optimizer.clip_norm=12345678901234567890.0"}});
  EXPECT_EQ(resolve_config({.file = file(to_toml(resolved, false))}).config.optimizer.clip_norm,
            12345678901234567890.0);
}

// Values at random, in range: those that resolve_config() takes must come back from what is printed, bit for
// bit.
TEST(PrintedConfig, ReadsBackAsTheSameConfig) {
  std::mt19937_64 random(20);
  int taken = 0;
  for (int round = 0; round < 4000; ++round) {
    const auto presets = config_presets();
    ConfigSources sources{.preset = std::string(presets[random() % presets.size()].name)};
    for (int setting = 0; setting < 4; ++setting) {
      const ConfigKey& key = config_keys()[random() % config_keys().size()];
      RunConfig config;
      const ConfigField field = key.field(config);
      std::string value = "a \\ \"b\" #c\t'\u00e4'";
      if (!key.words.empty()) value = std::string(key.words[random() % key.words.size()]);
      if (std::holds_alternative<bool*>(field)) value = "true";
      if (std::holds_alternative<int64_t*>(field) || std::holds_alternative<std::optional<int64_t>*>(field))
        value = std::to_string(random() % 3 * 64 + random() % 3);
      if (std::holds_alternative<double*>(field) || std::holds_alternative<std::optional<double>*>(field)) {
        char text[64];
        std::snprintf(text, sizeof text, "%.17g",
                      std::ldexp(static_cast<double>(random()), -64 - int(random() % 80)));
        value = text;
      }
      const bool is_table = std::holds_alternative<std::map<std::string, std::string>*>(field);
      sources.set.push_back(std::string(key.path) + (is_table ? ".prod.dim_int=" : "=") + value);
    }
    ResolvedConfig resolved;
    try {
      resolved = resolve_config(sources);
    } catch (const Error&) {
      continue;
    }
    ++taken;
    for (const bool with_origins : {false, true}) {
      const std::string page = to_toml(resolved, with_origins);
      ASSERT_EQ(
          error_of([&] { EXPECT_EQ(resolve_config({.file = file(page)}).config, resolved.config) << page; }),
          "no error")
          << page;
    }
  }
  EXPECT_GT(taken, 400);  // else this test shows little
}

TEST(ConfigChanges, EveryKeyThatDiffersHasASentence) {
  const auto tiny = [](std::vector<std::string> set) {
    return resolve_config({.preset = "tiny", .set = std::move(set)}).config;
  };
  const RunConfig before =
      tiny({"optimizer.beta1=0.8", "precision.ops.softmax=low", "precision.ops.sum=low"});
  EXPECT_TRUE(config_changes(before, before).empty());
  const RunConfig now = tiny({"optimizer.lr=0.5", "optimizer.clip_norm=2", "data.train=['a', 'b']",
                              "precision.ops.sum=fp32", "precision.ops.prod=low"});
  const auto told = config_changes(before, now);
  const auto tells = [&](const std::string& sentence) {
    return std::find(told.begin(), told.end(), sentence) != told.end();
  };
  EXPECT_TRUE(tells("optimizer.lr is now 0.5, was 0.001"));
  EXPECT_TRUE(tells("optimizer.beta1 is no longer given, was 0.8"));
  EXPECT_TRUE(tells("precision.ops.softmax is no longer given, was \"low\""));
  EXPECT_TRUE(tells("precision.ops.sum is now \"fp32\", was \"low\""));
  EXPECT_TRUE(tells("precision.ops.prod is now \"low\", was not given"));
  EXPECT_EQ(
      std::count_if(told.begin(), told.end(),
                    [](const std::string& text) { return text.starts_with("data.train is now [\"a\""); }),
      1);
  EXPECT_EQ(told.size(), 7U) << ::testing::PrintToString(told);
}

TEST(CheckPaths, EveryFileThatIsNotThereIsListed) {
  const testing::ScratchFolder folder;
  testing::write_text(folder / "there.txt", "x");
  ResolvedConfig resolved = resolve_config({.preset = "tiny",
                                            .file = file("data.train = ['" + (folder / "there.txt").string() +
                                                         "', 'gone.txt']\ndata.tokenizer = 'gone.json'")});
  const std::string error = error_of([&] { check_paths(resolved); });
  EXPECT_NE(error.find("2 faults"), std::string::npos) << error;
  EXPECT_NE(error.find("run.toml:1: data.train: there is no 'gone.txt'"), std::string::npos) << error;
  EXPECT_NE(error.find("run.toml:2: data.tokenizer: there is no 'gone.json'"), std::string::npos) << error;
  resolved.config.data.train.pop_back();
  resolved.config.data.tokenizer = "bytes";
  EXPECT_EQ(error_of([&] { check_paths(resolved); }), "no error");
}

TEST(ReadConfigFile, GivesTheTextOrAnError) {
  const testing::ScratchFolder folder;
  testing::write_text(folder / "run.toml", "train.steps = 1\n");
  EXPECT_EQ(read_config_file(folder / "run.toml").text, "train.steps = 1\n");
  EXPECT_NE(error_of([&] { read_config_file(folder / "gone.toml"); }), "no error");
  testing::write_text(folder / "large.toml", std::string(300'000, '#'));
  EXPECT_NE(error_of([&] { read_config_file(folder / "large.toml"); }).find("300000 bytes"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep
