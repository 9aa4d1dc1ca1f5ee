#include "report/synthetic_run.h"

#include <halfstep/run_config.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <numbers>
#include <random>

namespace halfstep::testing {
namespace {

constexpr int64_t kTokens = 4096;
constexpr double kStepSeconds = 0.42;
const char* const kParameters[] = {"transformer.h.3.mlp.c_fc.weight", "transformer.h.0.attn.c_attn.weight",
                                   "transformer.wte.weight"};

int64_t planned(const SyntheticRun& run) { return run.planned_steps > 0 ? run.planned_steps : run.steps; }

/// Warm-up, then half a cosine.
double rate_at(const SyntheticRun& run, int64_t step) {
  constexpr double kFull = 6e-4, kLast = 6e-5;
  const double warmup = std::max(1.0, static_cast<double>(planned(run)) / 10),
               now = static_cast<double>(step);
  if (now < warmup) return kFull * now / warmup;
  const double done = (now - warmup) / std::max(1.0, static_cast<double>(planned(run)) - warmup);
  return kLast + (kFull - kLast) * 0.5 * (1 + std::cos(std::numbers::pi * done));
}

double normal(std::mt19937_64& random) { return std::normal_distribution<double>(0.0, 1.0)(random); }

MemoryRecord memory_at(std::mt19937_64& random) {
  const auto wobble = static_cast<int64_t>(std::abs(normal(random)) * 2e6);
  return {.live_bytes = 171'000'000,
          .peak_bytes = 498'000'000 + wobble,
          .classes = {{.name = "working", .live_bytes = 21'400'000, .peak_bytes = 21'400'000},
                      {.name = "master", .live_bytes = 21'400'000, .peak_bytes = 21'400'000},
                      {.name = "gradient", .live_bytes = 0, .peak_bytes = 64'000'000 + wobble},
                      {.name = "moments", .live_bytes = 85'600'000, .peak_bytes = 85'600'000},
                      {.name = "activation", .live_bytes = 0, .peak_bytes = 301'000'000},
                      {.name = "other", .live_bytes = 2'600'000, .peak_bytes = 9'000'000}}};
}

StepRecord record_at(const SyntheticRun& run, int64_t step, double loss, std::mt19937_64& random) {
  const double slow = step % 97 == 0 ? 1.6 : 1.0;  // somebody else wanted the machine
  const double seconds = kStepSeconds * slow * (1 + 0.02 * normal(random));
  const double fall = std::exp(-static_cast<double>(step) / (0.1 * static_cast<double>(planned(run))));
  return {.step = step,
          .seconds = kStepSeconds * static_cast<double>(step),
          .loss = loss,
          .lr = rate_at(run, step),
          .grad_norm = (0.4 + 8 * fall) * std::exp(0.25 * normal(random)),
          .items = kTokens,
          .items_per_second = static_cast<double>(kTokens) / seconds,
          .stalled_share = 0.004 + 0.03 * (1 - fall) + 0.001 * std::abs(normal(random)),
          .share_of_peak = 0.41 / slow,
          .phases = {.forward = 0.27 * seconds,
                     .backward = 0.55 * seconds,
                     .inspect = 0.03 * seconds,
                     .step = 0.09 * seconds,
                     .data = 0.02 * seconds,
                     .other = 0.04 * seconds}};
}

}  // namespace

std::string synthetic_configuration(const SyntheticRun& run) {
  return to_toml(resolve_config({.preset = "gpt-10m",
                                 .set = {"precision.compute=" + run.compute, "optimizer.warmup_steps=0",
                                         "train.steps=" + std::to_string(planned(run)),
                                         "data.seed=" + std::to_string(run.batch_seed)}}),
                 false);
}

std::vector<double> synthetic_losses(const SyntheticRun& run) {
  std::mt19937_64 batches(run.batch_seed), own(run.own_seed + 1000003 * run.batch_seed);
  std::vector<double> losses;
  double drift = normal(own);
  const double rho = run.own_correlation;
  for (int64_t step = 1; step <= run.steps; ++step) {
    const double done = static_cast<double>(step) / static_cast<double>(planned(run));
    const double curve = 1.15 + 2.2 * std::exp(-9 * done) + 2.2 * std::exp(-55 * done);
    drift = rho * drift + std::sqrt(1 - rho * rho) * normal(own);
    const double loss = curve * (1 + 0.035 * normal(batches)) * (1 + run.own_noise * drift) * run.loss_factor;
    losses.push_back(run.nan_from > 0 && step >= run.nan_from ? std::numeric_limits<double>::quiet_NaN()
                                                              : loss);
  }
  return losses;
}

void write_synthetic_run(const std::filesystem::path& folder, const SyntheticRun& run) {
  const RunHeader header{
      .configuration = synthetic_configuration(run),
      .machine = {{"cpu", "Intel Xeon Platinum 8481C"}, {"threads", "2"}, {"torch", "2.13.0"}}};
  std::mt19937_64 random(run.own_seed + 77);
  const std::vector<double> losses = synthetic_losses(run);
  RunLog log = RunLog::create(folder, header);
  double loss_scale = 65536;
  const int64_t evaluate_every = std::max<int64_t>(1, run.steps / 10);
  for (int64_t step = 1; step <= run.steps; ++step) {
    const double loss = losses[static_cast<size_t>(step - 1)];
    StepRecord record = record_at(run, step, loss, random);
    if (run.has_memory) record.memory = memory_at(random);
    if (run.compute == "fp16") {
      record.loss_scale = loss_scale;
      record.skipped = step <= 3 || loss_scale > 32768 || !std::isfinite(loss);
      if (record.skipped) {
        record.parameter = kParameters[step % 3];
        record.why = "the gradient of '" + record.parameter + "' is not finite";
        record.grad_norm = std::numeric_limits<double>::infinity();
        loss_scale = std::max(1.0, loss_scale / 2);
      } else if (step % std::max<int64_t>(150, run.steps / 50) == 0) {
        loss_scale *= 2;
      }
    }
    const bool evaluated = run.evaluates && step % evaluate_every == 0;
    if (evaluated) record.evaluation_loss = loss * 1.04;
    log.step(record);
    if (evaluated)
      log.evaluation({.step = step,
                      .seconds = record.seconds,
                      .loss = loss * 1.04,
                      .items = 81920,
                      .duration_seconds = 1.9});
    if (run.samples && step % std::max<int64_t>(1, run.steps / 4) == 0)
      log.sample(
          {.step = step,
           .seconds = record.seconds,
           .prompt = "The ",
           .text = "module :mod:`asyncio` provides a *loop*, which is\nused to call the function ``run``.\n\n"
                   "   >>> import asyncio\n   >>> asyncio.run(main())\n"});
    if (step == run.resumed_after) {
      log.note(step, record.seconds, "checkpoint saved: step-" + std::to_string(step));
      log.end(step, record.seconds, "interrupted", "SIGTERM: saved after step " + std::to_string(step));
      log = RunLog::resume(folder, header, step);
    }
  }
  const double seconds = kStepSeconds * static_cast<double>(run.steps);
  if (run.ends && run.nan_from > 0)
    log.end(run.steps, seconds, "diverged", "100 steps in a row were skipped");
  else if (run.ends)
    log.end(run.steps, seconds, "done", "");
  if (run.cut_last_line) std::ofstream(folder / "log.jsonl", std::ios::app) << "{\"kind\":\"step\",\"st";
}

}  // namespace halfstep::testing
