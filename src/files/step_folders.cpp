#include "files/step_folders.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <memory>
#include <optional>
#include <string_view>

#include "files/durable_file.h"
#include "files/file_error.h"
#include "files/uninterrupted.h"

namespace halfstep::files {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStep = "step-";
constexpr std::string_view kAside = ".aside-";
constexpr std::string_view kRemoved = ".removed-";

std::vector<std::string> names_in(const fs::path& folder) {
  const int file = uninterrupted([&] { return ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (file < 0) throw_file_error("open the folder", folder);
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(::fdopendir(file), ::closedir);
  if (!listing) {
    ::close(file);
    throw_file_error("list the folder", folder);
  }
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(listing.get())) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
    errno = 0;
  }
  if (errno != 0) throw_file_error("list the folder", folder);
  return names;
}

// The step of exactly the name that step_name gives it.
std::optional<int64_t> step_of(const std::string& name) {
  if (!name.starts_with(kStep)) return std::nullopt;
  int64_t step = -1;
  const char* const end = name.data() + name.size();
  const auto [stop, fault] = std::from_chars(name.data() + kStep.size(), end, step);
  if (fault != std::errc{} || stop != end || step < 0 || step_name(step) != name) return std::nullopt;
  return step;
}

bool is_folder(const fs::path& path) {
  struct stat status{};
  if (::lstat(path.c_str(), &status) != 0) throw_file_error("look at", path);
  return S_ISDIR(status.st_mode);
}

// Files of a checkpoint lie flat. Anything deeper is not ours, and is refused by rmdir.
void remove_folder(const fs::path& folder) {
  if (is_folder(folder)) {
    for (const std::string& name : names_in(folder))
      if (::unlink((folder / name).c_str()) != 0 && errno != EISDIR)
        throw_file_error("remove", folder / name);
    if (::rmdir(folder.c_str()) != 0) throw_file_error("remove the folder", folder);
  } else if (::unlink(folder.c_str()) != 0) {
    throw_file_error("remove", folder);
  }
}

fs::path prefixed(const fs::path& run, std::string_view prefix, int64_t step) {
  return run / (std::string(prefix) + step_name(step));
}

}  // namespace

std::string step_name(int64_t step) {
  char text[40];
  std::snprintf(text, sizeof text, "step-%09lld", static_cast<long long>(step));
  return text;
}

fs::path aside_folder(const fs::path& run, int64_t step) { return prefixed(run, kAside, step); }

std::vector<int64_t> checkpoint_steps(const fs::path& run) {
  std::vector<int64_t> steps;
  for (const std::string& name : names_in(run)) {
    const std::optional<int64_t> step = step_of(name);
    if (!step) continue;
    HALFSTEP_CHECK(is_folder(run / name), (run / name).string(),
                   ": is a link or a file, where a checkpoint's folder was expected. Remove it.");
    steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

void make_folder(const fs::path& path) {
  if (::mkdir(path.c_str(), 0755) != 0) throw_file_error("make the folder", path);
}

void make_folders(const fs::path& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) == 0) {
    HALFSTEP_CHECK(S_ISDIR(status.st_mode), path.string(), ": is a file, where a folder was expected.");
    return;
  }
  if (errno != ENOENT) throw_file_error("look at", path);
  make_folders(folder_of(path));
  // Another process may make the same one at the same moment.
  if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) throw_file_error("make the folder", path);
  sync_folder(folder_of(path));
}

void remove_steps(const fs::path& run, const std::vector<int64_t>& steps) {
  if (steps.empty()) return;
  for (const int64_t step : steps) {
    const fs::path name = run / step_name(step);
    if (::rename(name.c_str(), prefixed(run, kRemoved, step).c_str()) != 0) throw_file_error("rename", name);
  }
  sync_folder(run);
  for (const int64_t step : steps) remove_folder(prefixed(run, kRemoved, step));
}

void remove_leftovers(const fs::path& run) {
  std::vector<std::string> leftovers = names_in(run);
  std::erase_if(leftovers, [](const std::string& name) {
    return !name.starts_with(kAside) && !name.starts_with(kRemoved);
  });
  if (leftovers.empty()) return;
  // What died between a rename and its sync is on the disk under the old name still: a checkpoint's, perhaps.
  sync_folder(run);
  for (const std::string& name : leftovers) remove_folder(run / name);
}

}  // namespace halfstep::files
