// Shows a training run to a person, or tells it to a program.
#pragma once

#include <halfstep/run_watch.h>

#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>

#include "cli/step_pace.h"

namespace halfstep::cli {

enum class ScreenMode {
  Terminal,  ///< one line that is redrawn, at most ten times a second; what stays scrolls above it
  Plain,     ///< few lines and no escape codes, for files and pipes
  Json,      ///< each record as one line of JSON, with the fields of log.jsonl
};

struct ScreenOptions {
  ScreenMode mode = ScreenMode::Plain;
  bool colour = false;
  /// Asked at every line, because windows change.
  std::function<size_t()> columns = [] { return size_t{80}; };
};

/// Terminal if `descriptor` is one and TERM is not dumb; in colour unless NO_COLOR is set and not empty.
ScreenOptions screen_options(int descriptor, bool json);

/// Time is the records' own: nothing here asks a clock. A stream that fails is written to no more, and the
/// run goes on; whoever owns the stream sees that it failed.
class TrainScreen : public RunWatcher {
 public:
  TrainScreen(std::ostream& out, ScreenOptions options);
  /// Leaves the line that was drawn last, with its end.
  ~TrainScreen() override;
  TrainScreen(const TrainScreen&) = delete;
  TrainScreen& operator=(const TrainScreen&) = delete;

  void begin(const RunPlan& plan) override;
  void step(const StepRecord& record) override;
  void evaluation(const EvaluationRecord& record) override;
  void sample(const SampleRecord& record) override;
  void note(int64_t step, std::string_view text) override;
  void end(const RunEnd& end) override;
  void stuck(std::string_view doing, double seconds) override;

 private:
  /// Skipped steps in a row: told once, when it is known what the loss scale became.
  struct Skips {
    int64_t first_step = 0, last_step = 0, count = 0;
    double first_seconds = 0.0;
    std::optional<double> scale{};  // of the latest, as is what follows
    std::string why{}, parameter{};
  };

  void header();
  void header_line(std::string_view name, std::string_view text);
  void gather_skip(const StepRecord& record);
  void tell_skips(std::optional<double> scale_now);
  bool is_due(const StepRecord& record) const;
  void show_latest();
  /// A line that stays; `text` may be anybody's.
  void line(std::string_view text, std::string_view colour = "");
  void write(const std::string& text);
  bool on_terminal() const { return options_.mode == ScreenMode::Terminal; }
  bool as_json() const { return options_.mode == ScreenMode::Json; }
  size_t columns() const;

  std::ostream& out_;
  ScreenOptions options_;
  RunPlan plan_{};
  StepPace pace_{};
  std::optional<StepRecord> latest_{};
  int64_t skipped_steps_ = 0;
  Skips skips_{};
  std::optional<double> evaluation_loss_{};
  double seconds_ = 0.0;  // of the latest record
  double shown_seconds_ = 0.0;
  int64_t shown_step_ = -1;
  bool drawn_ = false;  // the cursor stands behind a line that will be redrawn
};

}  // namespace halfstep::cli
