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

}  // namespace halfstep::scaling
