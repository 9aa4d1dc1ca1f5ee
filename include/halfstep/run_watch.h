// Observers of a training run. Knows no Torch.
#pragma once

#include <halfstep/config.h>
#include <halfstep/run_log.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep {

/// What a run is about to do, known before its first step.
struct RunPlan {
  std::string model;  ///< "gpt2: 6 blocks of width 384"
  int64_t parameters = 0;
  std::string precision;        ///< "BF16, weights split master, moments fp32"
  std::string data;             ///< "10,741,003 tokens to train on, 565,210 held out"
  std::string folder;           ///< where it writes
  std::string unit = "tokens";  ///< what its batches are counted in
  int64_t steps = 0;            ///< of the whole run
  int64_t steps_done = 0;       ///< before this process; above 0 in a resumed run
  int64_t items_per_step = 0;   ///< counted in `unit`
  int64_t threads = 0;
  int64_t ranks = 1;
};

/// How a run ended.
enum class RunOutcome {
  Done,         ///< all steps, or no lower held-out loss for train.patience evaluations
  Interrupted,  ///< it was asked to stop, and saved
  OutOfTime,    ///< train.time_limit_minutes are over, and it saved
  Diverged,     ///< too many steps in a row were skipped, or the loss rose for good
  Failed,       ///< an error ended it
};

/// "done", "interrupted", "out of time", "diverged", "failed".
HALFSTEP_API std::string_view to_string(RunOutcome outcome);

/// How and where a run ended.
struct RunEnd {
  RunOutcome outcome = RunOutcome::Done;
  int64_t step = 0;  ///< the last one
  std::string why;   ///< one sentence
};

/// As one line of JSON, with its end. Of a note and of the end, `seconds` is the time of the latest record
/// that had one. The fields are in docs/run-log.md.
HALFSTEP_API std::string to_json(const RunPlan& plan);
HALFSTEP_API std::string note_to_json(int64_t step, double seconds, std::string_view text);
HALFSTEP_API std::string to_json(const RunEnd& end, double seconds);

/// A screen, for instance. Every step comes, those too that log.every leaves out of the log.
class HALFSTEP_API RunWatcher {
 public:
  virtual ~RunWatcher();
  /// What happened, when it has happened; `begin` before the first step.
  virtual void begin(const RunPlan& plan) = 0;
  virtual void step(const StepRecord& record) = 0;
  virtual void evaluation(const EvaluationRecord& record) = 0;
  virtual void sample(const SampleRecord& record) = 0;
  /// Something worth a line: a checkpoint was saved, the processor differs from the one before.
  virtual void note(int64_t step, std::string_view text) = 0;
  /// After the last step, also of a run that failed.
  virtual void end(const RunEnd& end) = 0;
  /// No progress for so long. Called by a thread of its own, while the run's may hang.
  virtual void stuck(std::string_view doing, double seconds) {
    (void)doing;
    (void)seconds;
  }
};

}  // namespace halfstep
