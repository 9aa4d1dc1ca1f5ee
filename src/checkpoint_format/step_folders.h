// The names in a run's folder, and how they come and go.
//
//   step-000000123/           a checkpoint: whole, since nothing has this name that is not
//   .aside-step-000000124/    being written
//   .removed-step-000000120/  being removed
#pragma once

#include <halfstep/error.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace halfstep::files {

std::string step_name(int64_t step);

/// Where the checkpoint of a step is written before it is one.
std::filesystem::path aside_folder(const std::filesystem::path& run, int64_t step);

/// The steps of a run that have a checkpoint, in rising order. An Error for a step's name that is a link or a
/// file: Halfstep writes no such thing.
std::vector<int64_t> checkpoint_steps(const std::filesystem::path& run);

/// Whether retention leaves the checkpoint of a step alone: a file in it says so, "pinned".
bool is_pinned(const std::filesystem::path& run, int64_t step);
void set_pinned(const std::filesystem::path& run, int64_t step, bool pinned);

struct NotRemoved {
  int64_t step = 0;
  FileError why;
};

/// Removes checkpoints, with all that lies in them. Each loses its name, durably, before it loses a file: one
/// that is half removed is never taken for a checkpoint. Returns those of which something is left.
[[nodiscard]] std::vector<NotRemoved> remove_steps(const std::filesystem::path& run,
                                                   const std::vector<int64_t>& steps);

/// Removes what a crash or a failure left half written or half removed. What cannot be removed stays, without
/// an error. For the holder of the lock alone.
void remove_leftovers(const std::filesystem::path& run);

/// Removes what is left of a save of this step; a FileError if something stays.
void remove_aside(const std::filesystem::path& run, int64_t step);

struct Retention {
  int64_t keep_last = 3;   ///< healthy ones; 0 keeps all
  int64_t keep_every = 0;  ///< those of steps that are multiples of it stay for ever; 0: none
  bool keep_best = false;  ///< the one with the lowest score stays
};

struct KeptCheckpoint {
  int64_t step = 0;
  bool healthy = true;
  std::optional<double> score{};
  bool pinned = false;
};

/// Of checkpoints in the order of their steps, those that go. The newest always stays, and so does a pinned
/// one. One that was saved while the run was in trouble is not among the last: as soon as it is not the
/// newest any more it goes, and the last healthy ones are still there to go back to.
std::vector<int64_t> steps_to_remove(const std::vector<KeptCheckpoint>& all, const Retention& retention);

}  // namespace halfstep::files
