// cast_sweep: FP32 inputs through every cast, against the reference, between the ISAs, and against ml_dtypes.
//
//   cast_sweep           where casts go wrong, and every 251st of the 2^32 inputs
//   cast_sweep --full    all 2^32
//
// Exits with 1 when a cast differs from the reference, when ml_dtypes differs elsewhere than on the written
// list (kDisagreements), or when a full sweep takes more than ten minutes.
#include <halfstep/error.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/cpu_features.h"
#include "sweep.h"

namespace halfstep::sweep {
namespace {

constexpr double kSecondsAllowedForFull = 600;

void show_progress(double share) {
  if (isatty(STDERR_FILENO)) std::fprintf(stderr, "\r%5.1f %%", 100 * share);
}

/// How many of the swept inputs must differ, by the list.
std::uint64_t expected_count(Oracle oracle, Format format, const std::vector<Range>& ranges, bool full) {
  std::uint64_t count = 0;
  for (const Disagreement& d : kDisagreements) {
    if (d.oracle != oracle || d.format != format) continue;
    if (full) {
      count += d.count_of_all_inputs;
      continue;
    }
    for (const Range& range : ranges)
      for (std::uint32_t i = 0; i < range.count; ++i) count += d.contains(range.first + i * range.stride);
  }
  return count;
}

/// CPU time of this process and of the Pythons that have ended: what the sweep costs whatever else is
/// running.
double cpu_seconds() {
  double seconds = 0;
  for (int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage usage{};
    getrusage(who, &usage);
    for (timeval t : {usage.ru_utime, usage.ru_stime})
      seconds += static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  }
  return seconds;
}

double nanoseconds(const Cost& cost) { return 1e9 * cost.seconds / static_cast<double>(cost.casts); }

/// The summary; adds to `faults` a line for everything that falls short.
nlohmann::ordered_json summarise(const Tally& tally, const std::vector<Range>& ranges, bool full,
                                 std::vector<std::string>& faults) {
  nlohmann::ordered_json json;
  json["full"] = full;
  json["inputs"] = tally.inputs;
  json["oracle"] = tally.oracle_versions;
  json["ns_per_cast"]["reference"] = nanoseconds(tally.reference);
  for (std::size_t t = 0; t < tally.kernels.size(); ++t)
    json["ns_per_cast"][available_kernels()[t]->isa] = nanoseconds(tally.kernels[t]);

  json["casts"] = nlohmann::ordered_json::array();
  for (int f = 0; f < kSweptCount; ++f) {
    const Format format = kSweptFormats[f];
    for (int m = 0; m < kModeCount; ++m) {
      nlohmann::ordered_json row{{"format", traits(format).name}, {"mode", kModes[m].name}};
      for (std::size_t t = 0; t < tally.kernels.size(); ++t) {
        const std::uint64_t count = tally.kernel_mismatches[t][f][m];
        row["mismatches"][available_kernels()[t]->isa] = count;
        if (count > 0)
          faults.push_back(detail::concat(available_kernels()[t]->isa, ", ", traits(format).name, ", ",
                                          kModes[m].name, ": ", count, " inputs differ from the reference"));
      }
      for (int o = 0; o < kOracleCount; ++o) {
        if (!is_asked(Oracle(o), format, m) || (Oracle(o) == Oracle::Processor && !cpu_features().avx2))
          continue;
        const std::uint64_t expected = expected_count(Oracle(o), format, ranges, full);
        const OracleCounts found = tally.oracles[o][f][m];
        row["disagreements"][kOracleNames[o]] = {
            {"expected", expected}, {"found", found.listed}, {"unlisted", found.unlisted}};
        if (found.listed != expected || found.unlisted > 0)
          faults.push_back(detail::concat(kOracleNames[o], ", ", traits(format).name, ", ", kModes[m].name,
                                          ": ", found.listed, " disagreements of the list instead of ",
                                          expected, ", and ", found.unlisted, " that are not on it"));
      }
      json["casts"].push_back(std::move(row));
    }
  }
  return json;
}

void print_table(const nlohmann::ordered_json& json) {
  std::printf("%llu inputs, %.1f s on %d threads (%.1f s of CPU); %s\n",
              json["inputs"].get<unsigned long long>(), json["seconds"].get<double>(),
              json["threads"].get<int>(), json["cpu_seconds"].get<double>(),
              json["oracle"].get<std::string>().c_str());
  for (const auto& [who, ns] : json["ns_per_cast"].items())
    std::printf("  %-10s %6.2f ns a cast\n", who.c_str(), ns.get<double>());
  for (const auto& row : json["casts"]) {
    std::printf("%-9s %-24s", row["format"].get<std::string>().c_str(),
                row["mode"].get<std::string>().c_str());
    for (const auto& [isa, count] : row["mismatches"].items())
      std::printf(" %s %llu", isa.c_str(), count.get<unsigned long long>());
    if (row.contains("disagreements"))
      for (const auto& [who, counts] : row["disagreements"].items())
        std::printf("   %s %llu listed, %llu not", who.c_str(), counts["found"].get<unsigned long long>(),
                    counts["unlisted"].get<unsigned long long>());
    std::printf("\n");
  }
}

std::string default_python() {
  const char* named = std::getenv("HALFSTEP_PYTHON");
  return named ? named : HALFSTEP_DEFAULT_PYTHON;
}

int run(int argc, char** argv) {
  CLI::App app(
      "FP32 inputs through every cast, against the reference, between the ISAs, and against ml_dtypes");
  bool full = false, as_json = false;
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  std::string python = default_python();
  app.add_flag("--full", full, "All 2^32 inputs");
  app.add_flag("--json", as_json, "Print the summary as JSON");
  app.add_option("--threads", threads, "Threads, each with a Python beside it")->check(CLI::Range(1, 1024));
  app.add_option("--python", python, "Python with numpy and ml_dtypes");
  CLI11_PARSE(app, argc, argv);

  const auto begin = std::chrono::steady_clock::now();
  const std::vector<Range> ranges = ranges_to_sweep(full);
  const Tally tally = sweep(ranges, threads, python, show_progress);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (isatty(STDERR_FILENO)) std::fprintf(stderr, "\r        \r");

  std::vector<std::string> faults;
  nlohmann::ordered_json json = summarise(tally, ranges, full, faults);
  if (full && seconds > kSecondsAllowedForFull)
    faults.push_back(
        detail::concat("the full sweep took ", seconds, " s, allowed are ", kSecondsAllowedForFull));
  json["threads"] = threads;
  json["seconds"] = seconds;
  json["cpu_seconds"] = cpu_seconds();
  json["passed"] = faults.empty();
  as_json ? void(std::printf("%s\n", json.dump(2).c_str())) : print_table(json);

  std::fflush(stdout);  // the faults come after the table, also where both go into one file
  for (const std::string& fault : faults) std::fprintf(stderr, "cast_sweep: %s\n", fault.c_str());
  for (const Mismatch& m : tally.first_mismatches)
    std::fprintf(stderr, "  %s: input 0x%08x gave 0x%x, expected 0x%x\n", m.what.c_str(), m.input, m.got,
                 m.expected);
  return faults.empty() ? 0 : 1;
}

}  // namespace
}  // namespace halfstep::sweep

int main(int argc, char** argv) {
  try {
    return halfstep::sweep::run(argc, argv);
  } catch (const halfstep::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
