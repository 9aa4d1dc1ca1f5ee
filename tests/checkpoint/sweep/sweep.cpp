#include "checkpoint/sweep/sweep.h"

#include <algorithm>

#include "checkpoint/leftovers.h"
#include "checkpoint_format/checkpoint_reader.h"
#include "checkpoint_format/step_folders.h"

namespace halfstep::testing {

namespace fs = std::filesystem;

void SweepResult::add(std::string where, const std::string& fault) {
  ++points;
  if (fault.empty()) return;
  ++fault_count;
  constexpr size_t kTold = 10;
  if (faults.size() < kTold) faults.push_back(std::move(where) + ": " + fault);
}

SweepResult& SweepResult::operator+=(const SweepResult& other) {
  points += other.points;
  fault_count += other.fault_count;
  faults.insert(faults.end(), other.faults.begin(), other.faults.end());
  return *this;
}

Scenario scenario(uint64_t number) {
  constexpr ContentShape kShapes[] = {{.tensor_count = 1, .largest_bytes = 0},
                                      {.tensor_count = 4, .largest_bytes = 3000},
                                      {.tensor_count = 9, .largest_bytes = 9000},
                                      {.tensor_count = 3, .largest_bytes = 100'000},
                                      {.tensor_count = 24, .largest_bytes = 500}};
  Scenario one{.shape = kShapes[number % std::size(kShapes)]};
  one.shape.seed = number + 1;
  return one;
}

void prepare(const Scenario& scenario, const fs::path& run) {
  files::CheckpointWriter writer(run, {.keep_last = Scenario::kKept});
  for (const int64_t step : {Scenario::kOldest, Scenario::kPrevious})
    writer.save(Content(scenario.shape, step).checkpoint());
}

std::string fault_after(const Scenario& scenario, const fs::path& run, bool saved) {
  try {
    const std::vector<int64_t> steps = files::checkpoint_steps(run);
    for (const int64_t step : steps)
      if (const std::string fault = fault_of(run, scenario.shape, step); !fault.empty())
        return "step " + std::to_string(step) + " is not whole: " + fault;
    const int64_t needed = saved ? Scenario::kNew : Scenario::kPrevious;
    if (steps.empty() || steps.back() < needed) return "step " + std::to_string(needed) + " is lost";

    files::CheckpointWriter again(run, {.keep_last = Scenario::kKept});
    if (const auto names = leftovers_in(run); !names.empty()) return "left behind: " + names.front();
    again.save(Content(scenario.shape, Scenario::kNext).checkpoint());
    if (const std::string fault = fault_of(run, scenario.shape, Scenario::kNext); !fault.empty())
      return "the next save is not whole: " + fault;
    if (const auto names = leftovers_in(run); !names.empty())
      return "left behind at the end: " + names.front();
    if (files::checkpoint_steps(run).size() > Scenario::kKept) return "more are kept than asked for";
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

std::vector<shim::Call> calls_of_save(const Scenario& scenario) {
  const ScratchFolder scratch;
  const fs::path run = scratch.path() / "run";
  prepare(scenario, run);
  shim::begin({.folder = run});
  {
    files::CheckpointWriter writer(run, {.keep_last = Scenario::kKept});
    writer.save(Content(scenario.shape, Scenario::kNew).checkpoint());
  }
  return shim::end();
}

}  // namespace halfstep::testing
