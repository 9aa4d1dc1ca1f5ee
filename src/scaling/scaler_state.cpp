// GradScaler's options and state as a StateDict: each name written once, for both directions.
#include "scaling/scaler_state.h"

#include <halfstep/error.h>

#include <string_view>

namespace halfstep::scaling {
namespace {

/// visit(name, field) for all that is saved. torch.amp's names where torch.amp has the thing.
template <typename Options, typename State, typename Visit>
void for_each_field(Options& options, State& state, Visit visit) {
  visit("scale", state.loss_scale);
  visit("growth_factor", options.growth_factor);
  visit("backoff_factor", options.backoff_factor);
  visit("growth_interval", options.growth_interval);
  visit("_growth_tracker", state.clean_steps);
  visit("initial", options.initial);
  visit("floor", options.floor);
  visit("cap", options.cap);
  visit("hysteresis", options.hysteresis);
  visit("max_consecutive_skips", options.max_consecutive_skips);
  visit("overflows_forgiven", state.overflows_forgiven);
  visit("consecutive_skips", state.consecutive_skips);
  visit("total_skips", state.total_skips);
}

void read(const StateDict& saved, std::string_view name, double& field) { field = saved.real(name); }
void read(const StateDict& saved, std::string_view name, int64_t& field) { field = saved.integer(name); }

void check_count(std::string_view name, int64_t count) {
  HALFSTEP_CHECK(count >= 0, "GradScaler: saved '", name, "' is ", count, ", expected a count.");
}

}  // namespace

StateDict saved_form(const ScalerState& scaler) {
  StateDict saved;
  for_each_field(scaler.options, scaler.state, [&](const char* name, auto field) { saved.set(name, field); });
  return saved;
}

ScalerState loaded_from(const StateDict& saved) {
  ScalerState loaded;
  std::vector<std::string_view> names;
  for_each_field(loaded.options, loaded.state, [&](const char* name, auto&) { names.push_back(name); });
  saved.expect_exactly("GradScaler", names);
  for_each_field(loaded.options, loaded.state,
                 [&](const char* name, auto& field) { read(saved, name, field); });

  loaded.options.check();
  const auto& [options, state] = loaded;
  HALFSTEP_CHECK(options.floor <= state.loss_scale && state.loss_scale <= options.cap,
                 "GradScaler: saved 'scale' is ", state.loss_scale, ", expected a number from ",
                 options.floor, " (floor) to ", options.cap, " (cap).");
  HALFSTEP_CHECK(state.loss_scale == static_cast<float>(state.loss_scale), "GradScaler: saved 'scale' is ",
                 state.loss_scale, ", which FP32 does not hold exactly: it was not saved by a GradScaler.");
  check_count("_growth_tracker", state.clean_steps);
  check_count("overflows_forgiven", state.overflows_forgiven);
  check_count("consecutive_skips", state.consecutive_skips);
  check_count("total_skips", state.total_skips);
  return loaded;
}

void check_skip_limit(const char* whose, const LossScaling& options, const LossScaleState& state,
                      const std::string& parameter) {
  const int64_t limit = options.max_consecutive_skips;
  if (limit == 0 || state.consecutive_skips < limit) return;
  // BF16 and FP32 have a scale that cannot move.
  const bool scaled = options.floor < options.cap;
  const std::string scale =
      scaled ? detail::concat(" The loss scale is now ", state.loss_scale, " (floor ", options.floor, ").")
             : "";
  throw SkipLimitError(
      detail::concat(
          whose, ": ", state.consecutive_skips,
          " steps in a row were skipped; the last time the gradient of ", parameter, " was not finite.",
          scale,
          " Training makes no progress: look for an Inf in the forward pass, or lower the learning "
          "rate",
          scaled ? ", or train in BF16. LossScaling::max_consecutive_skips "
                   "(precision.loss_scale.max_consecutive_skips of a run) sets this limit."
                 : "."),
      parameter);
}

}  // namespace halfstep::scaling
