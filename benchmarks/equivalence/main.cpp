// equivalence: does a scheme learn as well as the reference? The byte GPT on real text, pairs of runs with
// the same weights and batches, and the 90% interval of their mean difference in final loss.
//
//   equivalence [--json] [--recipes all] [--seeds N] [--steps N] [--thinned]
//
// Ways to keep weights and moments beside FP32, margin 0.25%; with --recipes all FP8, MXFP8 and NVFP4 beside
// BF16, margin 0.5%. A candidate is equivalent when its whole interval is within the margin; the controls
// must be shown worse than that in the same run. Exits with 1 otherwise. --thinned is for a quick look: 2
// seeds, 40 steps, and exits with 1 only when a run diverges or a control does not learn worse.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "support/children.h"
#include "support/gpt.h"
#include "support/program.h"
#include "verdict.h"

namespace bench {
namespace {

struct Settings {
  int seeds = 16;
  std::int64_t steps = 300;
  int processes = 2;
};

/// One run, in a child.
int run_child(const std::string& scheme, std::uint64_t seed, std::int64_t steps) {
  at::set_num_threads(1);
  const auto begin = std::chrono::steady_clock::now();
  const RunResult result = train(scheme_named(scheme), seed, steps);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  // The loss as text, because JSON has no NaN.
  std::printf("{\"loss\": \"%.17g\", \"skipped_steps\": %lld, \"seconds\": %g}\n", result.loss,
              static_cast<long long>(result.skipped_steps), seconds);
  return 0;
}

/// Runs of every scheme, by scheme and seed.
std::vector<std::vector<RunResult>> run_all(const Settings& settings, const std::vector<Scheme>& schemes) {
  std::vector<Arguments> jobs;
  for (int seed = 0; seed < settings.seeds; ++seed)
    for (const Scheme& scheme : schemes)
      jobs.push_back({"--child", scheme.name, "--seed", std::to_string(seed), "--steps",
                      std::to_string(settings.steps)});
  std::vector<std::vector<RunResult>> runs(schemes.size(), std::vector<RunResult>(settings.seeds));
  std::size_t done = 0;
  run_children(jobs, settings.processes, [&](std::size_t job, const nlohmann::json& answer) {
    const std::size_t scheme = job % schemes.size(), seed = job / schemes.size();
    runs[scheme][seed] = {.loss = std::stod(answer["loss"].get<std::string>()),
                          .skipped_steps = answer["skipped_steps"]};
    std::fprintf(stderr, "%zu of %zu: %s, seed %zu: %.5f in %.1f s\n", ++done, jobs.size(),
                 schemes[scheme].name.c_str(), seed, runs[scheme][seed].loss,
                 answer["seconds"].get<double>());
  });
  return runs;
}

void print_table(const std::vector<Verdict>& verdicts) {
  std::printf("%-22s %10s %10s   %s\n", "scheme", "mean, %", "90% from", "to");
  for (const Verdict& v : verdicts) {
    const Interval& i = v.difference_percent;
    std::printf("%-22s %+10.4f %+10.4f %+10.4f   %s%s%s\n", v.scheme->name.c_str(), i.mean, i.low, i.high,
                v.inside    ? "inside"
                : v.outside ? "outside"
                            : "undecided",
                v.scheme->role == Role::Control ? ", a control" : "",
                v.as_it_should ? "" : "   NOT AS IT SHOULD");
  }
}

const Verdict& verdict_of(const std::vector<Verdict>& verdicts, const std::string& name) {
  for (const Verdict& verdict : verdicts)
    if (verdict.scheme->name == name) return verdict;
  HALFSTEP_BUG("no verdict on ", name);
}

bool good_when_thinned(const std::vector<Verdict>& verdicts, const Study* study) {
  for (const Verdict& verdict : verdicts)
    if (verdict.diverged && verdict.scheme->role != Role::Control) return false;
  if (study == &recipes())
    return verdict_of(verdicts, kUnscaledScheme).difference_percent.low > study->margin_percent;
  return verdict_of(verdicts, kPureBf16Scheme).difference_percent.mean >
         verdict_of(verdicts, kDefaultScheme).difference_percent.mean;
}

bool good_in_full(const std::vector<Verdict>& verdicts) {
  for (const Verdict& verdict : verdicts)
    if (!verdict.as_it_should) return false;
  return true;
}

int run_parent(const Settings& settings, const Study& study, bool as_json, bool thinned) {
  const auto begin = std::chrono::steady_clock::now();
  const auto runs = run_all(settings, study.schemes);
  std::vector<Verdict> verdicts;
  for (std::size_t i = 1; i < study.schemes.size(); ++i)
    verdicts.push_back(judge(study.schemes[i], runs[i], runs[0], study.margin_percent));
  const bool good = thinned ? good_when_thinned(verdicts, &study) : good_in_full(verdicts);
  if (!as_json) {
    print_table(verdicts);
    return good ? 0 : 1;
  }
  nlohmann::ordered_json json{
      {"parameters", parameter_count(Gpt(kByteGpt))},
      {"seeds", settings.seeds},
      {"steps", settings.steps},
      {"reference", study.schemes[0].name},
      {"margin_percent", study.margin_percent},
      {"seconds", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()}};
  for (const auto& run : runs[0]) json["reference_losses"].push_back(run.loss);
  for (const Verdict& verdict : verdicts) json["schemes"].push_back(json_of(verdict));
  json["thinned"] = thinned;
  json["good"] = good;
  std::printf("%s\n", json.dump(2).c_str());
  return good ? 0 : 1;
}

int run(int argc, char** argv) {
  CLI::App app("Does a scheme learn as well as the reference? Pairs of runs of a byte GPT on real text");
  Settings settings;
  bool as_json = false, thinned = false;
  std::string child, which;
  std::uint64_t child_seed = 0;
  app.add_flag("--json", as_json, "Print verdicts and every loss as JSON");
  app.add_option("--seeds", settings.seeds, "Pairs of runs")->check(CLI::Range(2, 32));
  app.add_option("--steps", settings.steps, "Steps of a run")->check(CLI::Range(30, 1'000'000));
  app.add_option("--processes", settings.processes, "Runs at a time, one thread each")
      ->check(CLI::Range(1, 1024));
  app.add_option("--recipes", which, "FP8, MXFP8 and NVFP4 beside BF16: all")->check(CLI::IsMember({"all"}));
  app.add_flag("--thinned", thinned, "2 seeds, 40 steps: only that nothing diverges and that harm shows");
  app.add_option("--child", child, "One run of this scheme")->group("");
  app.add_option("--seed", child_seed)->group("");
  CLI11_PARSE(app, argc, argv);

  if (!child.empty()) return run_child(child, child_seed, settings.steps);
  if (thinned) settings = {.seeds = 2, .steps = 40, .processes = settings.processes};
  return run_parent(settings, which.empty() ? storages() : recipes(), as_json, thinned);
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) { return bench::exit_code_of(bench::run, argc, argv); }
