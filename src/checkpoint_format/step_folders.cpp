#include "checkpoint_format/step_folders.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <dirent.h>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <set>
#include <string_view>

#include "io/durable_file.h"
#include "io/file_error.h"

namespace halfstep::files {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStep = "step-";
constexpr std::string_view kAside = ".aside-";
constexpr std::string_view kRemoved = ".removed-";
constexpr std::string_view kPinned = "pinned";

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

enum class Kind { Absent, Folder, Other };

Kind kind_of(const fs::path& path) {
  struct stat status{};
  if (::lstat(path.c_str(), &status) == 0) return S_ISDIR(status.st_mode) ? Kind::Folder : Kind::Other;
  if (errno != ENOENT) throw_file_error("look at", path);
  return Kind::Absent;
}

// With all that is in it, but not what links in it point to. One file that stays, because it is immutable or
// open on NFS, does not keep the rest; the first refusal is thrown when all else is gone.
void remove_all_of(const fs::path& path) {
  if (::unlink(path.c_str()) == 0 || errno == ENOENT) return;
  if (errno != EISDIR) throw_file_error("remove", path);
  std::optional<FileError> refusal;
  for (const std::string& name : names_in(path)) {
    try {
      remove_all_of(path / name);
    } catch (const FileError& error) {
      if (!refusal) refusal = error;
    }
  }
  if (refusal) throw FileError(*refusal);
  if (::rmdir(path.c_str()) != 0) throw_file_error("remove the folder", path);
}

fs::path prefixed(const fs::path& run, std::string_view prefix, int64_t step) {
  return run / (std::string(prefix) + step_name(step));
}

// A name that the checkpoint of a step had while it was written or removed: a stranger's file may begin with
// the same prefix.
bool is_leftover(std::string_view name) {
  for (const std::string_view prefix : {kAside, kRemoved}) {
    if (!name.starts_with(prefix)) continue;
    name.remove_prefix(prefix.size());
    if (prefix == kRemoved) name = name.substr(0, name.find('.'));  // see without_name
    return step_of(std::string(name)).has_value();
  }
  return false;
}

// Takes a checkpoint's name from it. What could not be removed of the same step before stays in the way:
// ".removed-step-000000120.1" is free then.
fs::path without_name(const fs::path& run, int64_t step) {
  constexpr int kMostTries = 1000;
  const fs::path name = run / step_name(step);
  const fs::path first = prefixed(run, kRemoved, step);
  fs::path removed = first;
  for (int i = 1;; ++i) {
    if (::rename(name.c_str(), removed.c_str()) == 0) return removed;
    const bool taken = errno == ENOTEMPTY || errno == EEXIST || errno == ENOTDIR;
    if (!taken || i == kMostTries) throw_file_error("rename", name);
    removed = first;
    removed += detail::concat(".", i);
  }
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
    const Kind kind = kind_of(run / name);
    if (kind == Kind::Absent) continue;  // its writer has removed it since the folder was listed
    HALFSTEP_CHECK(kind == Kind::Folder, (run / name).string(),
                   ": is a link or a file, where a checkpoint's folder was expected. Remove it.");
    steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

bool is_pinned(const fs::path& run, int64_t step) {
  return kind_of(run / step_name(step) / kPinned) != Kind::Absent;
}

void set_pinned(const fs::path& run, int64_t step, bool pinned) {
  const fs::path folder = run / step_name(step);
  HALFSTEP_CHECK(kind_of(folder) == Kind::Folder, run.string(), ": has no checkpoint of step ", step, ".");
  if (is_pinned(run, step) == pinned) return;
  if (pinned) {
    OutputFile(folder / kPinned).close();
  } else if (::unlink((folder / kPinned).c_str()) != 0 && errno != ENOENT) {
    throw_file_error("remove", folder / kPinned);
  }
  sync_folder(folder);
}

std::vector<NotRemoved> remove_steps(const fs::path& run, const std::vector<int64_t>& steps) {
  std::vector<NotRemoved> kept;
  std::vector<std::pair<int64_t, fs::path>> unnamed;
  const auto attempt = [&](int64_t step, auto&& body) {
    try {
      body();
    } catch (const FileError& error) {
      kept.push_back({step, error});
    }
  };
  for (const int64_t step : steps)
    attempt(step, [&] { unnamed.emplace_back(step, without_name(run, step)); });
  if (unnamed.empty()) return kept;
  sync_folder(run);
  for (const auto& [step, folder] : unnamed) attempt(step, [&] { remove_all_of(folder); });
  return kept;
}

void remove_leftovers(const fs::path& run) {
  std::vector<std::string> leftovers = names_in(run);
  std::erase_if(leftovers, [](const std::string& name) { return !is_leftover(name); });
  if (leftovers.empty()) return;
  // What died between a rename and its sync is on the disk under the old name still: a checkpoint's, perhaps.
  sync_folder(run);
  for (const std::string& name : leftovers) {
    try {
      remove_all_of(run / name);
    } catch (const FileError&) {
      // Takes room, and no more: neither a run nor a save may end for it. Whoever removed it first has told.
    }
  }
}

void remove_aside(const fs::path& run, int64_t step) { remove_all_of(aside_folder(run, step)); }

std::vector<int64_t> steps_to_remove(const std::vector<KeptCheckpoint>& all, const Retention& retention) {
  if (all.empty() || retention.keep_last == 0) return {};
  std::set<int64_t> stay{all.back().step};
  const KeptCheckpoint* best = nullptr;
  int64_t healthy = 0;
  for (auto one = all.rbegin(); one != all.rend(); ++one) {
    if (one->pinned) stay.insert(one->step);
    if (one->healthy && healthy++ < retention.keep_last) stay.insert(one->step);
    if (retention.keep_every > 0 && one->step % retention.keep_every == 0) stay.insert(one->step);
    // Of equal scores the newest: it was trained for longer.
    if (one->score && !std::isnan(*one->score) && (best == nullptr || *one->score < *best->score))
      best = &*one;
  }
  if (retention.keep_best && best != nullptr) stay.insert(best->step);
  std::vector<int64_t> go;
  for (const KeptCheckpoint& one : all)
    if (!stay.contains(one.step)) go.push_back(one.step);
  return go;
}

}  // namespace halfstep::files
