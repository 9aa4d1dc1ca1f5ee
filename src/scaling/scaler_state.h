#pragma once

#include <halfstep/scaling.h>

namespace halfstep::scaling {

/// Everything that a GradScaler saves.
struct ScalerState {
  LossScaling options;
  LossScaleState state;
};

StateDict saved_form(const ScalerState& scaler);

/// Refuses, with all names that do not fit, what no GradScaler could have saved.
ScalerState loaded_from(const StateDict& saved);

/// Throws SkipLimitError when as many steps in a row were skipped as the options allow. `whose` begins the
/// message; `parameter` is the one whose gradient was not finite in the last of them.
void check_skip_limit(const char* whose, const LossScaling& options, const LossScaleState& state,
                      const std::string& parameter);

}  // namespace halfstep::scaling
