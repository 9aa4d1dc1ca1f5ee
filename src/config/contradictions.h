// Options that are fine alone and not together.
#pragma once

#include <halfstep/run_config.h>

#include "config/faults.h"

namespace halfstep::config {

/// Goes by the values alone, never by where they came from: what is printed and read again fares alike.
void find_contradictions(const ResolvedConfig& resolved, Faults& faults);

}  // namespace halfstep::config
