// block_bench: how fast Halfstep computes the blocks that it has loops of its own for, and how exactly,
// beside LibTorch's operations for the same. Alternately in one process; the median of each is reported.
//
//   block_bench [--rounds N] [--threads N] [--only TEXT] [--json]
//
// By operation, direction and shape: milliseconds of both, their ratio with its quartiles over the rounds,
// and the relative error of each result against FP64; of attention, what share of the machine's peak its
// products reach. A table, or JSON. Exits with 1 where a result is further from FP64 than LibTorch's.
#include "block_bench/block_bench.h"

#include <halfstep/autocast.h>
#include <halfstep/machine.h>
#include <halfstep/memory.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>

#include "support/peak.h"
#include "support/program.h"
#include "support/statistics.h"

namespace bench {
namespace {

using Json = nlohmann::ordered_json;

at::Tensor in_scope(const Block& block, const Tensors& inputs) {
  const halfstep::AutocastScope scope(at::kBFloat16, halfstep::OpPolicy::standard(),
                                      {.allow_emulated = true});
  return block.ours(inputs);
}

Tensors leaves_of(const Tensors& inputs) {
  Tensors leaves;
  for (const at::Tensor& input : inputs)
    if (input.requires_grad()) leaves.push_back(input);
  return leaves;
}

Tensors in_fp64(const Tensors& inputs) {
  Tensors copies;
  for (const at::Tensor& input : inputs) {
    const bool casts = input.is_floating_point();
    copies.push_back(casts ? input.detach().to(at::kDouble).requires_grad_(input.requires_grad()) : input);
  }
  return copies;
}

double seconds_on(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Of one thread the processor's time, which other programs on the machine disturb less.
double milliseconds(const std::function<Tensors()>& run) {
  const clockid_t clock = at::get_num_threads() == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC;
  const double begin = seconds_on(clock);
  run();
  return 1e3 * (seconds_on(clock) - begin);
}

Json errors(const Tensors& found, const Tensors& exact) {
  Json json = Json::array();
  for (std::size_t i = 0; i < found.size(); ++i)
    json.push_back(((found[i].to(at::kDouble) - exact[i]).norm() / exact[i].norm()).item<double>());
  return json;
}

/// Before anything is timed. Where both are off by no more than roundings to BF16, of the result and of the
/// gradient that comes in, which way elements near a tie went is chance: 2 %.
bool are_close_enough(const Json& ours, const Json& libtorch) {
  constexpr double kTwoRoundings = 1.42 * 0x1p-9;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    const double error = ours[i].get<double>(), limit = libtorch[i].get<double>();
    if (!(error <= limit || (error <= kTwoRoundings && error <= 1.02 * limit))) return false;
  }
  return true;
}

/// The fastest products that our kernels may use here.
struct Peak {
  const char* of;
  double operations_per_second;
};
Peak peak_of_this_machine(int threads) {
  if (halfstep::inspect_machine().cpu.kernels == "amx") return {"BF16 in AMX tiles", amx_bf16_peak(threads)};
  return {"FP32 vectors", fp32_peak(threads)};
}

Json measured(const BlockCase& each, int rounds, const Peak& peak) {
  const Tensors exact = each.exact();
  Json json{{"error", errors(each.ours(), exact)}, {"libtorch_error", errors(each.libtorch(), exact)}};
  if (!are_close_enough(json["error"], json["libtorch_error"])) return json;
  std::vector<double> ours, libtorch;
  for (int round = 0; round < rounds; ++round) {
    ours.push_back(milliseconds(each.ours));
    libtorch.push_back(milliseconds(each.libtorch));
  }
  json["milliseconds"] = median(ours);
  json["libtorch_milliseconds"] = median(libtorch);
  json["times_as_fast"] = median(libtorch) / median(ours);
  std::vector<double> ratios;
  for (std::size_t i = 0; i < ours.size(); ++i) ratios.push_back(libtorch[i] / ours[i]);
  std::sort(ratios.begin(), ratios.end());
  json["times_as_fast_quartiles"] = {ratios[ratios.size() / 4], ratios[ratios.size() * 3 / 4]};
  if (each.operations > 0) {
    const auto rate = [&](const std::vector<double>& times) {
      return each.operations / (1e-3 * median(times));
    };
    json["gflops"] = 1e-9 * rate(ours);
    json["libtorch_gflops"] = 1e-9 * rate(libtorch);
    json["share_of_peak"] = rate(ours) / peak.operations_per_second;
  }
  return json;
}

void print_line(std::FILE* out, const std::string& key, const Json& found) {
  const Json& quartiles = found["times_as_fast_quartiles"];
  std::fprintf(out, "%-38s%9.2f ms, LibTorch's %9.2f ms, %5.2f times as fast (%.2f to %.2f)", key.c_str(),
               found["milliseconds"].get<double>(), found["libtorch_milliseconds"].get<double>(),
               found["times_as_fast"].get<double>(), quartiles[0].get<double>(), quartiles[1].get<double>());
  if (found.contains("gflops"))
    std::fprintf(out, ", %.0f GFLOP/s, %.0f %% of peak", found["gflops"].get<double>(),
                 100 * found["share_of_peak"].get<double>());
  std::fprintf(out, "\n");
  std::fflush(out);
}

int run(int argc, char** argv) {
  CLI::App app("Halfstep's own blocks beside LibTorch's operations.");
  int rounds = 9, threads = 1;
  std::string only;
  bool as_json = false;
  app.add_option("--rounds", rounds, "of each, alternately")->check(CLI::PositiveNumber);
  app.add_option("--threads", threads)->check(CLI::PositiveNumber);
  app.add_option("--only", only, "cases whose name contains this text");
  app.add_flag("--json", as_json, "JSON on the standard output");
  CLI11_PARSE(app, argc, argv);
  // As in `halfstep train`, for both: else page faults of results are timed too.
  halfstep::install_cpu_allocator();
  at::set_num_threads(threads);
  at::manual_seed(1);

  const Peak peak = peak_of_this_machine(threads);
  Json cases = Json::object();
  bool all_right = true;
  for (const auto& blocks : {attention_blocks(), elementwise_blocks(), convolution_blocks()})
    for (const Block& block : blocks)
      for (const BlockCase& each : cases_of(block)) {
        if (each.key.find(only) == std::string::npos) continue;
        cases[each.key] = measured(each, rounds, peak);
        if (!cases[each.key].contains("times_as_fast")) {
          std::fprintf(stderr, "%s: is wrong: %s\n", each.key.c_str(), cases[each.key].dump().c_str());
          all_right = false;
          continue;
        }
        print_line(as_json ? stderr : stdout, each.key, cases[each.key]);
      }
  const Json found{{"kernels", halfstep::inspect_machine().cpu.kernels},
                   {"threads", threads},
                   {"rounds", rounds},
                   {"peak", {{"of", peak.of}, {"gflops", 1e-9 * peak.operations_per_second}}},
                   {"cases", cases}};
  if (as_json) {
    std::printf("%s\n", found.dump(2).c_str());
  } else {
    std::printf("kernels %s, peak %.0f GFLOP/s of %s\n", halfstep::inspect_machine().cpu.kernels.c_str(),
                1e-9 * peak.operations_per_second, peak.of);
  }
  return all_right ? 0 : 1;
}

}  // namespace

std::vector<BlockCase> cases_of(const Block& block) {
  using Run = std::function<at::Tensor(const Tensors&)>;
  const Run ours = [block](const Tensors& inputs) { return in_scope(block, inputs); };
  const at::Tensor like = block.libtorch(block.inputs);
  const at::Tensor grad = at::randn(like.sizes(), at::kDouble);

  const auto forward = [](const Run& run, const Tensors& inputs) {
    return [=] { return Tensors{run(inputs).detach()}; };
  };
  // The graph is made once; only going back through it is timed.
  const auto backward = [&](const Run& run, const Tensors& inputs) -> std::function<Tensors()> {
    return [run, leaves = leaves_of(inputs), inputs, grad = grad, output = at::Tensor()]() mutable {
      if (!output.defined()) {
        output = run(inputs);
        grad = grad.to(output.scalar_type());
      }
      return torch::autograd::grad({output}, leaves, {grad}, /*retain_graph=*/true);
    };
  };
  const Tensors exact = in_fp64(block.inputs);
  return {{.key = block.name + " forward " + block.shape,
           .ours = forward(ours, block.inputs),
           .libtorch = forward(block.libtorch, block.inputs),
           .exact = forward(block.exact, exact),
           .operations = block.forward_operations},
          {.key = block.name + " backward " + block.shape,
           .ours = backward(ours, block.inputs),
           .libtorch = backward(block.libtorch, block.inputs),
           .exact = backward(block.exact, exact),
           .operations = block.backward_operations}};
}

}  // namespace bench

int main(int argc, char** argv) { return bench::exit_code_of(bench::run, argc, argv); }
