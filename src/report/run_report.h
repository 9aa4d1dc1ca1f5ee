// What became of a training run, read back from its log: one page for a person, and whether runs differ.
// docs/report.md tells how both are made. Knows no Torch.
#pragma once

#include <halfstep/config.h>
#include <halfstep/findings.h>
#include <halfstep/run_log.h>
#include <halfstep/tensor_stats.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace halfstep {

/// All that a log tells of its run.
struct RunHistory {
  struct End {
    int64_t step = 0;
    double seconds = 0.0;
    std::string outcome;  ///< "done", "interrupted", "out of time", "diverged", "failed"
    std::string why;      ///< a sentence, or empty
  };

  /// From a start of the process to its end. A run that was never resumed has one.
  struct Sitting {
    int64_t after_step = 0;  ///< steps done before
    std::string halfstep;    ///< its version
    double unix_time = 0.0;  ///< of the start
    RunHeader header;
    std::optional<End> end{};  ///< none if the process was killed, or goes on
  };

  struct Note {
    int64_t step = 0;
    double seconds = 0.0;
    std::string text;
  };

  /// A ProbeRecord in a tenth of its memory.
  struct Probe {
    int64_t step = 0;
    double seconds = 0.0;
    std::string role, name;
    std::vector<int64_t> packed{};
    int64_t summed_parts = 1;
    std::string sum_type{};

    TensorStats stats() const { return TensorStats::unpacked(packed); }
  };

  std::string name;                 ///< of the folder, for headings
  std::vector<Sitting> sittings{};  ///< at least one
  std::vector<StepRecord> steps{};  ///< those that were logged, ascending
  std::vector<EvaluationRecord> evaluations{};
  std::vector<SampleRecord> samples{};
  std::vector<Note> notes{};
  std::vector<CheckpointRecord> checkpoints{};  ///< those that became durable
  std::vector<Probe> probes{};  ///< at most 20,000: of long runs those of every second step, fourth, ...
  std::vector<ShadowRecord> shadows{};
  std::vector<CulpritRecord> culprits{};
  std::vector<FindingRecord> findings{};           ///< made while it ran; findings_of() has all
  bool last_line_cut = false;                      ///< a record was being written when the process died
  std::map<std::string, int64_t> unknown_kinds{};  ///< records of a later version, by kind: passed over

  /// How the run ended; none if it was killed, or goes on.
  const std::optional<End>& end() const { return sittings.back().end; }
};

/// Reads `log.jsonl` of a run's folder, also while the run goes on. A file that is missing, or damaged
/// anywhere but in its last line, is a FileError that names the line.
[[nodiscard]] RunHistory read_run(const std::filesystem::path& folder);

/// The figures of a run that its heading tells.
struct RunSummary {
  std::string trained;        ///< "gpt2, 6 blocks of width 384, bf16"; empty if not known
  int64_t planned_steps = 0;  ///< 0 if not known
  int64_t last_step = 0;
  double seconds = 0.0;                ///< of all sittings
  int64_t items = 0;                   ///< in the logged steps
  std::optional<double> first_loss{};  ///< of the first step
  std::optional<double> final_loss{};  ///< mean of the finite ones among the last `final_steps`
  int64_t final_steps = 0;
  std::optional<double> first_evaluation_loss{};  ///< if there are two or more
  std::optional<double> evaluation_loss{};        ///< the last one
  std::optional<double> accuracy{};               ///< of the same evaluation
  std::optional<double> items_per_second{};       ///< median of the steps
  std::optional<double> share_of_peak{};          ///< median
  std::optional<double> stalled_share{};          ///< mean over the last `final_steps`
  int64_t skipped = 0;
  int64_t not_finite = 0;  ///< steps whose loss is NaN or infinite
  int64_t peak_bytes = 0;  ///< the most of any step; 0 if not measured
  std::string verdict;     ///< all of it in a few sentences
};

[[nodiscard]] RunSummary summarize(const RunHistory& run);

/// All that its records say is wrong, the most serious first.
[[nodiscard]] std::vector<Finding> findings_of(const RunHistory& run);

/// One HTML page with everything in it: nothing is fetched, no script is needed to read it. Its size is
/// bounded whatever the length of the run; what it leaves out it counts.
[[nodiscard]] std::string report_html(const RunHistory& run);

/// What can be said of two runs' losses at the same steps.
enum class Likeness {
  Same,       ///< the difference, with its uncertainty, is within the margin
  Unclear,    ///< the uncertainty reaches across the margin: more steps are needed, or the same batches
  Different,  ///< the difference, with its uncertainty, is beyond the margin
  NotFinite,  ///< one of them has lost its loss to NaN or Inf
  TooShort,   ///< too few steps in common
};

/// "same", "unclear", "different", "not finite", "too short".
std::string_view to_string(Likeness likeness);

/// Mean difference over the last steps that both runs have, and how sure it is.
struct LossDifference {
  Likeness likeness = Likeness::TooShort;
  bool paired = false;       ///< step by step, since both saw the same batches
  std::string why_unpaired;  ///< one sentence, if not
  bool identical = false;    ///< every loss in common, from the first step on, has the same bits
  int64_t steps = 0;         ///< that the mean is over
  double mean = 0.0;         ///< of the other run less this one
  double half_width = 0.0;   ///< of its 95% interval
  double margin = 0.0;       ///< that matters in practice
};

struct RunComparison {
  /// Relative to the loss: a difference below this matters to nobody.
  static constexpr double kMargin = 0.0025;

  struct Row {
    std::string name;
    std::optional<double> final_loss{};  ///< mean over the window
    int64_t not_finite = 0;              ///< steps of the window
    std::optional<double> evaluation_loss{};
    int64_t evaluation_step = 0;
    LossDifference from_first{};  ///< of this run less the first; nothing in the first row
    RunSummary summary{};
  };

  std::string sentence;                   ///< which runs are the same within noise
  int64_t first_step = 0, last_step = 0;  ///< of the window in which losses are compared
  std::vector<Row> rows{};
  /// One for each pair i < j, in the order (0,1), (0,2), ..., (1,2), ...
  std::vector<LossDifference> pairs{};
};

/// Needs two runs or more.
[[nodiscard]] RunComparison compare_runs(std::span<const RunHistory> runs);
/// The comparison and the curves of all runs in one page, as report_html makes it.
[[nodiscard]] std::string compare_html(std::span<const RunHistory> runs);

/// Puts a page at `path`, whole or not at all.
void write_page(const std::filesystem::path& path, std::string_view html);

}  // namespace halfstep
