// All that a run writes: its folder with configuration, logs, status and checkpoints.
#pragma once

#include <halfstep/checkpoint.h>
#include <halfstep/event_file.h>
#include <halfstep/run_config.h>
#include <halfstep/run_log.h>
#include <halfstep/run_watch.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/folder_lock.h"
#include "log/prometheus.h"
#include "train/phase_clock.h"

namespace halfstep::train {

/// Of its tensors.
int64_t bytes_of(const Checkpoint& checkpoint);

/// One process a folder, from before anything in it is written until the run ends.
class FolderClaim {
 public:
  /// Makes the folder if there is none, and removes what a process that died left half written. An Error if
  /// another process has it.
  explicit FolderClaim(const std::filesystem::path& folder);
  /// A folder that was made for a run which then was refused goes again.
  ~FolderClaim();
  FolderClaim(const FolderClaim&) = delete;
  FolderClaim& operator=(const FolderClaim&) = delete;

 private:
  std::filesystem::path folder_;
  bool made_ = false;
  std::optional<files::FolderLock> lock_;
};

/// Of a run whose ranks have parts of its state each: all of them save, and load what is theirs.
struct RunShards {
  CheckpointRanks ranks{};
  std::function<std::map<std::string, StateDict>()> live_parts{};
  int64_t processes = 1;  ///< that train this run, with parts or without

  bool are_there() const { return ranks.size > 1; }
  /// Of this rank, to load what is its own; nothing where one process has all.
  std::map<std::string, StateDict> live() const {
    return live_parts ? live_parts() : std::map<std::string, StateDict>();
  }
};

/// What the disk refuses while a run goes on ends nothing: it is told, and tried again.
class RunFolder {
 public:
  /// Looks for the checkpoint to go on from: checkpoint.resume says whether, `from_step` which. Nothing is
  /// changed yet.
  ///
  /// With `only_reads`, for a rank that another one writes for, nothing ever is; `from_step` is then the one
  /// that the writer goes on from, nothing in a new run.
  RunFolder(const ResolvedConfig& resolved, const std::filesystem::path& folder,
            std::optional<int64_t> from_step, bool only_reads, RunShards shards = {});

  /// To go on from; nothing in a new run.
  const std::optional<Checkpoint>& checkpoint() const { return checkpoint_; }
  int64_t step() const { return step_; }  ///< done before

  /// From here on the folder is this run's: configuration and logs are written, what is newer than the
  /// checkpoint goes, and a run without checkpoints that was here before is moved aside. A disk without room
  /// for a checkpoint is refused before that; one without room for all that are kept is noted.
  void begin(const std::string& unit, uint64_t checkpoint_bytes, RunWatcher& watcher);

  const std::vector<std::string>& notes() const { return notes_; }
  /// Before `begin`.
  void add_note(std::string text) { notes_.push_back(std::move(text)); }

  /// Since the run began, pauses between processes not counted.
  double seconds() const { return seconds_before_ + clock_.seconds(); }
  /// Of this process.
  double seconds_here() const { return clock_.seconds(); }

  /// Where histograms go, if there are any to write at this step.
  EventFile* histograms_at(int64_t step);

  void write(const StepRecord& record);
  void write(const EvaluationRecord& record);
  void write(const SampleRecord& record);
  void write(const ProbeRecord& record);
  void write(const ShadowRecord& record);
  void write(const CulpritRecord& record);
  void write(const FindingRecord& record);
  void note(int64_t step, std::string_view text);
  void end(const RunEnd& end);
  /// How much of the log the disk has refused until the end, in a sentence. Events are a copy and end
  /// nothing.
  std::optional<std::string> unwritten() const;

  /// Whether a checkpoint should be made after this step: by steps, by time, or because the last one failed.
  bool save_due(int64_t step) const;
  /// The logs first, so that no checkpoint is ahead of them. Written while the run goes on.
  void save(Checkpoint checkpoint);
  /// Durable when it returns; tries for some seconds, then throws the FileError.
  void save_last(const Checkpoint& checkpoint);
  /// Takes note of a checkpoint that has become durable, or has failed, since.
  void look_after_saves(int64_t step);
  /// Waits for the one under way.
  void finish_saves(int64_t step);
  int64_t saved_step() const { return saved_step_; }  ///< of the last one that is durable
  double save_seconds() const { return longest_save_seconds_.value_or(guessed_save_seconds_); }

  /// The last healthy checkpoint that is at most of this step, else the oldest healthy one; none if there is
  /// none.
  std::optional<int64_t> healthy_step(int64_t most) const;
  /// Of the checkpoint with the lowest score, if checkpoint.keep_best keeps it and the run was well then.
  std::optional<int64_t> best_step() const;
  /// After a step, those that checkpoint.keep_every or keep_best keep.
  std::vector<CheckpointSummary> kept_after(int64_t step) const;
  /// The first that going back to a step would remove although somebody has pinned it.
  std::optional<int64_t> pinned_after(int64_t step) const;
  /// One of its checkpoints; with shards, what is this rank's.
  Checkpoint loaded(int64_t step) const;
  /// Goes back to a checkpoint: what is newer goes, in the log too. When no save is under way.
  void go_back_to(int64_t step, const std::string& unit);

  /// Replaces status.json if it is older than a few seconds, or `at_once`.
  void write_status(const std::string& state, const StepRecord* latest, bool at_once);

 private:
  Checkpoint loaded_for_resume(int64_t step) const;
  /// Runs what may be refused by the disk. A refusal is told once, until it works again.
  template <typename Body>
  void patiently(int64_t step, const std::string& what, Body body, bool reaches_disk = true);
  /// Returns a sentence if the log lacks records of steps before the present one.
  [[nodiscard]] std::optional<std::string> open_logs(const std::string& unit);
  void write_figures(int64_t step, bool at_once);
  std::vector<CheckpointSummary> whole_checkpoints() const;  ///< without those that are damaged
  /// Of checkpoints that were kept and go when the run goes back to a step, if there are any.
  std::optional<std::string> removal_text(int64_t step) const;
  std::optional<uint64_t> free_bytes() const;  ///< for checkpoints, if the system tells
  void check_room_to_begin(uint64_t checkpoint_bytes);
  void check_space(uint64_t room, uint64_t checkpoint_bytes) const;
  double retry_seconds() const;  ///< from a save that failed to the next attempt
  std::string last_saved_text() const;
  void note_failed_save(int64_t step, const std::string& why);

  ResolvedConfig resolved_;
  std::filesystem::path folder_;
  bool only_reads_;
  RunShards shards_;
  std::optional<CheckpointFolder> checkpoints_{};  // of those that write
  std::optional<Checkpoint> checkpoint_;
  std::vector<std::string> notes_;
  int64_t step_ = 0;
  std::optional<RunLog> log_;
  std::optional<EventFile> events_;
  std::optional<log::PrometheusFigures> figures_;
  double figures_at_ = -1e9;  ///< seconds_here, when they were written
  bool figures_refused_ = false;
  RunWatcher* watcher_ = nullptr;
  double seconds_before_ = 0;
  PhaseClock clock_;
  int64_t histogram_every_;
  int64_t log_every_;  ///< log.every, of this process or of the one before: the larger
  /// What the disk refuses at present.
  struct Refusal {
    int64_t since = 0;  ///< step
    std::string why;
  };
  std::map<std::string, Refusal> refused_;  ///< by what

  struct Saving {
    int64_t step = 0;
    int64_t tensor_bytes = 0;
    double begun = 0;  ///< seconds_here
  };
  std::optional<Saving> saving_;
  int64_t saved_step_ = 0;
  double saved_at_ = 0;  ///< seconds_here, when the last one was asked for
  std::optional<double> longest_save_seconds_;
  double guessed_save_seconds_ = 0;  ///< until there is one
  bool ending_ = false;              ///< the last save is under way
  int failures_ = 0;                 ///< in a row
  std::string failure_;              ///< the last
  double status_at_ = -1e9;
  double saved_unix_time_ = 0;
};

}  // namespace halfstep::train
