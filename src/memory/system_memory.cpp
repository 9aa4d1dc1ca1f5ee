#include "memory/system_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>

namespace halfstep {
namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

/// The first number in a file; none for a missing file, and for the word "max".
std::optional<std::size_t> number_in(const std::string& path) {
  std::size_t number = 0;
  if (std::ifstream(path) >> number) return number;
  return std::nullopt;
}

/// The number after a word, in a file of "word number" lines.
std::optional<std::size_t> number_after(const std::string& word, const std::string& path) {
  std::ifstream file(path);
  for (std::string first, rest; file >> first; std::getline(file, rest))
    if (std::size_t number = 0; first == word && file >> number) return number;
  return std::nullopt;
}

/// What one version of cgroups calls its files.
struct CgroupNames {
  std::string folder, limit, usage, reclaimable;
};

/// Narrows `memory` to what this cgroup and those above it allow.
void narrow(SystemMemory& memory, const CgroupNames& names, std::string path) {
  for (;; path.erase(path.rfind('/'))) {
    const std::string folder = names.folder + path + "/";
    if (const auto limit = number_in(folder + names.limit)) {
      const std::size_t usage = number_in(folder + names.usage).value_or(0);
      const std::size_t cache = number_after(names.reclaimable, folder + "memory.stat").value_or(0);
      const std::size_t taken = usage - std::min(usage, cache);
      memory.limit_bytes = std::min(memory.limit_bytes, *limit);
      memory.available_bytes = std::min(memory.available_bytes, *limit - std::min(*limit, taken));
    }
    if (path.empty()) return;
  }
}

}  // namespace

SystemMemory system_memory(const std::string& root) {
  const auto machine = [&](const char* word) {
    const auto kib = number_after(word, root + "/proc/meminfo");
    return kib ? *kib * 1024 : kUnlimited;
  };
  SystemMemory memory{machine("MemTotal:"), machine("MemAvailable:")};

  const CgroupNames v2{root + "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};
  const CgroupNames v1{root + "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                       "total_inactive_file"};
  std::ifstream cgroups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(cgroups, line);) {  // "4:memory:/path" in version 1, "0::/path" in 2
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    if (controllers.empty()) narrow(memory, v2, path);
    if (controllers.find("memory") != std::string::npos) narrow(memory, v1, path);
  }
  return memory;
}

}  // namespace halfstep
