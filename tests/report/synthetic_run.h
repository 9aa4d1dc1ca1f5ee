// Runs that nobody trained, written by RunLog itself: their curves have the shapes of real ones, and what is
// in them is known.
#pragma once

#include <halfstep/run_log.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace halfstep::testing {

struct SyntheticRun {
  int64_t steps = 1000;
  int64_t planned_steps = 0;  ///< `steps` if 0
  std::string compute = "bf16";
  uint64_t batch_seed = 1;       ///< of the noise that all runs over the same batches share
  uint64_t own_seed = 1;         ///< of the noise that is this run's own
  double loss_factor = 1.0;      ///< on every loss: a known difference
  double own_noise = 0.003;      ///< relative; as rounding makes it
  double own_correlation = 0.8;  ///< of own_noise from one step to the next
  bool evaluates = true, samples = true, has_memory = true, ends = true;
  int64_t resumed_after = 0;  ///< 0: not resumed
  int64_t nan_from = 0;       ///< the loss is NaN from this step on; 0: never
  bool cut_last_line = false;
};

/// Writes the log of such a run into a folder that exists. With FP16 there is a loss scale and some steps are
/// skipped.
void write_synthetic_run(const std::filesystem::path& folder, const SyntheticRun& run);

/// As RunHeader::configuration of a run has it.
std::string synthetic_configuration(const SyntheticRun& run);

/// The losses of the run, one a step.
std::vector<double> synthetic_losses(const SyntheticRun& run);

}  // namespace halfstep::testing
