// Carries out a configuration: the training loop of `halfstep train`, made of Halfstep's public pieces. Knows
// no Torch by itself.
#pragma once

#include <halfstep/config.h>
#include <halfstep/recipe.h>
#include <halfstep/run_config.h>
#include <halfstep/run_watch.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace halfstep {

class Ranks;
class Task;

/// What a run will take, from a few steps that were tried and thrown away.
struct RunEstimate {
  double seconds_per_step = 0.0;    ///< without evaluations, samples and checkpoints
  double evaluation_seconds = 0.0;  ///< of one; 0 without
  double total_seconds = 0.0;       ///< of all steps and evaluations that are left
  int64_t peak_bytes = 0;           ///< of tensors; 0 unless Halfstep's CPU allocator is installed
  int64_t checkpoint_bytes = 0;     ///< of one
};

/// Products of linear layers in other precisions, computed beside an FP32 run and compared
/// (halfstep/shadow.h).
struct TrainerShadow {
  /// As runs in them have it; `keep_high` and `weights` count for nothing.
  std::vector<RunConfig::Precision> precisions{};
  int64_t every = 1;  ///< the first step, and each that this divides
};

/// Where a Trainer resumes, how much text it reads, and what looks on.
struct TrainerOptions {
  /// Goes on from that checkpoint instead of the latest, and removes the later ones.
  std::optional<int64_t> from_step{};
  /// Of training and of held-out text, each; 0: all. For an estimate, which needs no more.
  int64_t most_text_bytes = 0;
  /// The processes that train together (halfstep/ranks.h), each with a Trainer of the same configuration and
  /// folder, and its part of each batch. Rank 0 writes; all see the same folder. Null: this one alone.
  std::shared_ptr<const Ranks> ranks{};
  /// Writes `shadow` records into the log; watch.every is 0 then. The run keeps its bits.
  std::optional<TrainerShadow> shadow{};
};

/// One training run in one folder.
///
///     halfstep::install_cpu_allocator();
///     halfstep::Trainer trainer(halfstep::resolve_config({.preset = "tiny"}), "runs/first");
///     std::atomic<bool> stop = false;            // a signal handler may set it
///     const halfstep::RunEnd end = trainer.run(watcher, stop);
///
/// The constructor reads the data and makes the model, and writes nothing but what it makes of text: token
/// files in the folder. Every error of the configuration's words, the data or the model is thrown there.
///
/// It takes the folder's lock first: a second process is refused before it has changed anything.
///
/// `run` opens or resumes the folder (docs/training.md lists what is in it) and does all steps that are left.
/// It saves at the end, when `stop` becomes true (after the step under way), and as checkpoint.every and
/// checkpoint.every_minutes say. A resumed run ends with the bits of one that was never stopped.
/// Writes that the disk refuses are reported and retried; the run continues.
class HALFSTEP_API Trainer {
 public:
  Trainer(const ResolvedConfig& resolved, const std::filesystem::path& folder, TrainerOptions options = {});
  /// With a model, a loss and batches of your own (halfstep/task.h); model.kind is "own" then:
  /// halfstep::resolve_config({.set = {"model.kind=own", "train.steps=1000", "precision.compute=bf16"}}).
  Trainer(std::unique_ptr<Task> task, const ResolvedConfig& resolved, const std::filesystem::path& folder,
          TrainerOptions options = {});
  ~Trainer();
  Trainer(Trainer&&) noexcept;
  Trainer& operator=(Trainer&&) noexcept;

  /// What the run is about to do.
  const RunPlan& plan() const;
  /// What the recipe does with each weight of two dimensions; nothing without a recipe.
  const std::vector<LayerPlan>& layers() const;
  /// That of the configuration; nothing without one.
  std::optional<Recipe> recipe() const;

  /// Tries three steps and an evaluation. Moves the weights: for a trainer that is thrown away afterwards.
  RunEstimate estimate();

  /// Once. Throws what the disk refuses at the start or at the last save (FileError) and what does not fit a
  /// checkpoint (Error).
  RunEnd run(RunWatcher& watcher, const std::atomic<bool>& stop);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace halfstep
