// Checkpoints written so that no crash loses one that was saved.
#pragma once

#include <filesystem>
#include <functional>
#include <set>

#include "checkpoint_format/manifest.h"
#include "checkpoint_format/step_folders.h"
#include "io/folder_lock.h"

namespace halfstep::files {

struct TensorToSave {
  TensorToWrite tensor;            ///< its bytes row by row
  std::vector<int64_t> strides{};  ///< how it lay in memory; empty where row by row
};

struct PartToSave {
  std::string name;
  std::map<std::string, Scalar> scalars{};
  std::vector<TensorToSave> tensors{};
};

struct CheckpointToSave {
  int64_t step = 0;
  std::map<std::string, std::string> fingerprint{};
  std::vector<PartToSave> parts{};
  bool healthy = true;
  std::optional<double> score{};
  std::string refusal{};  ///< why a rank has nothing to save: all of them hear of it
};

/// Processes that save one checkpoint together, each parts of its own.
struct SavingRanks {
  int rank = 0, size = 1;
  /// On each rank, what the function that is given on rank 0 makes of all ranks' texts.
  std::function<std::string(const std::string&,
                            const std::function<std::string(const std::vector<std::string>&)>&)>
      decided{};
};

/// What ranks 1, 2, ... do while rank 0 is in CheckpointWriter::save. What fails on one fails on all.
void save_with_first(const std::filesystem::path& run, const CheckpointToSave& checkpoint,
                     const SavingRanks& ranks);

/// The one writer of a run's folder; step_folders.h says what lies in it.
///
/// A checkpoint is written aside, its manifest last; files and folder are synced; then one rename gives it
/// its name, and the run's folder is synced. Whatever happens before that, a crash of the process or of the
/// machine, a disk that is full: the checkpoints before it stay as they are, and of the new one nothing
/// counts.
class CheckpointWriter {
 public:
  /// Makes the folder if there is none, takes its lock, and removes what a crash left.
  CheckpointWriter(const std::filesystem::path& run, const Retention& retention);

  /// Durable when it returns. Those that the retention gives up are removed only then; an OldCheckpointError
  /// comes once for each that cannot be removed. With `ranks`, rank 0 of several: the others write into
  /// folders of their own inside the new one, which has no manifest before all of them are durable.
  void save(const CheckpointToSave& checkpoint, const SavingRanks& ranks = {});

  /// Removes the checkpoints after a step: a run that goes on from there makes them anew.
  void remove_newer_than(int64_t step);

  /// The run's folder, links resolved when it was opened.
  const std::filesystem::path& run() const { return run_; }

 private:
  void give_name(const std::filesystem::path& aside, int64_t step);
  void remove_old();
  KeptCheckpoint kept(int64_t step);

  std::filesystem::path run_;
  Retention retention_;
  FolderLock lock_;
  std::map<int64_t, KeptCheckpoint> seen_;  ///< their manifests do not change
  std::set<int64_t> told_;                  ///< steps that could not be removed, of which a caller has heard
};

}  // namespace halfstep::files
