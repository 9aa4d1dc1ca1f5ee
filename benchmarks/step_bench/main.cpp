// step_bench: what comes after backward, Halfstep's way and LibTorch's, interleaved in one run.
//
//   step_bench [--json] [--rounds N] [--threads N] [--floor SHARE] [--device cuda:0]
//
// tails.h says what each does. Weights are compared before anything is timed. Exits with 1 when a figure is
// below SHARE times its goal. The goals are a CPU's: on another device nothing is insisted on unless SHARE is
// given.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "compare.h"
#include "support/program.h"

namespace bench {
namespace {

struct Goal {
  const char* key;
  Figure found;
  double goal;
};

nlohmann::ordered_json json_of(const Figure& figure) {
  return {{"median", figure.median}, {"standard_error", figure.error}};
}

nlohmann::ordered_json json_of(const Comparison& c) {
  nlohmann::ordered_json json{{"parameters", c.parameters},
                              {"tensors", c.tensors},
                              {"rounds", c.rounds},
                              {"worst_difference_of_allowed", c.worst_of_allowed},
                              {"halfstep_norm_error", c.halfstep_norm_error},
                              {"engine_norm_error", c.engine_norm_error},
                              {"read_modify_write_gb_per_second", c.read_modify_write_gb_per_second}};
  for (std::size_t i = 0; i < kTailNames.size(); ++i)
    json["milliseconds"][kTailNames[i]] = json_of(c.milliseconds[i]);
  json["vs_engine_fp32_grads"] = json_of(c.vs_engine_fp32_grads);
  json["vs_engine_bf16_grads"] = json_of(c.vs_engine_bf16_grads);
  json["fp32_master_vs_engine_fp32_grads"] = json_of(c.fp32_master_vs_engine_fp32_grads);
  json["fp32_master_vs_engine_bf16_grads"] = json_of(c.fp32_master_vs_engine_bf16_grads);
  json["vs_torch_optim"] = json_of(c.vs_torch_optim);
  json["vs_torch_optim_bf16_grads"] = json_of(c.vs_torch_optim_bf16_grads);
  json["vs_torch_optim_step_alone"] = json_of(c.vs_torch_optim_step_alone);
  json["bandwidth_share_fp32_grads"] = json_of(c.bandwidth_share_fp32_grads);
  json["bandwidth_share_bf16_grads"] = json_of(c.bandwidth_share_bf16_grads);
  return json;
}

void print_table(const char* title, const Comparison& c) {
  std::printf(
      "%s: %lld parameters in %lld tensors, %d rounds; weights agree, at most %.2f of what rounding allows\n",
      title, static_cast<long long>(c.parameters), static_cast<long long>(c.tensors), c.rounds,
      c.worst_of_allowed);
  for (std::size_t i = 0; i < kTailNames.size(); ++i)
    std::printf("  %-30s %9.3f ms  +- %.3f\n", kTailNames[i].c_str(), c.milliseconds[i].median,
                c.milliseconds[i].error);
  std::printf(
      "  memory read and written back at %.1f GB/s; the split master's tail at %.2f (FP32 gradients) and "
      "%.2f "
      "(BF16) of it\n",
      c.read_modify_write_gb_per_second, c.bandwidth_share_fp32_grads.median,
      c.bandwidth_share_bf16_grads.median);
  std::printf("  FP32 master: x%.2f (FP32 gradients) and x%.2f (BF16) of the engine\n",
              c.fp32_master_vs_engine_fp32_grads.median, c.fp32_master_vs_engine_bf16_grads.median);
}

int run(int argc, char** argv) {
  CLI::App app("What comes after backward, Halfstep's way and LibTorch's, interleaved in one run");
  bool as_json = false;
  int rounds = 15, threads = 2;
  std::optional<double> asked_floor;
  std::string device_name = "cpu";
  app.add_flag("--json", as_json, "Print the figures as JSON");
  app.add_option("--rounds", rounds, "Interleaved rounds; 15 or more for a steady median")
      ->check(CLI::Range(3, 10'000));
  app.add_option("--threads", threads, "Threads of LibTorch and of Halfstep")->check(CLI::Range(1, 1024));
  app.add_option("--device", device_name, "Where weights and gradients are: cpu, cuda:0, ...");
  app.add_option("--floor", asked_floor, "Share of each goal to insist on; for machines with other work")
      ->check(CLI::Range(0.0, 1.0));
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(threads);
  at::manual_seed(1);
  const at::Device device(device_name);
  const double floor = asked_floor.value_or(device.is_cpu() ? 1 : 0);
  const Comparison small = compare(small_weights(device), rounds);
  std::fprintf(stderr, "small: weights agree, %d rounds timed\n", rounds);
  const Comparison large = compare(gpt2_weights(device), rounds);
  const bool fp32_is_lower =
      large.bandwidth_share_fp32_grads.median < large.bandwidth_share_bf16_grads.median;
  const Goal goals[] = {
      {"vs_engine_fp32_grads", large.vs_engine_fp32_grads, 2.0},
      {"vs_engine_bf16_grads", large.vs_engine_bf16_grads, 2.5},
      {"vs_torch_optim", large.vs_torch_optim, 6.0},
      {"bandwidth_share", fp32_is_lower ? large.bandwidth_share_fp32_grads : large.bandwidth_share_bf16_grads,
       0.85},
      {"small_vs_torch_optim", small.vs_torch_optim, 3.0},
  };

  nlohmann::ordered_json json;
  bool good = true;
  for (const Goal& goal : goals) {
    json[goal.key] = goal.found.median;
    json["standard_errors"][goal.key] = goal.found.error;
    json["goals"][goal.key] = goal.goal;
    good = good && goal.found.median >= floor * goal.goal;
  }
  json["device"] = device_name;
  json["threads"] = threads;
  json["floor"] = floor;
  json["large"] = json_of(large);
  json["small"] = json_of(small);
  json["good"] = good;
  if (as_json) {
    std::printf("%s\n", json.dump(2).c_str());
  } else {
    print_table("GPT-2 124M", large);
    print_table("small", small);
    for (const Goal& goal : goals)
      std::printf("%-22s %6.2f +- %.2f   goal %.2f%s\n", goal.key, goal.found.median, goal.found.error,
                  goal.goal, goal.found.median >= goal.goal ? "" : "   SHORT");
  }
  return good ? 0 : 1;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) { return bench::exit_code_of(bench::run, argc, argv); }
