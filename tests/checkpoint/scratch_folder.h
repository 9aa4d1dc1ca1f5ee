// A folder to try things in.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace halfstep::testing {

/// A folder of its own, in memory where there is such a place, removed with all that is in it.
class ScratchFolder {
 public:
  ScratchFolder() {
    const auto memory = std::filesystem::path("/dev/shm");
    const auto parent = std::filesystem::exists(memory) ? memory : std::filesystem::temp_directory_path();
    std::string name = parent / "halfstep-checkpoint-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no scratch folder: " + name);
    path_ = name;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

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
