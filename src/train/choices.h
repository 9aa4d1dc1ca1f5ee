// From the words of a configuration to the values of Halfstep's pieces.
#pragma once

#include <halfstep/optim.h>
#include <halfstep/precision.h>
#include <halfstep/run_config.h>

namespace halfstep::train {

/// An Error for an operation in precision.ops that has no rule to change.
Precision precision_of(const RunConfig& config);

Schedule schedule_of(const RunConfig& config);
AdamWOptions adamw_of(const RunConfig& config);
SgdOptions sgd_of(const RunConfig& config);

}  // namespace halfstep::train
