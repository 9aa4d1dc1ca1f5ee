// Sweeps over every moment at which saving a checkpoint can be broken off. Each returns how many points it
// tried and what was wrong at which.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/content.h"
#include "checkpoint/shim.h"

namespace halfstep::testing {

struct SweepResult {
  int64_t points = 0;
  int64_t fault_count = 0;
  std::vector<std::string> faults{};  ///< the first few, in words

  void add(std::string where, const std::string& fault);
  SweepResult& operator+=(const SweepResult& other);
};

/// The folder that every point starts from: checkpoints of steps 1 and 2, of which `keep_last` = 2 are kept,
/// so that saving step 3 removes step 1.
struct Scenario {
  ContentShape shape{};
  static constexpr int64_t kKept = 2;
  static constexpr int64_t kOldest = 1, kPrevious = 2, kNew = 3, kNext = 4;
};

/// Scenarios that differ in the number and size of tensors.
Scenario scenario(uint64_t number);

/// Checkpoints of steps 1 and 2, in `run`.
void prepare(const Scenario& scenario, const std::filesystem::path& run);

/// What is wrong with a run's folder after something happened while step 3 was saved, in words; "" if
/// nothing. Every checkpoint in it must be whole; step 3 must be there if saving it returned, step 2
/// otherwise. Then it is opened again, and the next step saved.
std::string fault_after(const Scenario& scenario, const std::filesystem::path& run, bool saved);

/// The calls of opening the folder and saving step 3.
std::vector<shim::Call> calls_of_save(const Scenario& scenario);

/// SIGKILL before and after every call, and in the middle of every write.
SweepResult sweep_kills(const Scenario& scenario, const shim::Plan& sabotage = {});

/// Every errno at every call.
SweepResult sweep_errors(const Scenario& scenario);

/// Loss of power after every change, with `random_choices` of what survives beside the six plain ones.
SweepResult sweep_power(const Scenario& scenario, int random_choices, const shim::Plan& sabotage = {});

/// A kill at each change of a save, then the folder opened again and a save, and a loss of power within that:
/// at every change while what the kill left is tidied up, and at every `stride`-th one later.
SweepResult sweep_kill_then_power(const Scenario& scenario, int64_t stride);

/// Every `stride`-th bit flipped, in both files, and every `stride`-th length that is too short.
SweepResult sweep_damage(size_t checkpoint_bytes, int64_t stride);

}  // namespace halfstep::testing
