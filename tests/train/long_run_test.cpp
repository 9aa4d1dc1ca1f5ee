// A run that lasts weeks: what happens around its checkpoints.
#include <gtest/gtest.h>
#include <halfstep/error.h>
#include <halfstep/token_file.h>

#include <cmath>
#include <functional>
#include <random>
#include <thread>

#include "support/tokenizer_json.h"
#include "train/trainer_fixture.h"
#include "train/watches.h"

namespace halfstep {
namespace {

using nlohmann::json;
using testing::Counter;
using testing::read_text;
using testing::TrainerTest;
using testing::write_text;
using train::DivergenceWatch;

class LongRun : public TrainerTest {
 protected:
  std::vector<double> of_steps(const std::string& name, const char* field) const {
    std::vector<double> values;
    for (const json& record : log(name))
      if (record["kind"] == "step") values.push_back(record[field].get<double>());
    return values;
  }

  bool has_note(const Counter& counter, const std::string& part) const {
    return std::any_of(counter.notes.begin(), counter.notes.end(),
                       [&](const std::string& note) { return note.find(part) != std::string::npos; });
  }

  std::string error_of(const ResolvedConfig& resolved, const std::string& name, TrainerOptions options = {}) {
    Counter counter;
    try {
      run(resolved, name, counter, options);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
};

// --- A changed configuration

TEST_F(LongRun, AChangedRateAndScheduleAreCarriedOutOnResume) {
  Counter first(4);
  run(config({"optimizer.lr=1e-3"}), "run", first);
  Counter second;
  run(config({"optimizer.lr=2e-4", "optimizer.schedule=linear", "train.steps=12"}), "run", second);
  EXPECT_TRUE(has_note(second, "optimizer.lr is now 2e-4, was 0.001")) << second.notes.size();
  const std::vector<double> rates = of_steps("run", "lr");
  ASSERT_EQ(rates.size(), 12U);
  for (size_t i = 0; i < 4; ++i) EXPECT_DOUBLE_EQ(rates[i], 1e-3);
  // Linear from lr to 0 over the twelve steps of the present configuration.
  for (size_t i = 4; i < 12; ++i) EXPECT_NEAR(rates[i], 2e-4 * (1 - double(i) / 12), 1e-12) << i;
}

TEST_F(LongRun, EveryOptionOfTheOptimizerIsTheConfigurations) {
  const std::vector<std::string> changed = {"optimizer.weight_decay=0.5", "optimizer.beta1=0.5",
                                            "optimizer.beta2=0.6", "optimizer.eps=1e-3"};
  Counter first(4);
  run(config({}), "run", first);
  Counter second;
  run(config(changed), "run", second);
  // What is saved at the end tells what was used.
  const auto state = last_state("run");
  const auto value = [&](const std::string& part) {
    for (const auto& [name, text] : state)
      if (name.starts_with("optimizer/") && name.find(part) != std::string::npos &&
          name.find("0") != name.npos)
        return text;
    return std::string("none");
  };
  EXPECT_EQ(value("weight_decay"), "0.5");
  EXPECT_EQ(value("beta1"), "0.5");
  EXPECT_EQ(value("beta2"), "0.6");
  EXPECT_EQ(value("eps"), "0.001");
}

TEST_F(LongRun, LossScaleRulesAreTheConfigurationsAndTheScaleStays) {
  const std::vector<std::string> fp16 = {"precision.compute=fp16", "precision.loss_scale.initial=1024"};
  Counter first(4);
  run(config(fp16), "run", first);
  std::vector<std::string> changed = fp16;
  changed.insert(changed.end(),
                 {"precision.loss_scale.growth_interval=5", "precision.loss_scale.growth_factor=4"});
  Counter second;
  run(config(changed), "run", second);
  const std::vector<double> scales = of_steps("run", "loss_scale");
  ASSERT_EQ(scales.size(), 8U);
  EXPECT_EQ(scales[4], 1024);      // four clean steps before, a fifth makes it grow
  EXPECT_EQ(scales[5], 4 * 1024);  // by the new factor
}

TEST_F(LongRun, AKeyThatOnlyTheStartAsksSaysSo) {
  const std::vector<std::string> fp16 = {"precision.compute=fp16", "precision.loss_scale.initial=1024"};
  Counter first(4), second;
  run(config(fp16), "run", first);
  run(config({fp16[0], "precision.loss_scale.initial=2048"}), "run", second);
  EXPECT_TRUE(has_note(second, "changes nothing in a resumed one"));
}

// What the note on train.seed says: a resumed run goes on as it was, but for samples and a recipe's draws.
TEST_F(LongRun, ANewSeedChangesSamplesAndWhatARecipeDraws) {
  for (const std::string compute : {"bf16", "nvfp4"}) {
    for (const std::string seed : {"1", "2"}) {
      const auto with_seed = [&](const std::string& value) {
        return config(
            {"train.steps=6", "model.width=32", "precision.compute=" + compute, "train.seed=" + value});
      };
      Counter first(3), second;
      run(with_seed("1"), compute + seed, first);
      run(with_seed(seed), compute + seed, second);
      EXPECT_EQ(has_note(second, "follow the new seed"), seed == "2");
    }
    EXPECT_EQ(of_steps(compute + "1", "loss") == of_steps(compute + "2", "loss"), compute == "bf16");
  }
}

// --- A start that is refused

TEST_F(LongRun, ARefusedStartLeavesTheFolderAsItWas) {
  Counter first(4);
  run(config(), "run", first);
  const std::string before = read_text(folder_ / "run/config.toml");
  EXPECT_NE(error_of(config({"model.width=32"}), "run"), "");
  EXPECT_EQ(read_text(folder_ / "run/config.toml"), before);
  Counter second;
  EXPECT_EQ(run(config(), "run", second).outcome, RunOutcome::Done);
}

TEST_F(LongRun, ASecondProcessIsRefusedBeforeItChangesTokens) {
  const Trainer holder(config(), folder_ / "run");
  const auto written = std::filesystem::last_write_time(folder_ / "run/tokens/train.tokens");
  write_text(folder_ / "corpus.txt", std::string(5000, 'x'));
  EXPECT_NE(error_of(config(), "run").find("writes into this folder"), std::string::npos);
  EXPECT_EQ(std::filesystem::last_write_time(folder_ / "run/tokens/train.tokens"), written);
}

TEST_F(LongRun, ALinkedConfigurationIsReplacedNotFollowed) {
  std::filesystem::create_directories(folder_ / "run");
  write_text(folder_ / "elsewhere.toml", "mine");
  std::filesystem::create_symlink(folder_ / "elsewhere.toml", folder_ / "run/config.toml");
  Counter counter;
  run(config(), "run", counter);
  EXPECT_EQ(read_text(folder_ / "elsewhere.toml"), "mine");
}

TEST_F(LongRun, ANewFolderOfARefusedRunGoesAgain) {
  EXPECT_NE(error_of(config({"data.sequence_length=100000", "model.context=100000"}), "refused"), "");
  Counter counter;
  EXPECT_FALSE(std::filesystem::exists(folder_ / "refused/config.toml"));
}

TEST_F(LongRun, WhatADeadProcessLeftHalfWrittenGoes) {
  std::filesystem::create_directories(folder_ / "run/tokens");
  for (const char* name :
       {"run/tokens/train.tokens.aside-0123456789abcdef", "run/config.toml.aside-0123456789abcdef"})
    write_text(folder_ / name, "left");
  write_text(folder_ / "run/report.html.aside-0123456789abcdef", "somebody else's");
  Counter counter;
  run(config(), "run", counter);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run/tokens/train.tokens.aside-0123456789abcdef"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run/config.toml.aside-0123456789abcdef"));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/report.html.aside-0123456789abcdef"));
}

// --- A log without checkpoints

TEST_F(LongRun, ARunWithoutCheckpointsIsMovedAsideNotWiped) {
  Counter first, second, third;
  run(config(), "run", first);
  std::filesystem::remove_all(folder_ / "run/checkpoints");
  const std::string before = read_text(folder_ / "run/log.jsonl");
  run(config(), "run", second);
  EXPECT_EQ(read_text(folder_ / "run/earlier-1/log.jsonl"), before);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/earlier-1/model/model.safetensors"));
  EXPECT_TRUE(has_note(second, "moved into earlier-1"));
  std::filesystem::remove_all(folder_ / "run/checkpoints");
  run(config(), "run", third);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/earlier-2/log.jsonl"));
}

TEST_F(LongRun, CheckpointsAreMadeByTimeUnlessToldOtherwise) {
  EXPECT_EQ(RunConfig{}.checkpoint.every_minutes, 10);
  Counter counter;
  run(config({"checkpoint.every=0", "checkpoint.every_minutes=1e-9"}), "run", counter);
  EXPECT_GE(checkpoint_steps(checkpoints("run")).size(), 4U);  // as many as the disk had time for
}

TEST_F(LongRun, RubbishBehindTheLastSyncedRecordIsCutOff) {
  Counter first(4), second;
  run(config(), "run", first);
  for (const char* name : {"run/log.jsonl", "run/log.csv"}) {
    std::ofstream file(folder_ / name, std::ios::app | std::ios::binary);
    file << std::string(700, '\0') << "\nrubbish\n{\"kind\":\"st";
  }
  EXPECT_EQ(run(config(), "run", second).outcome, RunOutcome::Done);
  EXPECT_EQ(of_steps("run", "loss").size(), 8U);
}

TEST_F(LongRun, OtherDataIsNoticedWhereverItDiffers) {
  Counter first(4);
  run(config(), "run", first);
  std::string text = read_text(folder_ / "corpus.txt");
  for (size_t i = 0; i < text.size(); i += 7) text[i] = text[i] == 'l' ? 'l' : 'q';
  text[5001] ^= 1;
  write_text(folder_ / "corpus.txt", text);
  const std::string tokens = read_text(folder_ / "run/tokens/train.tokens");
  EXPECT_NE(error_of(config(), "run").find("other data"), std::string::npos);
  // What the checkpoints were trained on is still there.
  EXPECT_EQ(read_text(folder_ / "run/tokens/train.tokens"), tokens);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run/tokens/unpacked"));
}

TEST_F(LongRun, TheSameTokensFromAnotherFileAreTheSameData) {
  const auto resolved = [&](const std::string& line) {
    std::string lines;
    for (int i = 0; i < 20; ++i) lines += line + "\n";
    write_text(folder_ / "a.jsonl", lines);
    return config({"data.train=" + (folder_ / "a.jsonl").string()});
  };
  Counter first(4), second;
  run(resolved(R"({"text":"the same words"})"), "run", first);
  EXPECT_EQ(run(resolved(R"({ "text" : "the same words" })"), "run", second).outcome, RunOutcome::Done);
}

TEST_F(LongRun, OtherHeldOutTextIsNotedAndNotRefused) {
  write_text(folder_ / "held.txt", std::string(400, 'a'));
  const auto held = [&] {
    ResolvedConfig resolved = config();
    resolved.config.data.validation_fraction.reset();
    resolved.config.data.validation = {(folder_ / "held.txt").string()};
    return resolved;
  };
  Counter first(2), same(4), other;
  run(held(), "run", first);
  run(held(), "run", same);
  EXPECT_FALSE(has_note(same, "gives other tokens than before"));
  write_text(folder_ / "held.txt", std::string(400, 'b'));
  EXPECT_EQ(run(held(), "run", other).outcome, RunOutcome::Done);
  EXPECT_TRUE(has_note(other, "data.validation gives other tokens than before"));
}

/// Sequences of 16 tokens, of which all are given but those of every `learned`-th.
void write_marked(const std::filesystem::path& path, int sequences, int learned) {
  TokenFileWriter out(path, TokenFormat::Marked32, 256);
  for (int i = 0; i <= 16 * sequences; ++i) {
    const int32_t id = i * 31 % 256;
    const TokenMarks mark{.begins_text = i % 16 == 0, .is_given = learned == 0 || i / 16 % learned != 0};
    out.append({&id, 1}, {&mark, 1});
  }
  out.commit();
}

TEST_F(LongRun, ABatchWithNothingToLearnIsPassedOver) {
  write_marked(folder_ / "a.tokens", 60, 5);
  const auto marked = [&](const char* file) {
    ResolvedConfig resolved = config({"data.train=" + (folder_ / file).string(), "data.batch_size=1",
                                      "train.evaluate_every=0", "train.steps=12"});
    resolved.config.data.validation_fraction.reset();
    return resolved;
  };
  Counter whole, first(5), second;
  EXPECT_EQ(run(marked("a.tokens"), "whole", whole).outcome, RunOutcome::Done);
  EXPECT_EQ(whole.skipped, 0);
  for (const double loss : of_steps("whole", "loss")) EXPECT_TRUE(std::isfinite(loss)) << loss;
  run(marked("a.tokens"), "parts", first);
  run(marked("a.tokens"), "parts", second);
  EXPECT_EQ(last_state("parts"), last_state("whole"));
  write_marked(folder_ / "b.tokens", 60, 0);
  EXPECT_NE(error_of(marked("b.tokens"), "none").find("none of 60 sequences has a token to learn"),
            std::string::npos);
}

TEST_F(LongRun, OneChangedIdAmongManyIsOtherData) {
  std::vector<std::uint16_t> ids(100000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::uint16_t>(i * 7919 % 251);
  const auto write = [&](const char* name) {
    write_text(folder_ / name, {reinterpret_cast<const char*>(ids.data()), ids.size() * 2});
    return TokenFile(folder_ / name, {.vocabulary_size = 256}).digest();
  };
  const uint64_t whole = write("a.bin");
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    auto& id = ids[random() % ids.size()];
    const auto before = std::exchange(id, static_cast<std::uint16_t>((id + 1) % 251));
    EXPECT_NE(write("b.bin"), whole);
    id = before;
  }
  EXPECT_EQ(write("b.bin"), whole);
  std::swap(ids[0], ids[1]);
  EXPECT_NE(write("b.bin"), whole);
}

TEST_F(LongRun, TextIsEncodedOnce) {
  Counter first(4), second;
  run(config(), "run", first);
  const auto file = folder_ / "run/tokens/train.tokens";
  const auto written = std::filesystem::last_write_time(file);
  run(config(), "run", second);
  EXPECT_EQ(std::filesystem::last_write_time(file), written);
  // A damaged one is made again.
  std::string bytes = read_text(file);
  bytes[100] ^= 1;
  write_text(file, bytes);
  Counter third;
  run(config({"train.steps=12"}), "run", third);
  bytes[100] ^= 1;
  EXPECT_EQ(read_text(file), bytes);
}

/// Does something after a step.
class Meddler : public Counter {
 public:
  Meddler(int64_t step, std::function<void()> meddle) : step_(step), meddle_(std::move(meddle)) {}
  void step(const StepRecord& record) override {
    Counter::step(record);
    if (record.step == step_) meddle_();
  }

 private:
  int64_t step_;
  std::function<void()> meddle_;
};

TEST_F(LongRun, WhatGoesWithTheModelIsOfTheStartOfTheRun) {
  const auto tokenizer = folder_ / "tokenizer.json", chat = folder_ / "chat.jinja";
  const std::string words = testing::small_tokenizer().dump();
  write_text(tokenizer, words);
  write_text(chat, "{{ messages }}");
  Meddler first(4, [&] {
    std::filesystem::remove(tokenizer);
    write_text(chat, "changed");
  });
  run(config({"data.tokenizer=" + tokenizer.string(), "data.chat_template=" + chat.string()}), "run", first);
  EXPECT_EQ(read_text(folder_ / "run/model/tokenizer.json"), words);
  EXPECT_EQ(read_text(folder_ / "run/model/chat_template.jinja"), "{{ messages }}");

  const auto from = folder_ / "from";
  std::filesystem::rename(folder_ / "run/model", from);
  write_text(from / "generation_config.json", "{}");
  ResolvedConfig tuned = resolve_config(
      {.set = {"model.from=" + from.string(), "data.train=" + (folder_ / "corpus.txt").string(),
               "data.sequence_length=16", "data.batch_size=2", "train.steps=8"}});
  Meddler second(4, [&] { std::filesystem::rename(from, folder_ / "moved"); });
  EXPECT_EQ(run(tuned, "tuned", second).outcome, RunOutcome::Done);
  for (const char* name : {"tokenizer.json", "chat_template.jinja", "generation_config.json"})
    EXPECT_EQ(read_text(folder_ / "tuned/model" / name), read_text(folder_ / "moved" / name)) << name;
}

// --- Divergence

TEST(DivergenceWatchTest, NoisyAndFallingLossesAreNoDivergence) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::normal_distribution<double> noise(0, 0.02 + 0.01 * round);
    DivergenceWatch watch;
    for (int64_t step = 1; step <= 3000; ++step) {
      double loss = 2 + 4 * std::exp(-double(step) / 400) + noise(random);
      if (random() % 100 == 0) loss += 3;  // a bad batch
      watch.see(step, loss, false);
      ASSERT_FALSE(watch.diverged()) << "round " << round << ", step " << step;
    }
  }
}

TEST(DivergenceWatchTest, ALossThatRisesForGoodIsOne) {
  DivergenceWatch watch;
  for (int64_t step = 1; step <= 500; ++step) watch.see(step, 6 - 4.0 * double(step) / 500, false);
  EXPECT_FALSE(watch.in_trouble());
  for (int64_t step = 501; step <= 504; ++step) watch.see(step, 6.5, false);
  EXPECT_TRUE(watch.in_trouble());
  EXPECT_EQ(watch.above_since(), 501);
  EXPECT_FALSE(watch.diverged());
  for (int64_t step = 505; step <= 532; ++step) watch.see(step, step % 2 ? NAN : 6.5, false);
  ASSERT_TRUE(watch.diverged());
  EXPECT_NE(watch.diverged()->find("since step 501"), std::string::npos) << *watch.diverged();
  DivergenceWatch loaded;
  loaded.load_state_dict(watch.state_dict());
  EXPECT_EQ(loaded.diverged(), watch.diverged());
}

TEST(DivergenceWatchTest, ASkippedStepIsTroubleAndNoLoss) {
  DivergenceWatch watch;
  for (int64_t step = 1; step <= 100; ++step) watch.see(step, 3, false);
  for (int64_t step = 101; step <= 200; ++step) watch.see(step, INFINITY, true);
  EXPECT_TRUE(watch.in_trouble());
  EXPECT_FALSE(watch.diverged());
  watch.see(201, 3, false);
  EXPECT_FALSE(watch.in_trouble());
}

/// Learns for a while, then the rate is raised a thousandfold.
class Diverging : public LongRun {
 protected:
  std::vector<std::string> calm = {"train.accumulation=1", "train.steps=120",     "train.evaluate_every=20",
                                   "train.sample_every=0", "checkpoint.every=10", "checkpoint.keep_last=2",
                                   "optimizer.lr=3e-3",    "model.dropout=0"};
  ResolvedConfig with(std::vector<std::string> more) const {
    std::vector<std::string> all = calm;
    all.insert(all.end(), more.begin(), more.end());
    return config(all);
  }
};

TEST_F(Diverging, TheLastGoodCheckpointIsStillThere) {
  Counter first(60);
  run(with({}), "run", first);
  Counter second;
  const RunEnd end = run(with({"optimizer.lr=10", "optimizer.clip_norm=1000"}), "run", second);
  ASSERT_EQ(end.outcome, RunOutcome::Diverged) << end.why;
  EXPECT_NE(end.why.find("--from-step"), std::string::npos) << end.why;
  const std::vector<int64_t> steps = checkpoint_steps(checkpoints("run"));
  EXPECT_TRUE(std::find(steps.begin(), steps.end(), 60) != steps.end() ||
              std::find(steps.begin(), steps.end(), 50) != steps.end());
  // And going on from there with a sane rate works.
  Counter third;
  const RunEnd again = run(with({}), "run", third, {.from_step = 60});
  EXPECT_EQ(again.outcome, RunOutcome::Done);
  EXPECT_EQ(of_steps("run", "loss").size(), 120U);
}

TEST_F(Diverging, CheckpointsOfEveryStepLeaveOneFromBefore) {
  Counter first(60), second;
  run(with({}), "run", first);
  const RunEnd end =
      run(with({"optimizer.lr=10", "optimizer.clip_norm=1000", "checkpoint.every=1"}), "run", second);
  ASSERT_EQ(end.outcome, RunOutcome::Diverged) << end.why;
  const auto number_after = [&](const std::string& words) {
    const size_t at = end.why.find(words);
    return at == std::string::npos ? -1 : std::stoll(end.why.substr(at + words.size()));
  };
  EXPECT_LT(number_after("--from-step "), number_after("since step ")) << end.why;
  EXPECT_GT(number_after("--from-step "), 0) << end.why;
}

TEST_F(Diverging, ADamagedOldCheckpointIsPassedOver) {
  Counter first(60), second;
  run(with({}), "run", first);
  const std::vector<int64_t> steps = checkpoint_steps(checkpoints("run"));
  ASSERT_EQ(steps, (std::vector<int64_t>{50, 60}));
  const auto manifest = checkpoints("run") / "step-000000050/manifest.json";
  std::string text = read_text(manifest);
  text[text.size() / 2] ^= 1;
  write_text(manifest, text);
  const RunEnd end = run(with({"optimizer.lr=10", "optimizer.clip_norm=1000"}), "run", second);
  EXPECT_EQ(end.outcome, RunOutcome::Diverged) << end.why;
  EXPECT_NE(end.why.find("--from-step 60"), std::string::npos) << end.why;
}

TEST_F(Diverging, APinThatStandsInTheWayOfARollbackIsNamed) {
  Counter first(60), second;
  run(with({}), "run", first);
  pin_checkpoint(checkpoints("run"), 60, true);
  const RunEnd end = run(with({"optimizer.lr=10", "optimizer.clip_norm=1000", "train.on_divergence=rollback",
                               "train.steps=400"}),
                         "run", second);
  EXPECT_EQ(end.outcome, RunOutcome::Diverged) << end.why;
  EXPECT_NE(end.why.find("step 60, which is pinned: unpin it first"), std::string::npos) << end.why;
}

TEST_F(Diverging, ARollbackDoesNotGoBeyondACheckpointThatIsToStay) {
  for (const std::string keep : {"checkpoint.keep_every=10", "checkpoint.keep_best=true"}) {
    Counter first(60), second;
    run(with({keep}), keep, first);
    const RunEnd end =
        run(with({keep, "optimizer.lr=10", "optimizer.clip_norm=1000", "train.on_divergence=rollback",
                  "train.most_rollbacks=3", "train.steps=400"}),
            keep, second);
    ASSERT_EQ(end.outcome, RunOutcome::Diverged) << end.why;
    int rollbacks = 0;
    int64_t target = 0;
    for (const std::string& note : second.notes)
      if (note.starts_with("rolled back from step"))
        ++rollbacks, target = std::stoll(note.substr(note.find("to step ") + 8));
    EXPECT_EQ(rollbacks, 1) << keep;
    EXPECT_NE(end.why.find("step " + std::to_string(target) + ", which checkpoint.keep_every or keep_best"),
              std::string::npos)
        << end.why;
    const std::vector<int64_t> steps = checkpoint_steps(checkpoints(keep));
    EXPECT_TRUE(std::binary_search(steps.begin(), steps.end(), target)) << keep;
    // The evaluation after step 60 was the best so far: to go back to it, nothing that stays has to go.
    if (keep == "checkpoint.keep_best=true") {
      EXPECT_EQ(target, 60);
    }
    EXPECT_EQ(has_note(second, "kept are removed, of steps 60"), target < 60);
  }
}

TEST_F(Diverging, RollsBackAsOftenAsAllowedAndTellsEachTime) {
  Counter first(60);
  run(with({}), "run", first);
  Counter second;
  const std::vector<std::string> wild = {"optimizer.lr=10", "optimizer.clip_norm=1000",
                                         "train.on_divergence=rollback", "train.most_rollbacks=2",
                                         "train.steps=400"};
  const RunEnd end = run(with(wild), "run", second);
  ASSERT_EQ(end.outcome, RunOutcome::Diverged) << end.why;
  int rollbacks = 0;
  for (const std::string& note : second.notes) rollbacks += note.starts_with("rolled back from step");
  EXPECT_EQ(rollbacks, 2);
  // Each step stands once, and the log ends where the run did.
  const std::vector<json> records = log("run");
  int64_t latest = 0;
  for (const json& record : records)
    if (record["kind"] == "step") {
      EXPECT_EQ(record["step"].get<int64_t>(), ++latest);
    }
  EXPECT_EQ(records.back()["kind"], "end");
  EXPECT_EQ(records.back()["step"], end.step);
  // The limit holds for the run, not for the process.
  Counter again;
  EXPECT_EQ(run(with(wild), "run", again).outcome, RunOutcome::Diverged);
  EXPECT_FALSE(has_note(again, "rolled back from step"));
  // The healthy ones before are still there, and the run can go on with a sane rate.
  const std::vector<int64_t> steps = checkpoint_steps(checkpoints("run"));
  EXPECT_LE(steps.front(), 60);
  Counter third;
  EXPECT_EQ(run(with({}), "run", third, {.from_step = steps.front()}).outcome, RunOutcome::Done);
}

/// A rate of 10 from step 200 to step 204, as a hand that slips leaves it: the run is stopped, started with
/// it, stopped again before anything is noticed, and started with the right one.
class PlantedSpike : public Diverging {
 protected:
  std::vector<std::string> well_run(const std::string& on_divergence) const {
    return {"train.steps=600",           "data.batch_size=8",
            "train.evaluate_every=100",  "train.evaluate_batches=12",
            "optimizer.schedule=linear", "checkpoint.every=20",
            "optimizer.clip_norm=1",     "train.on_divergence=" + on_divergence};
  }

  RunEnd run_with_spike(const std::string& name, const std::string& on_divergence, Counter& last) {
    Counter before(199), spike(204);
    const std::vector<std::string> right = well_run(on_divergence);
    std::vector<std::string> wrong = right;
    wrong.emplace_back("optimizer.lr=10");
    EXPECT_EQ(run(with(right), name, before).outcome, RunOutcome::Interrupted);
    EXPECT_EQ(run(with(wrong), name, spike).outcome, RunOutcome::Interrupted);
    return run(with(right), name, last);
  }

  double held_out_loss(const std::string& name) const {
    double loss = NAN;
    for (const json& record : log(name))
      if (record["kind"] == "evaluation") loss = record["loss"].get<double>();
    return loss;
  }
};

TEST_F(PlantedSpike, RollbackReachesTheHeldOutLossOfACalmRun) {
  Counter undisturbed, last;
  ASSERT_EQ(run(with(well_run("stop")), "calm", undisturbed).outcome, RunOutcome::Done);
  const RunEnd end = run_with_spike("run", "rollback", last);
  ASSERT_EQ(end.outcome, RunOutcome::Done) << end.why;
  EXPECT_TRUE(has_note(last, "rolled back from step")) << last.notes.size();
  const double calm_loss = held_out_loss("calm"), loss = held_out_loss("run");
  EXPECT_LT(std::abs(loss / calm_loss - 1), 0.01) << loss << " after a rollback, " << calm_loss << " without";
  RecordProperty("held_out_loss", std::to_string(loss));
  RecordProperty("held_out_loss_of_the_calm_run", std::to_string(calm_loss));
}

TEST_F(PlantedSpike, WithoutRollbackTheLastGoodCheckpointIsStillThere) {
  Counter last, again;
  const RunEnd end = run_with_spike("run", "stop", last);
  ASSERT_EQ(end.outcome, RunOutcome::Diverged) << end.why;
  const std::vector<int64_t> steps = checkpoint_steps(checkpoints("run"));
  const auto good = std::find_if(steps.begin(), steps.end(), [](int64_t step) { return step <= 199; });
  ASSERT_NE(good, steps.end());
  EXPECT_EQ(run(with(well_run("stop")), "run", again, {.from_step = *good}).outcome, RunOutcome::Done);
}

TEST_F(LongRun, PatienceEndsARunThatNoLongerGains) {
  Counter counter;
  const RunEnd end = run(config({"train.steps=400", "train.evaluate_every=2", "train.patience=2",
                                 "optimizer.lr=1e-12", "train.sample_every=0"}),
                         "run", counter);
  EXPECT_EQ(end.outcome, RunOutcome::Done);
  EXPECT_LT(end.step, 400);
  EXPECT_NE(end.why.find("has not fallen"), std::string::npos);
}

TEST_F(LongRun, ARunThatPatienceHasEndedTakesNoFurtherStep) {
  const ResolvedConfig asked = config({"train.steps=400", "train.evaluate_every=2", "train.patience=2",
                                       "optimizer.lr=1e-12", "train.sample_every=0"});
  Counter first, second;
  run(asked, "run", first);
  const auto before = last_state("run");
  EXPECT_EQ(run(asked, "run", second).outcome, RunOutcome::Done);
  EXPECT_EQ(second.steps, 0);
  EXPECT_EQ(last_state("run"), before);
}

TEST_F(LongRun, FewerStepsThanAreDoneAreRefused) {
  Counter first, second;
  run(config(), "run", first);
  const std::string before = read_text(folder_ / "run/config.toml");
  EXPECT_NE(error_of(config({"train.steps=4"}), "run").find("8 steps are done, and train.steps is 4"),
            std::string::npos);
  EXPECT_EQ(read_text(folder_ / "run/config.toml"), before);
  EXPECT_EQ(run(config({"train.steps=4"}), "run", second, {.from_step = 3}).outcome, RunOutcome::Done);
}

TEST_F(LongRun, AStoppedRunThatWentBackSaysHowToGoOn) {
  Counter first, second(5);
  run(config(), "run", first);
  const RunEnd end = run(config(), "run", second, {.from_step = 3});
  EXPECT_EQ(end.outcome, RunOutcome::Interrupted);
  EXPECT_NE(end.why.find("the same command without --from-step"), std::string::npos) << end.why;
}

TEST_F(LongRun, MultiplesThatStayForEverAreSavedWhateverTheClockSays) {
  Counter counter;
  run(config({"checkpoint.every=0", "checkpoint.keep_every=4", "checkpoint.keep_last=1", "train.steps=10"}),
      "run", counter);
  EXPECT_EQ(checkpoint_steps(checkpoints("run")), (std::vector<int64_t>{4, 8, 10}));
}

TEST_F(LongRun, ALogThatWasMovedAwayIsBegunAnew) {
  for (const char* moved : {"log.jsonl", "log.csv"}) {
    const std::string name = std::string("run-") + moved;
    Counter first(4), second;
    run(config(), name, first);
    std::filesystem::rename(folder_ / name / moved, folder_ / (name + ".old"));
    EXPECT_EQ(run(config(), name, second).outcome, RunOutcome::Done) << moved;
    EXPECT_EQ(of_steps(name, "loss").size(), moved == std::string("log.jsonl") ? 4U : 8U);
  }
}

TEST_F(LongRun, WhereBothLogsWereMovedAwayTheNewOneSaysWhereItBegins) {
  Counter first(4), second;
  run(config(), "run", first);
  for (const char* name : {"run/log.jsonl", "run/log.csv"}) std::filesystem::remove(folder_ / name);
  EXPECT_EQ(run(config(), "run", second).outcome, RunOutcome::Done);
  EXPECT_EQ(log("run").front()["kind"], "run");
  EXPECT_EQ(log("run").front()["step"], 4);
}

TEST_F(LongRun, ALogThatIsRefusedLeavesTheCheckpointsThatWereToGo) {
  Counter first;
  run(config(), "run", first);
  const std::vector<int64_t> steps = checkpoint_steps(checkpoints("run"));
  std::string text = read_text(folder_ / "run/log.jsonl");
  text.replace(text.find('\n') + 1, 1, "x");
  write_text(folder_ / "run/log.jsonl", text);
  const std::string before = read_text(folder_ / "run/config.toml");
  EXPECT_NE(error_of(config({"log.every=2"}), "run", {.from_step = 3}).find("log.jsonl"), std::string::npos);
  EXPECT_EQ(checkpoint_steps(checkpoints("run")), steps);
  EXPECT_EQ(read_text(folder_ / "run/config.toml"), before);
}

TEST_F(LongRun, AStepWithoutACheckpointIsNamed) {
  Counter first;
  run(config(), "run", first);
  EXPECT_NE(error_of(config(), "run", {.from_step = 5}).find("has no checkpoint of step 5"),
            std::string::npos);
}

TEST_F(LongRun, ATimeLimitBelowOneStepIsAnErrorNotAnEnd) {
  EXPECT_NE(error_of(config({"train.time_limit_minutes=1e-6"}), "run").find("not one step fits"),
            std::string::npos);
}

TEST_F(LongRun, CheckpointsThatLeadNowhereAreRefusedWithTheReason) {
  std::filesystem::create_directories(folder_ / "run");
  std::filesystem::create_directory_symlink(folder_ / "not-mounted", folder_ / "run/checkpoints");
  EXPECT_NE(error_of(config(), "run").find("checkpoints"), std::string::npos);
}

TEST_F(LongRun, ARuinedModelIsADivergenceNotAFailure) {
  Counter counter;
  const RunEnd end = run(config({"train.steps=400", "train.sample_every=1", "optimizer.lr=1e30",
                                 "optimizer.clip_norm=1e30", "train.evaluate_every=0"}),
                         "run", counter);
  EXPECT_EQ(end.outcome, RunOutcome::Diverged) << end.why;
}

TEST_F(LongRun, GoOnGoesOnAfterTooManySkippedStepsToo) {
  Counter counter;
  const RunEnd end =
      run(config({"train.steps=150", "train.sample_every=1", "optimizer.lr=1e30", "optimizer.clip_norm=1e30",
                  "train.evaluate_every=0", "train.on_divergence=go_on"}),
          "run", counter);
  EXPECT_EQ(end.outcome, RunOutcome::Done) << end.why;
  EXPECT_GT(counter.skipped, 120);
}

TEST_F(LongRun, AnEvaluationThatWasNoNumberIsNotRepeatedAndSkippedStepsAreCounted) {
  const ResolvedConfig ruined = config({"optimizer.lr=1e30", "train.on_divergence=go_on"});
  Counter first, again;
  const RunEnd end = run(ruined, "run", first);
  ASSERT_EQ(end.outcome, RunOutcome::Done) << end.why;
  json last;
  for (const json& record : log("run"))
    if (record["kind"] == "evaluation") last = record["loss"];
  ASSERT_EQ(last, "NaN");
  EXPECT_GT(first.skipped, 0);
  EXPECT_NE(end.why.find(std::to_string(first.skipped) + " of 8 changed nothing"), std::string::npos)
      << end.why;
  EXPECT_EQ(run(ruined, "run", again).why, end.why);
  EXPECT_EQ(again.evaluations, 0);
}

TEST_F(LongRun, ATimeLimitSavesAndEnds) {
  Counter counter;
  const RunEnd end = run(config({"train.steps=100000", "train.time_limit_minutes=0.05",
                                 "train.sample_every=0", "train.evaluate_every=0"}),
                         "run", counter);
  EXPECT_EQ(end.outcome, RunOutcome::OutOfTime);
  EXPECT_EQ(checkpoint_steps(checkpoints("run")).back(), end.step);
}

TEST_F(LongRun, TheStatusFileTellsWhereItIs) {
  Counter counter;
  run(config(), "run", counter);
  const json status = json::parse(read_text(folder_ / "run/status.json"));
  EXPECT_EQ(status["state"], "done");
  EXPECT_EQ(status["step"], 8);
  EXPECT_EQ(status["saved_step"], 8);
}

TEST_F(LongRun, ADurableCheckpointHasItsRecord) {
  Counter counter;
  run(config(), "run", counter);
  std::vector<int64_t> saved;
  for (const json& record : log("run"))
    if (record["kind"] == "checkpoint") saved.push_back(record["saved_step"].get<int64_t>());
  EXPECT_EQ(saved, (std::vector<int64_t>{3, 6, 8}));
}

TEST_F(LongRun, TheBestCheckpointStays) {
  Counter counter;
  run(config({"checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.keep_best=true",
              "train.evaluate_every=2", "optimizer.lr=1"}),
      "run", counter);
  double best = INFINITY;
  int64_t best_step = -1;
  for (const json& record : log("run"))
    if (record["kind"] == "evaluation" && record["step"].get<int64_t>() > 0 &&
        record["loss"].get<double>() < best)
      best = record["loss"], best_step = record["step"];
  const std::vector<int64_t> steps = checkpoint_steps(checkpoints("run"));
  EXPECT_TRUE(std::binary_search(steps.begin(), steps.end(), best_step)) << best_step;
}

TEST(WatchdogTest, SaysWhatTakesSoLong) {
  class Listener : public Counter {
   public:
    void stuck(std::string_view doing, double) override { told.emplace_back(doing); }
    std::vector<std::string> told;
  } listener;
  {
    train::Watchdog watchdog(0.05, listener);
    watchdog.now("in step 3");
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
  }
  ASSERT_FALSE(listener.told.empty());
  EXPECT_EQ(listener.told[0], "in step 3");
  EXPECT_LE(listener.told.size(), 4U);  // at 0.05, 0.1, 0.2 s
}

}  // namespace
}  // namespace halfstep
