// What the CPU allocator buys: whole BF16 training steps of a 30M GPT with and without it, in processes that
// take turns, so that neither inherits the other's memory.
//
//   allocator_bench [--json] [--rounds N]      N >= 3
//
// Two kinds of step. "stock" is what LibTorch itself does in BF16: its own autocast policy over FP32
// parameters, its clipping, its fused AdamW. "halfstep" is the default of MixedPrecision, which asks for far
// less memory to begin with, so that there is less to win.
//
// With and without must reach the same losses bit for bit. Exits with 1 when they do not, when a stock step
// is less than 1.4 times as fast, when a step still takes page faults to speak of, or when peak resident
// memory is more than 1.15 times what malloc needs.
#include <halfstep/autocast.h>
#include <halfstep/memory.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/optim.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <chrono>
#include <functional>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>

#include "support/children.h"
#include "support/gpt.h"
#include "support/program.h"
#include "support/statistics.h"

namespace {

using nlohmann::json;

constexpr double kRatioWanted = 1.4;
constexpr double kResidentRatioLimit = 1.15;
constexpr double kFaultsLimit = 100;  // a step; malloc takes some 600,000

constexpr halfstep::AutocastOptions kAnyMachine{.allow_emulated = true};
constexpr std::int64_t kBatch = 8;
constexpr int kThreads = 2;
constexpr int kWarmUpSteps = 4, kSteps = 7;

/// One training step, which returns its loss.
using Step = std::function<at::Tensor()>;

/// LibTorch's own: stock autocast over FP32 parameters, clipping, the engine's fused AdamW.
Step stock_step(bench::Gpt& model, const at::Tensor& tokens, const at::Tensor& targets) {
  const auto params = model.parameters();
  std::vector<at::Tensor> first_moments, second_moments, steps;
  for (const auto& param : params) {
    first_moments.push_back(at::zeros_like(param));
    second_moments.push_back(at::zeros_like(param));
    steps.push_back(at::zeros({}));
  }
  return [=, &model]() mutable {
    at::Tensor loss;
    {
      const halfstep::AutocastScope bf16(at::kBFloat16, halfstep::OpPolicy::stock(), kAnyMachine);
      loss = model.loss(tokens, targets);
    }
    loss.backward();
    const torch::NoGradGuard no_grad;
    std::vector<at::Tensor> grads;
    for (const auto& param : params) grads.push_back(param.grad().contiguous());
    torch::nn::utils::clip_grad_norm_(params, 1.0);
    at::_foreach_add_(steps, 1);
    at::_fused_adamw_(params, grads, first_moments, second_moments, {}, steps, /*lr=*/3e-4, 0.9, 0.95,
                      /*weight_decay=*/0.1, 1e-8, /*amsgrad=*/false, /*maximize=*/false);
    for (const auto& param : params) param.mutable_grad().reset();
    return loss.detach();
  };
}

Step halfstep_step(bench::Gpt& model, const at::Tensor& tokens, const at::Tensor& targets) {
  const auto mp = std::make_shared<halfstep::MixedPrecision>(
      halfstep::Precision::bf16(), model, halfstep::MixedPrecisionOptions{.autocast = kAnyMachine});
  const auto optimizer = std::make_shared<halfstep::AdamW>(
      mp->params(), halfstep::AdamWOptions{.lr = 3e-4, .betas = {0.9, 0.95}, .weight_decay = 0.1});
  return [=, &model] {
    const auto loss = mp->forward([&] { return model.loss(tokens, targets); });
    mp->backward(loss);
    const auto grads = mp->inspect_grads();
    if (!optimizer->step(grads.clipped_to(1.0)).stepped()) throw std::runtime_error("a step was skipped");
    mp->advance(grads);
    optimizer->zero_grad();
    return loss.detach();
  };
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

rusage usage() {
  rusage now{};
  getrusage(RUSAGE_SELF, &now);
  return now;
}

double cpu_seconds(const rusage& used) {
  double sum = 0;
  for (const timeval& time : {used.ru_utime, used.ru_stime})
    sum += static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  return sum;
}

/// What a child does: trains, and tells what each step took after the first ones.
json train(const std::string& kind, bool with_allocator) {
  if (with_allocator) halfstep::install_cpu_allocator();
  at::set_num_threads(kThreads);
  at::manual_seed(1);
  bench::Gpt model(bench::kGpt30M);
  const std::vector<std::int64_t> shape{kBatch, bench::kGpt30M.context};
  const auto tokens = at::randint(bench::kGpt30M.vocabulary, shape, at::kLong);
  const auto targets = at::randint(bench::kGpt30M.vocabulary, shape, at::kLong);
  const Step step = (kind == "stock" ? stock_step : halfstep_step)(model, tokens, targets);

  json result;
  for (int i = 0; i < kWarmUpSteps + kSteps; ++i) {
    const rusage before = usage();
    const double start = seconds();
    const at::Tensor loss = step();
    const double end = seconds();
    const rusage after = usage();
    result["loss_bits"].push_back(std::bit_cast<std::uint32_t>(loss.item<float>()));
    if (i < kWarmUpSteps) continue;
    result["wall_seconds"].push_back(end - start);
    result["cpu_seconds"].push_back(cpu_seconds(after) - cpu_seconds(before));
    result["faults"].push_back(after.ru_minflt - before.ru_minflt);
  }
  result["peak_resident_bytes"] = usage().ru_maxrss * 1024;
  return result;
}

/// What the children of one kind told, one value a round.
struct Runs {
  std::vector<double> wall_seconds, cpu_seconds, faults, peak_resident_bytes;
  json loss_bits;  // of the first
  bool same_losses = true;

  void add(const json& run) {
    const auto median_of = [&](const char* key) {
      return bench::median(run[key].get<std::vector<double>>());
    };
    wall_seconds.push_back(median_of("wall_seconds"));
    cpu_seconds.push_back(median_of("cpu_seconds"));
    faults.push_back(median_of("faults"));
    peak_resident_bytes.push_back(run["peak_resident_bytes"]);
    if (loss_bits.is_null()) loss_bits = run["loss_bits"];
    same_losses &= loss_bits == run["loss_bits"];
  }
};

std::vector<double> quotients(const std::vector<double>& above, const std::vector<double>& below) {
  std::vector<double> result;
  for (std::size_t i = 0; i < above.size(); ++i) result.push_back(above[i] / below[i]);
  return result;
}

json compare(const std::string& kind, int rounds) {
  Runs with, without;
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::string> kinds{"with", "without"};
    if (round % 2 == 1) std::swap(kinds[0], kinds[1]);  // nobody is always first
    bench::run_children(
        {{"--child", kind, "--allocator", kinds[0]}, {"--child", kind, "--allocator", kinds[1]}}, 1,
        [&](std::size_t job, const json& run) { (kinds[job] == "with" ? with : without).add(run); });
  }
  const auto ratios = quotients(without.wall_seconds, with.wall_seconds);
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  const double ratio = bench::median(ratios);
  const double resident_ratio =
      bench::median(quotients(with.peak_resident_bytes, without.peak_resident_bytes));
  const double faults_with = bench::median(with.faults);
  const bool same_losses = with.same_losses && without.same_losses && with.loss_bits == without.loss_bits;
  return {{"ratio", ratio},
          {"ratio_least", *least},
          {"ratio_most", *most},
          {"cpu_ratio", bench::median(quotients(without.cpu_seconds, with.cpu_seconds))},
          {"rss_ratio", resident_ratio},
          {"faults_per_step_with", faults_with},
          {"faults_per_step_without", bench::median(without.faults)},
          {"step_ms_with", 1e3 * bench::median(with.wall_seconds)},
          {"step_ms_without", 1e3 * bench::median(without.wall_seconds)},
          {"peak_resident_mib_with", bench::median(with.peak_resident_bytes) / 0x1p20},
          {"peak_resident_mib_without", bench::median(without.peak_resident_bytes) / 0x1p20},
          {"rounds", rounds},
          {"same_losses", same_losses},
          {"good", same_losses && (kind != "stock" || ratio >= kRatioWanted) &&
                       resident_ratio <= kResidentRatioLimit && faults_with <= kFaultsLimit}};
}

void print_text(const char* kind, const json& found) {
  const auto number = [&](const char* key) { return found[key].get<double>(); };
  std::cout << std::fixed << std::setprecision(2) << kind << " step: " << number("step_ms_without")
            << " ms with malloc, " << number("step_ms_with") << " ms with the allocator: x" << number("ratio")
            << " (" << number("ratio_least") << " to " << number("ratio_most") << " in " << found["rounds"]
            << " rounds); CPU time x" << number("cpu_ratio") << "\n"
            << "page faults a step: " << number("faults_per_step_without") << " and "
            << number("faults_per_step_with") << "\n"
            << "peak resident: " << number("peak_resident_mib_without") << " MiB and "
            << number("peak_resident_mib_with") << " MiB: x" << number("rss_ratio") << "\n"
            << (found["same_losses"] ? "losses are equal bit for bit\n" : "LOSSES DIFFER\n")
            << (found["good"] ? "good\n" : "FALLS SHORT of x1.4 in time or x1.15 in resident memory\n");
}

int run(int argc, char** argv) {
  CLI::App app{"Training steps with and without Halfstep's CPU allocator."};
  bool as_json = false;
  int rounds = 5;
  std::string child, allocator;
  app.add_flag("--json", as_json, "print one JSON object");
  app.add_option("--rounds", rounds, "processes of each kind")->check(CLI::Range(3, 1000));
  app.add_option("--child", child, "be one of the processes")->check(CLI::IsMember({"stock", "halfstep"}));
  app.add_option("--allocator", allocator, "of a child")->check(CLI::IsMember({"with", "without"}));
  CLI11_PARSE(app, argc, argv);

  if (!child.empty()) {
    std::cout << train(child, allocator == "with") << "\n";
    return 0;
  }
  json found = compare("stock", rounds);
  found["halfstep"] = compare("halfstep", rounds);
  if (as_json) {
    std::cout << found.dump(2) << "\n";
  } else {
    print_text("stock", found);
    print_text("halfstep", found["halfstep"]);
  }
  return found["good"] && found["halfstep"]["good"] ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return bench::exit_code_of(run, argc, argv); }
