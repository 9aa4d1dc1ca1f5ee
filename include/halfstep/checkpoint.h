// The whole state of a training run, saved so that no crash loses a checkpoint that was saved.
#pragma once

#include <halfstep/config.h>
#include <halfstep/safetensors.h>
#include <halfstep/state_dict.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace torch::nn {
class Module;
}

namespace halfstep {

/// What a run needs to go on, by parts: "model", "optimizer", "precision", "random", "data", as you name
/// them. A part is any StateDict. Its name has no '/'.
struct Checkpoint {
  int64_t step = 0;
  std::map<std::string, StateDict> parts{};
  /// Of the machine and libraries that wrote it: empty before it is saved. See fingerprint_changes.
  std::map<std::string, std::string> fingerprint{};
  /// False while the run is in trouble, such as in a row of skipped steps: see CheckpointOptions::keep_last.
  bool healthy = true;
  std::optional<double> score{};  ///< the lower, the better: a held-out loss

  /// The part of that name; an Error that lists those there are.
  HALFSTEP_API const StateDict& part(std::string_view name) const;
};

/// Which checkpoints stay when a new one is durable: those that any line names, pinned ones
/// (pin_checkpoint), and the newest. One that is not healthy takes no other's place: when it is not the
/// newest any more it goes, and the last healthy ones are there to go back to.
struct CheckpointOptions {
  int64_t keep_last = 3;   ///< healthy ones; 0 keeps all
  int64_t keep_every = 0;  ///< those of steps that are multiples of it; 0: none
  bool keep_best = false;  ///< the one with the lowest score
};

/// Processes that save one checkpoint together, each its own parts of the state: see halfstep/ranks.h.
struct CheckpointRanks {
  int rank = 0, size = 1;
  /// On each rank, what the function that is given on rank 0 makes of all ranks' texts: Ranks::decided.
  std::function<std::string(const std::string& about, const std::string& text,
                            const std::function<std::string(const std::vector<std::string>&)>& decide)>
      decided{};
};

/// What one save took.
struct SaveReport {
  int64_t step = 0;
  uint64_t tensor_bytes = 0;
  /// How long the call waited for the write before it to end. A run that waits saves more often than its disk
  /// can write.
  double waited_seconds = 0;
};

/// The folder of one run, and its one writer: a lock keeps a second process out.
///
///     halfstep::CheckpointFolder checkpoints("run1", {.keep_last = 3});
///     checkpoints.save_async({.step = step,
///                             .parts = {{"precision", mp.state_dict()},
///                                       {"optimizer", optimizer.state_dict()},
///                                       {"random", halfstep::random_state()}}});
///
/// A checkpoint is a folder, `step-000000123`, with a safetensors file and a manifest that has a SHA-256 of
/// every tensor. It is written aside, synced and renamed: whatever ends the process or the machine, the
/// checkpoints that were saved are there and whole. docs/checkpoints.md says what was tested.
///
/// What the disk refuses is a FileError, and leaves the checkpoints before as they were.
///
/// With several ranks every one of them makes it, and saves at the same time: each writes its own file, and
/// rank 0, last of all, the manifest that makes them a checkpoint. What one rank's disk refuses is that
/// FileError on all of them. Rank 0 has the lock, removes old ones, and is to be made first.
///
/// Not thread-safe. The destructor waits for a write that is under way; an error of that write is lost with
/// it, so call `wait` last.
class HALFSTEP_API CheckpointFolder {
 public:
  /// Makes the folder, or opens it and removes what a crash left half written.
  explicit CheckpointFolder(const std::filesystem::path& folder, CheckpointOptions options = {},
                            CheckpointRanks ranks = {});
  ~CheckpointFolder();
  CheckpointFolder(CheckpointFolder&&) noexcept;
  CheckpointFolder& operator=(CheckpointFolder&&) noexcept;

  /// Durable when it returns. An Error for a step that is not after the last one that was saved.
  SaveReport save(const Checkpoint& checkpoint);

  /// Copies the tensors and returns; they are written by a thread of its own. A checkpoint that is handed
  /// over whole (a temporary, or std::move) is not copied again where nothing else holds its tensors, as with
  /// what state_dict() returns. One at a time: while a write is under way a second call waits. Throws what
  /// went wrong with the one before, which then is not saved, and does not begin this one. With several ranks
  /// all of them call it, and `wait`, at the same steps.
  SaveReport save_async(Checkpoint checkpoint);

  /// Until nothing is being written. Throws what went wrong, once; an OldCheckpointError if the checkpoint is
  /// saved and only an older one could not be removed.
  void wait();
  /// Whether wait() would have to wait.
  bool writing() const;

  /// Steps with a checkpoint, in rising order. One that is being written is not among them.
  std::vector<int64_t> steps() const;

  /// Every tensor with the type, shape and strides that it was saved with; an Error if any bit of the
  /// checkpoint has changed. With `live`, what is to be loaded into that state: see load_checkpoint. What is
  /// no part of a parameter (random numbers, where a rank stands in its data) is what this rank has saved
  /// where as many ranks have, and else rank 0's: seed anew then.
  Checkpoint load(int64_t step, const std::map<std::string, StateDict>& live = {}) const;

  /// The latest; nothing if there is none. One that is damaged is an Error that names the one before it:
  /// going on from an older step is for you to decide.
  std::optional<Checkpoint> load_latest(const std::map<std::string, StateDict>& live = {}) const;

  /// Removes the checkpoints after a step. For a run that resumes from an older one.
  void remove_newer_than(int64_t step);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Reading without being the writer: no lock is taken and nothing changed.
HALFSTEP_API std::vector<int64_t> checkpoint_steps(const std::filesystem::path& folder);
/// Of one that several ranks have saved, all that a process without ranks would have saved. For one of
/// several ranks: of the parts that `live` names, what is to be loaded into that state (see resharded). Of
/// the tensors of other ranks only those are read that have elements of it.
HALFSTEP_API Checkpoint load_checkpoint(const std::filesystem::path& folder, int64_t step,
                                        const std::map<std::string, StateDict>& live = {});

/// What is in a checkpoint, from its manifest alone.
struct CheckpointSummary {
  /// One tensor of a part, as the manifest has it.
  struct Tensor {
    std::string name;
    TensorType type{};
    std::vector<int64_t> shape{};
    uint64_t bytes = 0;
    std::string sha256{};
  };
  /// One of the checkpoint's StateDicts.
  struct Part {
    std::string name;
    std::map<std::string, std::string> values{};  ///< numbers and texts, as text
    std::vector<Tensor> tensors{};
    uint64_t bytes = 0;  ///< of all its tensors
  };
  int64_t step = 0;
  std::map<std::string, std::string> fingerprint{};
  std::vector<Part> parts{};  ///< of rank 0, where several have saved it
  uint64_t file_bytes = 0;    ///< of the safetensors files
  int64_t ranks = 1;          ///< that have saved it
  bool healthy = true;
  std::optional<double> score{};
  bool pinned = false;
};
/// Reads the manifest of one checkpoint. No lock is taken.
HALFSTEP_API CheckpointSummary summarize_checkpoint(const std::filesystem::path& folder, int64_t step);

/// All that is wrong with a checkpoint, each in a sentence; nothing if every byte is as it was saved.
HALFSTEP_API std::vector<std::string> verify_checkpoint(const std::filesystem::path& folder, int64_t step);

/// A pinned checkpoint stays until it is unpinned. Also for a folder that a run is writing to.
HALFSTEP_API void pin_checkpoint(const std::filesystem::path& folder, int64_t step, bool pinned = true);

/// Removes one. An Error if it is pinned, is not there, or if a run is writing to the folder.
HALFSTEP_API void remove_checkpoint(const std::filesystem::path& folder, int64_t step);

/// Writes the tensors of one part into a safetensors file of their own.
HALFSTEP_API void export_part(const std::filesystem::path& folder, int64_t step, std::string_view part,
                              const std::filesystem::path& to);

/// The machine and libraries of this process: versions, instruction sets, threads.
HALFSTEP_API std::map<std::string, std::string> fingerprint();

/// What differs here from where a checkpoint was saved, each in a sentence. A run that resumes in spite of it
/// is right, but need not have the bits of the uninterrupted one.
HALFSTEP_API std::vector<std::string> fingerprint_changes(const Checkpoint& checkpoint);

/// LibTorch's default random generators: the CPU's, and of every accelerator that there is. Loading sets
/// those that were saved and are here; a checkpoint may go on on another machine.
HALFSTEP_API StateDict random_state();
HALFSTEP_API void load_random_state(const StateDict& saved);

/// Parameters and buffers of a module, by name, copied. A parameter that it has under two names is saved
/// under both, with equal bits: whoever reads the file finds each name.
HALFSTEP_API StateDict module_state(const torch::nn::Module& module);

/// Writes a saved state into a module's own tensors, or throws an Error that lists all that does not fit and
/// changes nothing. Two names of one tensor must have equal bits.
HALFSTEP_API void load_module_state(torch::nn::Module& module, const StateDict& saved);

/// The states that the ranks of a run have saved, to be read one by one: a rank that loads reads what it
/// needs of the others'.
struct SavedByRanks {
  std::vector<std::vector<std::string>> names;  ///< of each rank's state
  std::size_t own = 0;                          ///< whose values count where they are no parts
  std::function<StateDict::Value(std::size_t rank, const std::string& name)> read;
};

/// Of these, what is to be loaded into `live`: the state of one rank of any number, or of one process. Runs
/// of a parameter's elements, "working.layers.3.weight[0:65536]" (Param::is_part), are cut and put together
/// anew; all else is what rank `own` has saved. Bit for bit; an Error where elements are missing, or where
/// the parameter lies in memory in another order than it did.
HALFSTEP_API StateDict resharded(const SavedByRanks& saved, const StateDict& live);
/// The same for states in memory.
HALFSTEP_API StateDict resharded(const std::vector<StateDict>& saved, const StateDict& live);

/// Throws an Error that lists every name that is missing or unknown, and every value whose kind, type or
/// shape is not that of `live`. `whose` begins the message.
HALFSTEP_API void expect_like(std::string_view whose, const StateDict& saved, const StateDict& live);

}  // namespace halfstep
