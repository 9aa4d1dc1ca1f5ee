// What the CPU allocator buys: whole BF16 training steps of a 30M GPT with and without it, in processes that
// take turns, so that neither inherits the other's memory.
//
//   allocator_bench [--json] [--rounds N]      N >= 3
//
// Both must reach the same losses bit for bit. Exits with 1 when they do not, when a step is less than 1.4
// times as fast, when it still takes page faults to speak of, or when peak resident memory is more than 1.15
// times what malloc needs.
#include <halfstep/autocast.h>
#include <halfstep/memory.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <chrono>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>

#include "support/children.h"
#include "support/gpt.h"
#include "support/statistics.h"

namespace {

using nlohmann::json;

constexpr double kRatioWanted = 1.4;
constexpr double kResidentRatioLimit = 1.15;
constexpr double kFaultsLimit = 100;  // a step; malloc takes some 600,000

constexpr std::int64_t kBatch = 8;
constexpr int kThreads = 2;
constexpr int kWarmUpSteps = 4, kSteps = 7;

/// AdamW as the engine has it fused, over FP32 parameters, with clipping.
class Trainer {
 public:
  explicit Trainer(bench::Gpt& model) : params_(model.parameters()) {
    const halfstep::MemoryClassScope scope(halfstep::MemoryClass::Moments);
    for (const auto& param : params_) {
      first_moments_.push_back(at::zeros_like(param));
      second_moments_.push_back(at::zeros_like(param));
      steps_.push_back(at::zeros({}));
    }
  }

  void step() {
    const torch::NoGradGuard no_grad;
    std::vector<at::Tensor> grads;
    for (auto& param : params_) {
      param.mutable_grad() = param.grad().contiguous();
      halfstep::tag_memory(param.grad(), halfstep::MemoryClass::Gradient);
      grads.push_back(param.grad());
    }
    torch::nn::utils::clip_grad_norm_(params_, 1.0);
    at::_foreach_add_(steps_, 1);
    at::_fused_adamw_(params_, grads, first_moments_, second_moments_, {}, steps_, /*lr=*/3e-4, 0.9, 0.95,
                      /*weight_decay=*/0.1, 1e-8, /*amsgrad=*/false, /*maximize=*/false);
    for (auto& param : params_) param.mutable_grad().reset();
  }

 private:
  std::vector<at::Tensor> params_, first_moments_, second_moments_, steps_;
};

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
json train(bool with_allocator) {
  using halfstep::MemoryClass;
  if (with_allocator) halfstep::install_cpu_allocator();
  at::set_num_threads(kThreads);
  at::manual_seed(1);
  bench::Gpt model(bench::kGpt30M);
  for (const auto& param : model.parameters()) halfstep::tag_memory(param, MemoryClass::Working);
  const std::vector<std::int64_t> shape{kBatch, bench::kGpt30M.context};
  const auto tokens = at::randint(bench::kGpt30M.vocabulary, shape, at::kLong);
  const auto targets = at::randint(bench::kGpt30M.vocabulary, shape, at::kLong);
  Trainer trainer(model);

  json result;
  for (int i = 0; i < kWarmUpSteps + kSteps; ++i) {
    const rusage before = usage();
    const double start = seconds();
    at::Tensor loss;
    {
      const halfstep::MemoryClassScope activations(MemoryClass::Activation);
      {
        const halfstep::AutocastScope bf16(at::kBFloat16, halfstep::OpPolicy::standard(),
                                           {.allow_emulated = true});
        loss = model.loss(tokens, targets);
      }
      loss.backward();
    }
    trainer.step();
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

json compare(int rounds) {
  Runs with, without;
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::string> kinds{"with", "without"};
    if (round % 2 == 1) std::swap(kinds[0], kinds[1]);  // nobody is always first
    bench::run_children(
        {{"--child", kinds[0]}, {"--child", kinds[1]}}, 1,
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
          {"good", same_losses && ratio >= kRatioWanted && resident_ratio <= kResidentRatioLimit &&
                       faults_with <= kFaultsLimit}};
}

void print_text(const json& found) {
  const auto number = [&](const char* key) { return found[key].get<double>(); };
  std::cout << std::fixed << std::setprecision(2) << "a step: " << number("step_ms_without")
            << " ms with malloc, " << number("step_ms_with") << " ms with the allocator: x" << number("ratio")
            << " (" << number("ratio_least") << " to " << number("ratio_most") << " in " << found["rounds"]
            << " rounds); CPU time x" << number("cpu_ratio") << "\n"
            << "page faults a step: " << number("faults_per_step_without") << " and "
            << number("faults_per_step_with") << "\n"
            << "peak resident: " << number("peak_resident_mib_without") << " MiB and "
            << number("peak_resident_mib_with") << " MiB: x" << number("rss_ratio") << "\n"
            << (found["same_losses"] ? "losses are equal bit for bit\n" : "LOSSES DIFFER\n")
            << (found["good"] ? "good: at least x1.4, at most x1.15 resident\n" : "FALLS SHORT\n");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Training steps with and without Halfstep's CPU allocator."};
  bool as_json = false;
  int rounds = 5;
  std::string child;
  app.add_flag("--json", as_json, "print one JSON object");
  app.add_option("--rounds", rounds, "processes of each kind")->check(CLI::Range(3, 1000));
  app.add_option("--child", child, "be one of the processes")->check(CLI::IsMember({"with", "without"}));
  CLI11_PARSE(app, argc, argv);

  if (!child.empty()) {
    std::cout << train(child == "with") << "\n";
    return 0;
  }
  const json found = compare(rounds);
  as_json ? void(std::cout << found << "\n") : print_text(found);
  return found["good"] ? 0 : 1;
}
