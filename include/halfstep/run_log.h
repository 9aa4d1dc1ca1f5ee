// What a training run writes about itself while it runs: log.jsonl, all of it, and log.csv, one row a step.
// The fields of both, with their units, are in docs/run-log.md. Knows no Torch.
#pragma once

#include <halfstep/config.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace halfstep {

/// What stands at the beginning of a log, and again where a run was resumed.
struct RunHeader {
  std::string configuration;  ///< the whole text, such that the run can be made again from it
  std::vector<std::pair<std::string, std::string>> machine;  ///< name and value: "cpu", "threads", "torch"
  std::string unit = "tokens";                               ///< what StepRecord::items counts
};

/// Where the time of a step went, in seconds.
struct PhaseSeconds {
  double forward = 0.0;
  double backward = 0.0;
  double inspect = 0.0;  ///< looking through the gradients: norm, Inf and NaN
  double step = 0.0;     ///< the optimizer
  double data = 0.0;     ///< waiting for the batch
  double other = 0.0;
};

/// Bytes of tensors in one step.
struct MemoryRecord {
  /// Those of one MemoryClass.
  struct Class {
    std::string name;  ///< "activation"
    int64_t live_bytes = 0;
    int64_t peak_bytes = 0;  ///< within this step
  };
  int64_t live_bytes = 0;
  int64_t peak_bytes = 0;  ///< of the total; the classes may have had theirs at other times
  std::vector<Class> classes{};
};

/// One step. Numbers may be NaN or infinite: a run that diverges must be able to say so.
struct StepRecord {
  int64_t step = 0;      ///< counted from 1; each stands once in a log
  double seconds = 0.0;  ///< since the run began, by a monotonic clock; continues in a resumed run
  double loss = 0.0;
  double lr = 0.0;
  double grad_norm = 0.0;  ///< un-scaled, before clipping
  int64_t items = 0;       ///< in this step; RunHeader::unit says what they are
  double items_per_second = 0.0;
  std::optional<double> loss_scale{};
  bool skipped = false;
  std::string why{};                        ///< of a skipped step, one sentence
  std::string parameter{};                  ///< of a skipped step: the first that was not finite
  std::optional<double> stalled_share{};    ///< of the updates: too small to move the weights, 0 to 1
  std::optional<double> saturated_share{};  ///< of what a recipe quantised: held at the format's max, 0 to 1
  std::optional<double> vanished_share{};   ///< of what a recipe quantised: became 0, 0 to 1
  std::optional<double> share_of_peak{};    ///< of the machine's arithmetic, 0 to 1
  std::optional<double> evaluation_loss{};  ///< if the model was evaluated after this step
  PhaseSeconds phases{};
  std::optional<MemoryRecord> memory{};
};

/// A look at held-out data.
struct EvaluationRecord {
  int64_t step = 0;      ///< after this one
  double seconds = 0.0;  ///< as in StepRecord
  double loss = 0.0;
  std::optional<double> accuracy{};  ///< 0 to 1
  int64_t items = 0;                 ///< that the loss is the mean of
  double duration_seconds = 0.0;
};

/// What the model wrote.
struct SampleRecord {
  int64_t step = 0;
  double seconds = 0.0;
  std::string prompt;
  std::string text;
};

/// A checkpoint that is on the disk.
struct CheckpointRecord {
  int64_t step = 0;  ///< when that was known; the run continues while a checkpoint is written
  double seconds = 0.0;
  int64_t saved_step = 0;  ///< the checkpoint's own
  int64_t tensor_bytes = 0;
};

/// A record as it stands in log.jsonl: one line, with its end.
HALFSTEP_API std::string to_json(const StepRecord& record);
HALFSTEP_API std::string to_json(const EvaluationRecord& record);
HALFSTEP_API std::string to_json(const SampleRecord& record);

/// The log of one run folder. Every record is one `write` of one line into each file that holds it: a process
/// that is killed leaves at most one cut line, the last, which `resume` removes. What the operating system
/// refuses is a FileError; the files then end with the record before, and the refused one is kept in memory
/// and written before the next: a run can go on over a disk that was full for a while.
///
/// Records come in the order of their steps; another order is an Error. Bytes that are not UTF-8 become
/// U+FFFD. One writer a folder (CheckpointFolder's lock sees to it), one thread a log.
class HALFSTEP_API RunLog {
 public:
  /// The version of both files, `"schema"` in the first line.
  static constexpr int kSchema = 1;

  /// Begins a log in a folder that has none; one that is there already is a FileError (EEXIST).
  [[nodiscard]] static RunLog create(const std::filesystem::path& folder, const RunHeader& header);

  /// Continues a log after `step`. Its records of later steps are removed, so that each step stands in it
  /// once. After step 0 nothing is left of it. A file that is missing is begun.
  [[nodiscard]] static RunLog resume(const std::filesystem::path& folder, const RunHeader& header,
                                     int64_t step);
  /// Throws what `resume` would throw of damaged files, and changes nothing.
  static void check_resumable(const std::filesystem::path& folder, int64_t step);

  ~RunLog();
  RunLog(RunLog&&) noexcept;
  RunLog& operator=(RunLog&&) noexcept;

  /// Append one record each.
  void step(const StepRecord& record);
  void evaluation(const EvaluationRecord& record);
  void sample(const SampleRecord& record);
  void note(int64_t step, double seconds, std::string_view text);
  void checkpoint(const CheckpointRecord& record);
  /// How the run ended: "done", "interrupted", "out of time", "diverged", "failed", and a sentence.
  void end(int64_t step, double seconds, std::string_view outcome, std::string_view why);

  /// Puts both files on the disk, refused records too. Before a checkpoint, so that none is ahead of its log.
  void sync();

  /// Records that were refused and found no room in memory either: 64 MB are kept.
  int64_t lost() const;
  /// Records that are not in the file: those that are lost, and those that are kept in memory until the disk
  /// takes them. They go with the process. Of log.jsonl or log.csv, whichever lacks more.
  int64_t unwritten() const;

  /// The last step recorded in the log of a folder; 0 if there is none.
  static int64_t last_step(const std::filesystem::path& folder);

  /// `seconds` of the last step that `resume` kept, to count on from; 0 in a new log.
  double seconds_before() const;
  /// The last step of which `resume` kept a record; 0 if there is none, and in a new log.
  int64_t recorded_before() const;

 private:
  struct State;
  explicit RunLog(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace halfstep
