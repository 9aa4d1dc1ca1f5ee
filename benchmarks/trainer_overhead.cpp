// What the trainer costs beside the bare loop over the same pieces.
//
//   trainer_overhead [--json] [--rounds N] [--steps N] [--threads N] [--processor-time]
//
// A small GPT-2 in BF16 is trained twice at the same time: by Trainer, and by a loop of ten lines over
// TokenBatches, MixedPrecision and AdamW. They take turns, some steps each, in one thread: the loop runs
// inside the trainer's watcher. So both meet the same machine, and everything that the trainer does between
// two steps is counted. Both must have the same losses, bit for bit: then they did the same work.
//
// Every second step has its line in the log, so that logging is compared with silence within one run: two
// runs differ by more than it costs, because their tensors lie at other places. For the same reason there are
// many short rounds. A ratio is taken of each pair of steps that stand close together: the trainer's logged
// step and the loop's step of the same batch; a logged step and the silent ones beside it. Told is the median
// of all pairs with its 95% interval (by ranks: nothing is assumed of the noise). Exits with 1 when the
// trainer's logged step takes more than 1.02 times the loop's, or a logged step more than 1.01 times a silent
// one.
#include <ATen/Parallel.h>
#include <halfstep/data.h>
#include <halfstep/error.h>
#include <halfstep/memory.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/models.h>
#include <halfstep/optim.h>
#include <halfstep/trainer.h>
#include <stdlib.h>
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "support/program.h"
#include "support/statistics.h"

namespace {

using nlohmann::json;
using Path = std::filesystem::path;

constexpr double kTrainerLimit = 1.02, kLoggingLimit = 1.01;
constexpr int kBlockSteps = 6;

/// Seconds by the clock on the wall, or of processor time, which other programs on the machine do not
/// stretch.
double now_seconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

halfstep::ResolvedConfig configuration(const Path& tokens, int steps, int threads) {
  const std::string text = R"(
[model]
kind = "gpt2"
layers = 4
width = 128
heads = 4
[data]
sequence_length = 128
batch_size = 16
seed = 3
[precision]
compute = "bf16"
[optimizer]
lr = 1e-3
weight_decay = 0.1
clip_norm = 1.0
[train]
seed = 5
)";
  return halfstep::resolve_config(
      {.file = halfstep::ConfigText{.name = "trainer_overhead", .text = text},
       .set = {"data.train=" + tokens.string(), "train.steps=" + std::to_string(steps),
               "train.threads=" + std::to_string(threads), "log.every=2"}});
}

/// The loop that a user of the library writes.
class BareLoop {
 public:
  BareLoop(const halfstep::RunConfig& config, const Path& tokens)
      : model_(halfstep::Gpt2Config{.vocab_size = kVocabulary,
                                    .n_positions = config.data.sequence_length,
                                    .n_embd = *config.model.width,
                                    .n_layer = *config.model.layers,
                                    .n_head = *config.model.heads,
                                    .resid_pdrop = 0,
                                    .embd_pdrop = 0,
                                    .attn_pdrop = 0},
               static_cast<uint64_t>(config.train.seed)),
        mp_(halfstep::Precision::bf16(), *model_, {.autocast = {.allow_emulated = true}}),
        optimizer_(groups(mp_.params(), config.optimizer)),
        batches_(files(tokens), {.batch_size = config.data.batch_size,
                                 .sequence_length = config.data.sequence_length,
                                 .seed = static_cast<uint64_t>(config.data.seed)}) {}

  double step() {
    const auto batch = batches_.next();
    const auto loss = mp_.forward([&] { return model_->loss(batch.inputs, batch.targets); });
    mp_.backward(loss);
    const auto grads = mp_.inspect_grads();
    const auto report = optimizer_.step(grads.clipped_to(1.0));
    HALFSTEP_CHECK(report.stepped(), report.sentence());
    mp_.advance(grads);
    optimizer_.zero_grad();
    return loss.item<double>();
  }

 private:
  static constexpr int64_t kVocabulary = 256;

  static std::vector<halfstep::TokenFile> files(const Path& tokens) {
    std::vector<halfstep::TokenFile> files;
    files.emplace_back(tokens, halfstep::TokenFileOptions{.vocabulary_size = kVocabulary});
    return files;
  }

  static std::vector<halfstep::ParamGroup<halfstep::AdamWOptions>> groups(
      const std::vector<halfstep::Param>& params, const halfstep::RunConfig::Optimizer& given) {
    halfstep::ParamGroup<halfstep::AdamWOptions> matrices{
        .params = {}, .options = {.lr = given.lr, .weight_decay = *given.weight_decay}};
    halfstep::ParamGroup<halfstep::AdamWOptions> vectors{.params = {},
                                                         .options = {.lr = given.lr, .weight_decay = 0}};
    for (const auto& param : params) (param.working.dim() >= 2 ? matrices : vectors).params.push_back(param);
    return {matrices, vectors};
  }

  halfstep::Gpt2 model_;
  halfstep::MixedPrecision mp_;
  halfstep::AdamW optimizer_;
  halfstep::TokenBatches batches_;
};

/// Of all pairs of steps.
struct Ratios {
  std::vector<double> trainer_over_loop, logging_over_silence;
};

/// Watches a trainer, and after each block of its steps does as many of the bare loop.
class InTurns final : public halfstep::RunWatcher {
 public:
  InTurns(BareLoop& loop, clockid_t clock) : loop_(loop), clock_(clock) {}

  void begin(const halfstep::RunPlan&) override { returned_ = now_seconds(clock_); }

  void step(const halfstep::StepRecord& record) override {
    trainer_seconds_.push_back(now_seconds(clock_) - returned_);
    losses_.push_back(record.loss);
    if (losses_.size() % kBlockSteps == 0)
      for (size_t i = losses_.size() - kBlockSteps; i < losses_.size(); ++i) {
        const double begin = now_seconds(clock_);
        const double loss = loop_.step();
        loop_seconds_.push_back(now_seconds(clock_) - begin);
        HALFSTEP_CHECK(loss == losses_[i], "step ", i + 1, ": the trainer's loss is ", losses_[i],
                       ", the bare loop's ", loss, ". They must do the same work to be compared.");
      }
    returned_ = now_seconds(clock_);
  }

  void evaluation(const halfstep::EvaluationRecord&) override {}
  void sample(const halfstep::SampleRecord&) override {}
  void note(int64_t, std::string_view) override {}
  void end(const halfstep::RunEnd&) override {}

  /// Without the first block, which fills allocators, and the first of each, which finds the other's caches.
  void add_to(Ratios& ratios) const {
    for (size_t block = kBlockSteps; block + kBlockSteps <= loop_seconds_.size(); block += kBlockSteps)
      for (size_t i = block + 1; i < block + kBlockSteps; i += 2) {  // steps of an even number
        ratios.trainer_over_loop.push_back(trainer_seconds_[i] / loop_seconds_[i]);
        for (const size_t silent : {i - 1, i + 1})
          if (silent > block && silent < block + kBlockSteps)
            ratios.logging_over_silence.push_back(trainer_seconds_[i] / trainer_seconds_[silent]);
      }
  }

 private:
  BareLoop& loop_;
  clockid_t clock_;
  double returned_ = 0;
  std::vector<double> trainer_seconds_, loop_seconds_, losses_;
};

struct Run {
  halfstep::ResolvedConfig resolved;
  Path tokens;
  clockid_t clock;
};

void add_ratios(const Run& run, const Path& folder, bool loop_first, Ratios& ratios) {
  std::optional<BareLoop> loop;
  if (loop_first) loop.emplace(run.resolved.config, run.tokens);
  halfstep::Trainer trainer(run.resolved, folder);
  if (!loop) loop.emplace(run.resolved.config, run.tokens);
  InTurns turns(*loop, run.clock);
  const std::atomic<bool> never = false;
  (void)trainer.run(turns, never);
  turns.add_to(ratios);
}

void write_tokens(const Path& path) {
  std::mt19937 generator(1);
  std::vector<int32_t> ids(1 << 18);
  for (auto& id : ids) id = static_cast<int32_t>(generator() % 96 + 32);
  halfstep::TokenFileWriter writer(path, halfstep::TokenFormat::Raw16, 256);
  writer.append(ids);
  writer.commit();
}

json told(std::vector<double> ratios, double limit) {
  std::sort(ratios.begin(), ratios.end());
  const auto count = static_cast<double>(ratios.size());
  const double half = 0.98 * std::sqrt(count);  // ranks: 1.96 deviations of a fair coin's heads
  const auto at_rank = [&](double rank) {
    return ratios[static_cast<size_t>(std::clamp(rank, 0.0, count - 1))];
  };
  const double median = bench::median(ratios);
  return {{"median", median},
          {"interval", {at_rank(count / 2 - half), at_rank(count / 2 + half)}},
          {"pairs", ratios.size()},
          {"limit", limit},
          {"passed", median <= limit}};
}

int run(int argc, char** argv) {
  CLI::App app("What the trainer and its log cost beside the bare loop over the same pieces.");
  int rounds = 20, steps = 24, threads = 2;
  bool as_json = false, processor_time = false;
  app.add_option("--rounds", rounds)->check(CLI::Range(1, 1000));
  app.add_option("--steps", steps, "of each run; in blocks of 6")->check(CLI::Range(2 * kBlockSteps, 100000));
  app.add_option("--threads", threads)->check(CLI::Range(1, 1024));
  app.add_flag("--processor-time", processor_time, "for machines that are not idle, with --threads 1");
  app.add_flag("--json", as_json);
  CLI11_PARSE(app, argc, argv);

  halfstep::install_cpu_allocator();
  at::set_num_threads(threads);
  std::string scratch = (std::filesystem::temp_directory_path() / "halfstep-overhead-XXXXXX").string();
  HALFSTEP_CHECK(mkdtemp(scratch.data()) != nullptr, "No folder can be made in the temporary folder.");
  const Path tokens = Path(scratch) / "train.tokens";
  write_tokens(tokens);
  const clockid_t clock = processor_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC;
  const Run run{.resolved = configuration(tokens, steps, threads), .tokens = tokens, .clock = clock};
  Ratios ratios;
  for (int round = 0; round < rounds; ++round) {
    const Path folder = Path(scratch) / std::to_string(round);
    // What is made first has other places in memory, which are worth some percent: once each.
    add_ratios(run, folder / "second", /*loop_first=*/true, ratios);
    add_ratios(run, folder / "first", /*loop_first=*/false, ratios);
    std::cerr << "round " << round + 1 << " of " << rounds << ": trainer "
              << bench::median(ratios.trainer_over_loop) << " of the bare loop so far, logging "
              << bench::median(ratios.logging_over_silence) << " of silence\n";
  }
  std::filesystem::remove_all(scratch);

  const json results{{"trainer_over_loop", told(ratios.trainer_over_loop, kTrainerLimit)},
                     {"logging_over_silence", told(ratios.logging_over_silence, kLoggingLimit)}};
  bool passed = true;
  for (const char* name : {"trainer_over_loop", "logging_over_silence"}) {
    const json& one = results[name];
    passed = passed && one["passed"].get<bool>();
    if (!as_json)
      std::cout << name << " " << one["median"] << " [" << one["interval"][0] << ", " << one["interval"][1]
                << "], at most " << one["limit"] << "\n";
  }
  if (as_json) std::cout << results.dump(1) << "\n";
  return passed ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return bench::exit_code_of(run, argc, argv); }
