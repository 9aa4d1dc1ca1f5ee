// What a forecast is asked about, in the words of a command line.
#pragma once

#include <halfstep/run_config.h>

#include <string>

#include "forecast/device.h"
#include "forecast/shape.h"

namespace halfstep::cli {

/// Of the model that a configuration trains; `name` is for messages. Wrong usage if it is no language model.
forecast::ModelShape shape_of_run(const RunConfig& config, const std::string& name);

/// One that comes with Halfstep, or that of a file. An Error that lists the names if there is none.
forecast::Device device_given(const std::string& name);

}  // namespace halfstep::cli
