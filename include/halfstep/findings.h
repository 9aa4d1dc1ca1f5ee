// What a run's records say about its precision, as sentences with a remedy. Knows no Torch.
#pragma once

#include <halfstep/config.h>
#include <halfstep/run_config.h>
#include <halfstep/run_log.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep {

/// What a run was asked to do, as far as findings depend on it.
struct RunSetup {
  std::string compute = "fp32";  ///< a word of precision.compute: "fp16", "fp8-delayed"
  double loss_scale_floor = 0x1p-24;
  int64_t ranks = 1;
  /// How many parts of a step's gradients are added in `sum_type`. A Probe's records tell it of what autograd
  /// adds.
  int64_t summed_parts = 1;
  std::string sum_type = "fp32";  ///< "fp32", "bf16" or "fp16"
};

/// Of a run that follows this configuration.
HALFSTEP_API RunSetup run_setup(const RunConfig& config, int64_t ranks = 1);

/// All codes that a finding may have, causes before what follows from them. docs/findings.md has a section
/// for each.
HALFSTEP_API std::span<const std::string_view> finding_codes();

/// Takes the records of one run, in order, and says what is wrong with its precision:
///
///     halfstep::FindingWatch watch(halfstep::run_setup(config));
///     for (const halfstep::Finding& finding : watch.take(step_record)) std::puts(finding.what.c_str());
///
/// A finding is returned once, when it begins, and once more if it becomes more severe. A healthy run gives
/// none above Severity::Note. It costs a few microseconds for each record, and remembers at most 200 steps.
/// After a rollback begin with a new one: its records are not those of one run.
class HALFSTEP_API FindingWatch {
 public:
  explicit FindingWatch(RunSetup setup = {});
  ~FindingWatch();
  FindingWatch(FindingWatch&&) noexcept;
  FindingWatch& operator=(FindingWatch&&) noexcept;

  /// What this record has brought to light.
  [[nodiscard]] std::vector<Finding> take(const StepRecord& record);
  [[nodiscard]] std::vector<Finding> take(const ProbeRecord& record);    ///< of a Probe
  [[nodiscard]] std::vector<Finding> take(const CulpritRecord& record);  ///< of an OpTracer
  /// What was found while the run went on, perhaps from steps that are not in its log.
  [[nodiscard]] std::vector<Finding> take(const FindingRecord& record);

  /// All so far, the most serious first; of the same severity, causes first.
  std::vector<Finding> findings() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace halfstep
