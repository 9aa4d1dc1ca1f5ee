// What a broken-off save leaves behind.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace halfstep::testing {

/// Names in a run's folder that are neither checkpoints nor the lock.
inline std::vector<std::string> leftovers_in(const std::filesystem::path& run) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(run)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("step-") && name != ".lock") names.push_back(name);
  }
  return names;
}

}  // namespace halfstep::testing
