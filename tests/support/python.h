// Asks a Python script: JSON in, JSON out. The interpreter is the one with torch 2.13, from HALFSTEP_PYTHON
// in the environment or, failing that, the one that CMake was told of.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

namespace halfstep::testing {

/// `script` is a path from the repository's root: "tools/torch_amp_oracle.py".
nlohmann::json ask_python(const std::string& script, const nlohmann::json& request);

}  // namespace halfstep::testing
