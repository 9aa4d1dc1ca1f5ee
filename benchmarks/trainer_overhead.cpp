// What the trainer costs beside the bare loop over the same pieces.
//
//   trainer_overhead [--json] [--rounds N] [--steps N] [--threads N] [--processor-time] [--watching]
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
//
// With --watching it says what the looks at tensors (watch.every, docs/findings.md) cost a run of the GPT of
// 10M parameters. Trainers with and without them take turns with the loop; of the watching one every third
// step is looked at, so that a short run has many looks. From what a step that is looked at takes, and one
// that is not, beside the loop's step of the same batch, follows what a whole run takes that is looked at
// every 50 steps. Exits with 1 when that is more than 1.02 times what it takes without watching, or a trainer
// without watching more than 1.005 times the loop: all that the trainer does is in that, so that it is a
// bound for what is left of watching when it is off.
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
constexpr double kWatchingLimit = 1.02, kOffLimit = 1.005;
constexpr int kLooks = 3, kDefaultLooks = 50;  // steps from one look to the next

/// Seconds by the clock on the wall, or of processor time, which other programs on the machine do not
/// stretch.
double now_seconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// With `looks`, the GPT of 10M parameters; 0 looks at nothing.
halfstep::ResolvedConfig configuration(const Path& tokens, int steps, int threads,
                                       std::optional<int> looks = {}) {
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
  std::vector<std::string> set = {"data.train=" + tokens.string(), "train.steps=" + std::to_string(steps),
                                  "train.threads=" + std::to_string(threads)};
  if (!looks) {
    set.push_back("log.every=2");
  } else {
    for (const char* const size :
         {"model.layers=6", "model.width=384", "model.heads=6", "data.sequence_length=256"})
      set.push_back(size);
    set.push_back("watch.every=" + std::to_string(*looks));
    if (*looks == 0) set.push_back("watch.trace_on_skip=false");
  }
  return halfstep::resolve_config(
      {.file = halfstep::ConfigText{.name = "trainer_overhead", .text = text}, .set = set});
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
  std::vector<double> looked_over_loop, between_over_loop, off_over_loop;  // with --watching
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
  void add_to(Ratios& ratios, const std::optional<int>& looks) const {
    if (looks) return add_watching_to(ratios, *looks);
    for (size_t block = kBlockSteps; block + kBlockSteps <= loop_seconds_.size(); block += kBlockSteps)
      for (size_t i = block + 1; i < block + kBlockSteps; i += 2) {  // steps of an even number
        ratios.trainer_over_loop.push_back(trainer_seconds_[i] / loop_seconds_[i]);
        for (const size_t silent : {i - 1, i + 1})
          if (silent > block && silent < block + kBlockSteps)
            ratios.logging_over_silence.push_back(trainer_seconds_[i] / trainer_seconds_[silent]);
      }
  }

 private:
  void add_watching_to(Ratios& ratios, int looks) const {
    for (size_t i = kBlockSteps; i < loop_seconds_.size(); ++i) {
      if (i % kBlockSteps == 0) continue;
      const bool looked = looks > 0 && (i + 1) % static_cast<size_t>(looks) == 0;
      auto& to = looks == 0 ? ratios.off_over_loop
                 : looked   ? ratios.looked_over_loop
                            : ratios.between_over_loop;
      to.push_back(trainer_seconds_[i] / loop_seconds_[i]);
    }
  }

  BareLoop& loop_;
  clockid_t clock_;
  double returned_ = 0;
  std::vector<double> trainer_seconds_, loop_seconds_, losses_;
};

struct Run {
  halfstep::ResolvedConfig resolved;
  Path tokens;
  clockid_t clock;
  std::optional<int> looks{};
};

void add_ratios(const Run& run, const Path& folder, bool loop_first, Ratios& ratios) {
  std::optional<BareLoop> loop;
  if (loop_first) loop.emplace(run.resolved.config, run.tokens);
  halfstep::Trainer trainer(run.resolved, folder);
  if (!loop) loop.emplace(run.resolved.config, run.tokens);
  InTurns turns(*loop, run.clock);
  const std::atomic<bool> never = false;
  (void)trainer.run(turns, never);
  turns.add_to(ratios, run.looks);
}

void write_tokens(const Path& path) {
  std::mt19937 generator(1);
  std::vector<int32_t> ids(1 << 18);
  for (auto& id : ids) id = static_cast<int32_t>(generator() % 96 + 32);
  halfstep::TokenFileWriter writer(path, halfstep::TokenFormat::Raw16, 256);
  writer.append(ids);
  writer.commit();
}

json interval_of(std::vector<double> ratios) {
  std::sort(ratios.begin(), ratios.end());
  const auto count = static_cast<double>(ratios.size());
  const double half = 0.98 * std::sqrt(count);  // ranks: 1.96 deviations of a fair coin's heads
  const auto at_rank = [&](double rank) {
    return ratios[static_cast<size_t>(std::clamp(rank, 0.0, count - 1))];
  };
  return {{"median", bench::median(ratios)},
          {"interval", {at_rank(count / 2 - half), at_rank(count / 2 + half)}},
          {"pairs", ratios.size()}};
}

json told(const std::vector<double>& ratios, double limit) {
  json result = interval_of(ratios);
  result["limit"] = limit;
  result["passed"] = result["median"] <= limit;
  return result;
}

/// Of a run that is looked at every 50 steps, from the medians: both trainers beside the same loop.
json told_watching(const Ratios& ratios) {
  const double looked = bench::median(ratios.looked_over_loop),
               between = bench::median(ratios.between_over_loop), off = bench::median(ratios.off_over_loop);
  const double whole = ((kDefaultLooks - 1) * between + looked) / kDefaultLooks / off;
  return {{"whole_run", {{"median", whole}, {"limit", kWatchingLimit}, {"passed", whole <= kWatchingLimit}}},
          {"off_over_loop", told(ratios.off_over_loop, kOffLimit)},
          {"looked_over_loop", interval_of(ratios.looked_over_loop)},
          {"between_over_loop", interval_of(ratios.between_over_loop)}};
}

/// Prints; whether all limits are kept.
bool print_results(const json& results, bool as_json) {
  bool passed = true;
  for (const auto& [name, one] : results.items()) {
    if (one.contains("passed")) passed = passed && one["passed"].get<bool>();
    if (as_json) continue;
    std::cout << name << " " << one["median"];
    if (one.contains("interval"))
      std::cout << " [" << one["interval"][0] << ", " << one["interval"][1] << "]";
    if (one.contains("limit")) std::cout << ", at most " << one["limit"];
    std::cout << "\n";
  }
  if (as_json) std::cout << results.dump(1) << "\n";
  return passed;
}

int run(int argc, char** argv) {
  CLI::App app("What the trainer and its log cost beside the bare loop over the same pieces.");
  int rounds = 20, steps = 24, threads = 2;
  bool as_json = false, processor_time = false, watching = false;
  app.add_option("--rounds", rounds)->check(CLI::Range(1, 1000));
  app.add_option("--steps", steps, "of each run; in blocks of 6")->check(CLI::Range(2 * kBlockSteps, 100000));
  app.add_option("--threads", threads)->check(CLI::Range(1, 1024));
  app.add_flag("--processor-time", processor_time, "for machines that are not idle, with --threads 1");
  app.add_flag("--watching", watching, "what looking at tensors costs, on a GPT of 10M parameters");
  app.add_flag("--json", as_json);
  CLI11_PARSE(app, argc, argv);

  halfstep::install_cpu_allocator();
  at::set_num_threads(threads);
  std::string scratch = (std::filesystem::temp_directory_path() / "halfstep-overhead-XXXXXX").string();
  HALFSTEP_CHECK(mkdtemp(scratch.data()) != nullptr, "No folder can be made in the temporary folder.");
  const Path tokens = Path(scratch) / "train.tokens";
  write_tokens(tokens);
  const clockid_t clock = processor_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC;
  const auto run_with = [&](std::optional<int> looks) {
    return Run{.resolved = configuration(tokens, steps, threads, looks),
               .tokens = tokens,
               .clock = clock,
               .looks = looks};
  };
  Ratios ratios;
  for (int round = 0; round < rounds; ++round) {
    const Path folder = Path(scratch) / std::to_string(round);
    // What is made first has other places in memory, which are worth some percent: once each.
    for (const bool loop_first : {true, false}) {
      const Path of_order = folder / (loop_first ? "second" : "first");
      if (watching) {
        add_ratios(run_with(kLooks), of_order / "watching", loop_first, ratios);
        add_ratios(run_with(0), of_order / "off", loop_first, ratios);
      } else {
        add_ratios(run_with({}), of_order, loop_first, ratios);
      }
    }
    std::cerr << "round " << round + 1 << " of " << rounds << "\n";
  }
  std::filesystem::remove_all(scratch);
  const json results = watching
                           ? told_watching(ratios)
                           : json{{"trainer_over_loop", told(ratios.trainer_over_loop, kTrainerLimit)},
                                  {"logging_over_silence", told(ratios.logging_over_silence, kLoggingLimit)}};
  return print_results(results, as_json) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return bench::exit_code_of(run, argc, argv); }
