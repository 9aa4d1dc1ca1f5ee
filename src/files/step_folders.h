// The names in a run's folder, and how they come and go.
//
//   step-000000123/           a checkpoint: whole, since nothing has this name that is not
//   .aside-step-000000124/    being written
//   .removed-step-000000120/  being removed
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace halfstep::files {

std::string step_name(int64_t step);

/// Where the checkpoint of a step is written before it is one.
std::filesystem::path aside_folder(const std::filesystem::path& run, int64_t step);

/// The steps of a run that have a checkpoint, in rising order. An Error for a step's name that is a link or a
/// file: Halfstep writes no such thing.
std::vector<int64_t> checkpoint_steps(const std::filesystem::path& run);

/// Makes a folder and those above it that are missing, durably.
void make_folders(const std::filesystem::path& path);
void make_folder(const std::filesystem::path& path);

/// Removes checkpoints. Each loses its name, durably, before it loses a file: one that is half removed is
/// never taken for a checkpoint.
void remove_steps(const std::filesystem::path& run, const std::vector<int64_t>& steps);

/// Removes what a crash or a failure left half written or half removed. For the holder of the lock alone.
void remove_leftovers(const std::filesystem::path& run);

}  // namespace halfstep::files
