// From files, variables and flags to settings of keys.
#pragma once

#include <halfstep/run_config.h>

#include <string>
#include <vector>

#include "config/faults.h"
#include "config/toml.h"

namespace halfstep::config {

struct Setting {
  std::string path;
  TomlValue value;
  std::string origin;  ///< "run.toml:12"
};

/// Every setting of a known key, those that win last; what is no setting is a fault.
std::vector<Setting> settings_of(const ConfigSources& sources, Faults& faults);

}  // namespace halfstep::config
