// `crash_sweep`: breaks the saving of a checkpoint off at every moment, and damages every bit of one. Run by
// tools/crash_sweep.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>

#include "checkpoint/sweep/sweep.h"

namespace halfstep::testing {
namespace {

using nlohmann::ordered_json;

constexpr size_t kDamagedBytes = size_t{64} << 10;
constexpr int kRandomChoices = 12;

struct Row {
  std::string name;
  SweepResult result;
  int64_t points_wanted = 1;
  bool must_find_faults = false;  // of a sweep over a protocol that was broken on purpose
  double seconds = 0;

  bool passed() const {
    return result.points >= points_wanted && (result.fault_count > 0) == must_find_faults;
  }
};

class Program {
 public:
  Program(int64_t points, std::string only) : points_(points), only_(std::move(only)) {}

  std::vector<Row> run() {
    over_scenarios("SIGKILL", [](const Scenario& one) { return sweep_kills(one); });
    over_scenarios("power loss", [](const Scenario& one) { return sweep_power(one, kRandomChoices); });
    over_scenarios("SIGKILL, then power loss",
                   [](const Scenario& one) { return sweep_kill_then_power(one, 5); });
    over_scenarios("errors", [](const Scenario& one) { return sweep_errors(one); });
    // A point for each bit, and one for each length.
    row("damage of 64 KiB", 9 * kDamagedBytes, false, [] { return sweep_damage(kDamagedBytes, 1); });

    const Scenario one = scenario(2);
    const auto sabotaged_power = [&](const shim::Plan& plan) {
      return sweep_power(one, kRandomChoices, plan);
    };
    row("sabotage: files are not synced", 1, true,
        [&] { return sabotaged_power({.folder = "", .no_file_sync = true}); });
    row("sabotage: folders are not synced", 1, true,
        [&] { return sabotaged_power({.folder = "", .no_folder_sync = true}); });
    row("sabotage: written in place", 1, true,
        [&] { return sweep_kills(one, {.folder = "", .dropped_prefix = ".aside-"}); });
    row("sabotage: removed in place", 1, true,
        [&] { return sweep_kills(one, {.folder = "", .dropped_prefix = ".removed-"}); });
    return std::move(rows_);
  }

 private:
  void row(const std::string& name, int64_t points_wanted, bool must_find_faults,
           const std::function<SweepResult()>& sweep) {
    if (name.find(only_) == std::string::npos) return;
    std::cerr << "crash_sweep: " << name << std::flush;
    const auto start = std::chrono::steady_clock::now();
    Row row{.name = name,
            .result = sweep(),
            .points_wanted = points_wanted,
            .must_find_faults = must_find_faults};
    row.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::cerr << ": " << row.result.points << " points, " << row.result.fault_count << " faults, "
              << row.seconds << " s\n";
    rows_.push_back(std::move(row));
  }

  /// One scenario after another until there are as many points as were asked for, and at least five.
  void over_scenarios(const std::string& name, const std::function<SweepResult(const Scenario&)>& sweep) {
    row(name, points_, false, [&] {
      SweepResult all;
      for (uint64_t number = 0; number < 5 || all.points < points_; ++number) all += sweep(scenario(number));
      return all;
    });
  }

  int64_t points_;
  std::string only_;
  std::vector<Row> rows_;
};

void print(const std::vector<Row>& rows, bool as_json) {
  ordered_json answer = ordered_json::array();
  for (const Row& row : rows) {
    answer.push_back({{"sweep", row.name},
                      {"points", row.result.points},
                      {"points_wanted", row.points_wanted},
                      {"faults", row.result.fault_count},
                      {"faults_expected", row.must_find_faults},
                      {"passed", row.passed()},
                      {"seconds", row.seconds},
                      {"examples", row.result.faults}});
    if (as_json) continue;
    std::cout << (row.passed() ? "ok      " : "FAILED  ") << row.name << ": " << row.result.points
              << " points, " << row.result.fault_count << " faults"
              << (row.must_find_faults ? " (as it must be)" : "") << "\n";
    if (!row.passed())
      for (const std::string& fault : row.result.faults) std::cout << "          " << fault << "\n";
  }
  if (as_json) std::cout << answer.dump(2) << "\n";
}

int run(int argc, char** argv) {
  CLI::App program("Breaks the saving of a checkpoint off at every moment.", "crash_sweep");
  int64_t points = 500;
  bool json = false;
  program.add_option("--points", points, std::string("At least so many points of each kind of fault"))
      ->capture_default_str();
  std::string only;
  program.add_option("--only", only, std::string("Only the sweeps whose name contains this: errors, damage"));
  program.add_flag("--json", json, std::string("As JSON"));
  CLI11_PARSE(program, argc, argv);
  const std::vector<Row> rows = Program(points, only).run();
  print(rows, json);
  if (rows.empty()) return 2;
  return std::all_of(rows.begin(), rows.end(), [](const Row& row) { return row.passed(); }) ? 0 : 1;
}

}  // namespace
}  // namespace halfstep::testing

int main(int argc, char** argv) { return halfstep::testing::run(argc, argv); }
