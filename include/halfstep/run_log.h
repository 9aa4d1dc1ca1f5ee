// What a training run writes about itself while it runs: log.jsonl, all of it, and log.csv, one row a step.
// The fields of both, with their units, are in docs/run-log.md. Knows no Torch.
#pragma once

#include <halfstep/config.h>
#include <halfstep/tensor_stats.h>

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
  int64_t ranks = 1;                                         ///< processes that train together
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
  std::string stalled_most{};               ///< the parameter that lost most updates; empty if none did
  std::string saturated_most{};  ///< the weight whose layer has the largest share; empty if none has any
  std::string vanished_most{};   ///< too
  std::optional<double> share_of_peak{};    ///< of the machine's arithmetic, 0 to 1
  std::optional<double> evaluation_loss{};  ///< if the model was evaluated after this step
  std::vector<double> rank_losses{};  ///< by rank, each of its own batches, where a Probe looks at ranks
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

/// What the numbers of one tensor were like in a step that was looked at.
struct ProbeRecord {
  int64_t step = 0;
  double seconds = 0.0;
  std::string role{};  ///< "weight", "activation", "gradient" (with its loss scale), "update"
  std::string name{};  ///< of the layer or parameter; of what a softmax is given, with kLogitsAfter behind it
  TensorStats stats{};
  /// Of a gradient that autograd added up in 16 bits: how many forwards of this step it is of, and "bf16" or
  /// "fp16".
  int64_t summed_parts = 1;
  std::string sum_type{};

  static constexpr std::string_view kLogitsAfter = ", logits after it";  ///< "h.0.attn, logits after it"
};

/// How far one linear layer's products in another precision were from FP32's, in a step that was looked at.
/// An error is the norm of the difference as a share of the norm of FP32's result; NaN or infinite where the
/// other precision's result is not finite.
struct ShadowRecord {
  int64_t step = 0;
  double seconds = 0.0;
  std::string precision{};         ///< "mxfp8"
  std::string layer{};             ///< the name of its weight
  double output_error = 0.0;       ///< of what the layer puts out
  double input_grad_error = 0.0;   ///< of the gradient of its input; 0 where none is computed
  double weight_grad_error = 0.0;  ///< of the gradient of its weight
  double forward_noise = 0.0;      ///< what the output's error does to the step's loss: its deviation, in the
                                   ///< loss's unit, if the elements' errors were independent
  double backward_noise = 0.0;     ///< the same of the input gradient's error, times the input
  double gradient_share = 0.0;     ///< norm of the weight gradient's error, of the whole model's gradient's
};

/// The first operation of a step that was given finite numbers and put out others.
struct CulpritRecord {
  int64_t step = 0;
  double seconds = 0.0;
  int64_t rank = 0;                   ///< the first where there was one
  std::vector<int64_t> ranks{};       ///< all where there was one; empty where nobody knows, or they had none
  std::string op{};                   ///< "addmm"; "weight", "input" or "gradient" where none made them;
                                      ///< kSumOfBatches and kSumOverRanks where all parts were finite
  std::string inside{};               ///< the call that it was a part of: "linear"
  std::string layer{};                ///< "layers.0.up", or "after layers.0.up"
  std::string direction{};            ///< "forward", "backward"
  std::vector<std::string> inputs{};  ///< "self: FP16 [8, 128], -3.1 to 71.2"
  std::string output{};               ///< "FP16 [8, 512]: of 4,096 numbers 3 Inf and 0 NaN"
  bool precision_is_cause = false;    ///< FP32 holds what the same operation gives in FP64
  std::string verdict{};              ///< the same as a sentence
  int64_t propagated = 0;             ///< later operations that passed the numbers on

  /// `layer` is then the parameter whose gradients were added.
  static constexpr std::string_view kSumOfBatches = "sum of micro-batches";
  /// The same, of the gradients of all ranks.
  static constexpr std::string_view kSumOverRanks = "sum over ranks";
  /// Whether one of these sums made the numbers, and no operation.
  bool is_sum() const { return op == kSumOfBatches || op == kSumOverRanks; }
};

/// How bad a finding is.
enum class Severity : std::uint8_t {
  Note,     ///< normal, or harmless; worth knowing
  Warning,  ///< costs steps or accuracy
  Serious,  ///< the run learns nothing, or will soon
};

/// "note", "warning", "serious".
HALFSTEP_API std::string_view to_string(Severity severity);

/// Something that is wrong with a run's precision. halfstep/findings.h makes them.
struct Finding {
  std::string code{};  ///< "gradient-underflow": a section of docs/findings.md
  Severity severity = Severity::Note;
  int64_t step = 0;        ///< where it began
  std::string what{};      ///< a sentence with numbers
  std::string evidence{};  ///< what it was concluded from
  std::string remedy{};    ///< what to do
  std::string layer{};     ///< if there is one to name
  std::string op{};        ///< if there is one to name
};

/// A finding, and when it was made.
struct FindingRecord {
  int64_t step = 0;  ///< after this one; Finding::step is where it began
  double seconds = 0.0;
  Finding finding{};
};

/// A record as it stands in log.jsonl: one line, with its end.
HALFSTEP_API std::string to_json(const StepRecord& record);
HALFSTEP_API std::string to_json(const EvaluationRecord& record);
HALFSTEP_API std::string to_json(const SampleRecord& record);
HALFSTEP_API std::string to_json(const FindingRecord& record);

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
  void probe(const ProbeRecord& record);
  void shadow(const ShadowRecord& record);
  void culprit(const CulpritRecord& record);
  void finding(const FindingRecord& record);
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
