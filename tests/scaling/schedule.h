// Random loss-scaling schedules, as values that C++ and Python both can run.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace halfstep::testing {

struct GradSpec {
  std::vector<double> values;
  std::optional<std::vector<int64_t>>
      rows;  // set: a sparse gradient with a value at each row, repeats allowed
};

struct OptimizerStep {
  bool unscale = false;  // by hand, before the step
  bool step = false;
  std::vector<std::optional<GradSpec>> grads;  // none: the parameter has no gradient
};

struct ScheduleStep {
  bool restart = false;  // save the scaler, make a new one, load
  std::vector<OptimizerStep> optimizers;
};

struct ParamSpec {
  std::string dtype;
  std::vector<double> values;
};

struct OptimizerSpec {
  double lr, momentum, weight_decay;
  std::vector<ParamSpec> params;
};

struct Schedule {
  double initial, growth_factor, backoff_factor;
  int64_t growth_interval;
  std::vector<OptimizerSpec> optimizers;
  std::vector<ScheduleStep> steps;
};

/// The schedule of that number; the same number gives the same schedule.
///
/// Kept away from the listed differences: every optimizer that is stepped has a gradient, types are those
/// that torch.amp un-scales, and magnitudes stay below 2^20, so that even after 16 backoffs by 0.1 from 2^-2
/// (a multiplier of 2^56) no product leaves FP32.
Schedule random_schedule(uint64_t number);

/// As tools/torch_amp_oracle.py reads it: every number that must be exact as the integer of its FP64 pattern.
nlohmann::json to_json(const Schedule& schedule);

uint64_t bits_of(double value);

}  // namespace halfstep::testing
