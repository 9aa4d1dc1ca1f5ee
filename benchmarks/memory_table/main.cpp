// memory_table: bytes a parameter, and the peak of a whole training step, by scheme, on two GPTs.
//
//   memory_table [--model gpt_30m] [--json]
//
// Counted by Halfstep's allocator: every CPU tensor that LibTorch allocates, FP32 training by LibTorch alone
// included. Each scheme runs in a process of its own. Exits with 1 when a figure misses its goal. Peaks have
// goals where BF16 is native: without its instructions LibTorch makes an FP32 result of every product first.
#include <halfstep/autocast.h>
#include <halfstep/error.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "measure.h"
#include "support/children.h"
#include "support/program.h"

namespace bench {
namespace {

using Json = nlohmann::ordered_json;
using std::int64_t;

constexpr double kMostBytesWith8BitMoments = 9;

/// Peak over that of FP32 training by LibTorch alone, at most.
struct PeakGoal {
  const char* model;
  const char* scheme;
  double ratio;
};
constexpr PeakGoal kPeakGoals[] = {
    {"gpt2_124m", "bf16", 0.70},
    {"gpt2_124m", "bf16_bf16_moments", 0.55},
    {"gpt2_124m", "bf16_8bit_moments_checkpointed", 0.45},
    {"gpt_30m", "bf16", 0.60},
    {"gpt_30m", "bf16_8bit_moments_checkpointed", 0.35},
};

template <typename Named>
const Named& named(const std::vector<Named>& all, const std::string& name) {
  for (const Named& one : all)
    if (one.name == name) return one;
  halfstep::detail::throw_error("memory_table: nothing is called '" + name + "'");
}

Json by_class(const halfstep::MemoryAmounts& amounts) {
  Json json;
  for (std::size_t c = 0; c < halfstep::kMemoryClassCount; ++c)
    json[halfstep::name_of(static_cast<halfstep::MemoryClass>(c))] = amounts.by_class[c];
  json["total"] = amounts.total;
  return json;
}

int run_child(const std::string& model, const std::string& scheme, int threads) {
  at::set_num_threads(threads);
  const MemoryFound found = measure(named(memory_cases(), model), named(memory_schemes(), scheme));
  const Json json{{"parameters", found.parameters},
                  {"trained", found.trained},
                  {"bytes_per_parameter", found.bytes_per_parameter()},
                  {"after_backward", by_class(found.after_backward)},
                  {"at_peak", by_class(found.at_peak)}};
  std::printf("%s\n", json.dump().c_str());
  return 0;
}

/// By model, then by scheme; every model when none is named.
Json measure_all(const std::string& only, int threads) {
  std::vector<Arguments> jobs;
  std::vector<std::pair<std::string, std::string>> names;
  for (const auto& model : memory_cases())
    for (const auto& scheme : memory_schemes()) {
      if (!only.empty() && model.name != only) continue;
      names.emplace_back(model.name, scheme.name);
      jobs.push_back({"--model", model.name, "--scheme", scheme.name, "--threads", std::to_string(threads)});
    }
  Json found;
  run_children(jobs, /*at_once=*/1, [&](std::size_t job, const nlohmann::json& answer) {
    const auto& [model, scheme] = names[job];
    found[model][scheme] = answer;
    found[model][scheme]["peak_ratio"] =
        answer["at_peak"]["total"].get<double>() / found[model]["fp32"]["at_peak"]["total"].get<double>();
    std::fprintf(stderr, "%zu of %zu: %s, %s\n", job + 1, jobs.size(), model.c_str(), scheme.c_str());
  });
  return found;
}

void print_table(const Json& found) {
  for (const auto& [model, schemes] : found.items()) {
    std::printf("%s, %lld parameters\n%-32s %10s  %21s  at peak, MB: %8s %8s %8s %8s %8s %8s\n",
                model.c_str(), schemes["fp32"]["parameters"].get<long long>(), "  scheme", "bytes each",
                "peak, MB (of FP32)", "working", "master", "gradient", "moments", "activ.", "other");
    for (const auto& [scheme, row] : schemes.items()) {
      const Json& peak = row["at_peak"];
      const auto megabytes = [&](const char* name) { return peak[name].get<double>() / 1e6; };
      std::printf("  %-30s %10.3f  %11.0f (%6.3f)                %8.0f %8.0f %8.0f %8.0f %8.0f %8.0f\n",
                  scheme.c_str(), row["bytes_per_parameter"].get<double>(), megabytes("total"),
                  row["peak_ratio"].get<double>(), megabytes("working"), megabytes("master"),
                  megabytes("gradient"), megabytes("moments"), megabytes("activation"),
                  megabytes("cast_cache") + megabytes("other"));
    }
  }
}

/// One line for each goal that is missed.
std::vector<std::string> shortfalls(const Json& found, bool judge_peaks) {
  std::vector<std::string> lines;
  for (const auto& [model, schemes] : found.items()) {
    const double bytes = schemes["bf16_8bit_moments"]["bytes_per_parameter"];
    if (bytes > kMostBytesWith8BitMoments)
      lines.push_back(halfstep::detail::concat(model, ", 8-bit moments: ", bytes,
                                               " bytes a parameter, at most ", kMostBytesWith8BitMoments));
    // A split master is 2 bytes and FP32 moments are 8, of what is trained; frozen parameters have neither.
    const Json& row = schemes["bf16_last_block_only"];
    const int64_t trained = row["trained"], master = row["after_backward"]["master"],
                  moments = row["after_backward"]["moments"];
    if (master != 2 * trained || moments != 8 * trained)
      lines.push_back(halfstep::detail::concat(model, ", last block only: ", trained,
                                               " trained parameters have ", master, " bytes of masters and ",
                                               moments, " of moments"));
  }
  for (const PeakGoal& goal : kPeakGoals) {
    if (!judge_peaks || !found.contains(goal.model)) continue;
    const double ratio = found[goal.model][goal.scheme]["peak_ratio"];
    if (ratio > goal.ratio)
      lines.push_back(halfstep::detail::concat(goal.model, ", ", goal.scheme, ": peak ", ratio,
                                               " of FP32 training, at most ", goal.ratio));
  }
  return lines;
}

int run(int argc, char** argv) {
  CLI::App app("Bytes a parameter, and the peak of a whole training step, by scheme");
  bool as_json = false;
  int threads = 2;
  std::string model, scheme;
  app.add_flag("--json", as_json, "Print every count as JSON");
  app.add_option("--threads", threads, "Threads of LibTorch")->check(CLI::Range(1, 1024));
  app.add_option("--model", model, "Only this one");
  app.add_option("--scheme", scheme, "With --model: only this one, here and now")->needs("--model");
  CLI11_PARSE(app, argc, argv);
  if (!scheme.empty()) return run_child(model, scheme, threads);

  const Json found = measure_all(model.empty() ? model : named(memory_cases(), model).name, threads);
  const auto bf16 = halfstep::precision_support(at::kBFloat16);
  const bool native = bf16.support == halfstep::Support::Native;
  const auto missed = shortfalls(found, native);
  if (as_json) {
    const Json json{
        {"models", found}, {"peaks_judged", native}, {"shortfalls", missed}, {"good", missed.empty()}};
    std::printf("%s\n", json.dump(2).c_str());
  } else {
    print_table(found);
    for (const auto& line : missed) std::printf("SHORT: %s\n", line.c_str());
    if (!native)
      std::printf(
          "Peaks are not judged: BF16 is emulated here (%s), and an FP32 result of each product is among "
          "them.\n",
          bf16.reason.c_str());
  }
  return missed.empty() ? 0 : 1;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) { return bench::exit_code_of(bench::run, argc, argv); }
