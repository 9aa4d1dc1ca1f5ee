#include "cli/train_screen.h"

#include <halfstep/printable.h>
#include <halfstep/run_watch.h>

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iomanip>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cli/terminal_text.h"
#include "words/names.h"
#include "words/numbers.h"

namespace halfstep::cli {
namespace {

// The line that tells how a run is doing.

struct StatusField {
  std::string before{}, value{}, after{};  ///< "lr ", "3.00e-4", ""
  int rank = 0;                            ///< where there is no room, the highest goes first
  bool alarm = false;                      ///< something a person should see

  size_t columns() const { return before.size() + value.size() + after.size(); }
};

constexpr size_t kGap = 2;

// Fields of steady width do not jump while the line is redrawn.
std::string padded(std::string text, size_t columns) {
  if (text.size() < columns) text.append(columns - text.size(), ' ');
  return text;
}

std::string step_of(const RunPlan& plan, int64_t step) {
  const std::string total = std::to_string(plan.steps), done = std::to_string(step);
  return std::string(total.size() > done.size() ? total.size() - done.size() : 0, ' ') + done + "/" + total;
}

std::string rate_unit(const RunPlan& plan) {
  return plan.unit == "tokens" ? " tok/s" : " " + plan.unit + "/s";
}

size_t columns_of(const std::vector<StatusField>& fields) {
  size_t columns = fields.empty() ? 0 : kGap * (fields.size() - 1);
  for (const StatusField& field : fields) columns += field.columns();
  return columns;
}

std::string coloured(const StatusField& field) {
  constexpr const char *kDim = "\033[2m", *kYellow = "\033[33m", *kPlain = "\033[0m";
  if (field.alarm) return kYellow + field.before + field.value + field.after + kPlain;
  const auto dim = [&](const std::string& text) { return text.empty() ? text : kDim + text + kPlain; };
  return dim(field.before) + field.value + dim(field.after);
}

/// In the order in which they are shown. ASCII only, so that bytes are columns.
std::vector<StatusField> status_fields(const RunPlan& plan, const StepRecord& record, int64_t skipped_steps,
                                       std::optional<double> seconds_left) {
  const bool skips_matter = skipped_steps > 0;
  std::vector<StatusField> fields{
      {.before = "step ", .value = step_of(plan, record.step), .rank = 0},
      {.before = "loss ",
       .value = padded(loss_text(record.loss), 6),
       .rank = 1,
       .alarm = !std::isfinite(record.loss)},
      {.before = "lr ", .value = padded(lr_text(record.lr), 7), .rank = 6},
      {.before = "grad ",
       .value = padded(short_text(record.grad_norm), 4),
       .rank = 5,
       .alarm = !std::isfinite(record.grad_norm)},
      {.value = padded(si_text(record.items_per_second), 4), .after = rate_unit(plan), .rank = 3},
  };
  if (record.share_of_peak)
    fields.push_back({.before = "peak ", .value = padded(percent_text(*record.share_of_peak), 3), .rank = 8});
  if (record.loss_scale)
    fields.push_back({.before = "scale ", .value = loss_scale_text(*record.loss_scale), .rank = 7});
  if (record.loss_scale || skips_matter)
    fields.push_back({.before = "skips ",
                      .value = std::to_string(skipped_steps),
                      .rank = skips_matter ? 4 : 10,
                      .alarm = skips_matter});
  if (record.stalled_share)
    fields.push_back(
        {.before = "stalled ", .value = padded(percent_text(*record.stalled_share), 3), .rank = 9});
  if (record.saturated_share)
    fields.push_back(
        {.before = "saturated ", .value = padded(percent_text(*record.saturated_share), 3), .rank = 11});
  if (record.vanished_share)
    fields.push_back(
        {.before = "to 0 ", .value = padded(percent_text(*record.vanished_share), 3), .rank = 12});
  if (seconds_left) fields.push_back({.before = "ETA ", .value = duration_text(*seconds_left), .rank = 2});
  return fields;
}

/// What of it fits into so many columns, with two spaces between fields.
std::string status_line(std::vector<StatusField> fields, size_t columns, bool colour) {
  while (fields.size() > 1 && columns_of(fields) > columns)
    fields.erase(std::max_element(fields.begin(), fields.end(),
                                  [](const auto& one, const auto& other) { return one.rank < other.rank; }));
  if (fields.empty()) return "";
  if (columns_of(fields) > columns) {
    const StatusField& last = fields.front();
    return (last.before + last.value + last.after).substr(0, columns);
  }
  std::string line;
  for (const StatusField& field : fields) {
    if (!line.empty()) line.append(kGap, ' ');
    line += colour ? coloured(field) : field.before + field.value + field.after;
  }
  return line;
}

constexpr std::string_view kBold = "\033[1m", kDim = "\033[2m", kRed = "\033[31m", kGreen = "\033[32m",
                           kYellow = "\033[33m", kNormal = "\033[0m", kRestOfLine = "\033[K";

// Plain logs stay short however long the run is: a line after the later of the two.
constexpr double kSecondsOnTerminal = 0.1, kSecondsElsewhere = 10, kShareElsewhere = 0.05;
constexpr size_t kSampleLines = 12;

size_t columns_of_terminal(int descriptor) {
  winsize size{};
  if (ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

bool is_set(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != '\0';
}

std::string_view colour_of(RunOutcome outcome) {
  switch (outcome) {
    case RunOutcome::Done:
      return kGreen;
    case RunOutcome::Interrupted:
    case RunOutcome::OutOfTime:
      return kYellow;
    case RunOutcome::Diverged:
    case RunOutcome::Failed:
      return kRed;
  }
  return "";
}

std::string step_name(int64_t step) { return "step " + std::to_string(step); }

}  // namespace

ScreenOptions screen_options(int descriptor, bool json) {
  ScreenOptions options;
  const char* const term = std::getenv("TERM");
  const bool dumb = term != nullptr && std::string_view(term) == "dumb";
  const bool terminal = isatty(descriptor) == 1 && !dumb;
  options.mode = json ? ScreenMode::Json : terminal ? ScreenMode::Terminal : ScreenMode::Plain;
  options.colour = options.mode == ScreenMode::Terminal && !is_set("NO_COLOR");
  options.columns = [descriptor] { return columns_of_terminal(descriptor); };
  return options;
}

TrainScreen::TrainScreen(std::ostream& out, ScreenOptions options)
    : out_(out), options_(std::move(options)) {}

TrainScreen::~TrainScreen() {
  if (drawn_) out_ << "\n" << std::flush;
}

// The last column stays empty: a terminal that is full to the edge may already have begun the next line.
size_t TrainScreen::columns() const { return std::max<size_t>(options_.columns(), 2) - 1; }

void TrainScreen::write(const std::string& text) {
  out_ << (as_json() ? printable_json(text) : text) << std::flush;
}

void TrainScreen::line(std::string_view text, std::string_view colour) {
  if (!options_.colour) colour = "";
  const std::string safe = printable(text, Unprintable::Replaced);
  const std::vector<std::string> rows = on_terminal() ? wrapped(safe, columns(), 4) : std::vector{safe};
  std::string all = drawn_ ? "\r" : "";
  for (const std::string& row : rows) {
    all.append(colour).append(row).append(colour.empty() ? "" : kNormal);
    if (on_terminal()) all += kRestOfLine;
    all += '\n';
  }
  const bool redraw = std::exchange(drawn_, false);
  write(all);
  if (redraw) show_latest();
}

void TrainScreen::header_line(std::string_view name, std::string_view text) {
  constexpr size_t kIndent = 11;
  std::string label(name);
  label.resize(kIndent, ' ');
  const std::string safe = printable(text, Unprintable::Replaced);
  const size_t room = std::max(columns(), 2 * kIndent) - kIndent;
  const std::vector<std::string> rows = on_terminal() ? wrapped(safe, room, 0) : std::vector{safe};
  std::string all;
  for (const std::string& row : rows) {
    all.append(options_.colour ? kDim : "").append(label).append(options_.colour ? kNormal : "");
    all.append(row).append("\n");
    label.assign(kIndent, ' ');
  }
  write(all);
}

void TrainScreen::header() {
  header_line("model", plan_.model + ", " + si_text(static_cast<double>(plan_.parameters)) + " parameters");
  header_line("precision", plan_.precision);
  header_line("data", plan_.data);
  std::string steps = with_commas(plan_.steps) + " of " + with_commas(plan_.items_per_step) + " " +
                      plan_.unit + ", " +
                      (plan_.ranks > 1 ? std::to_string(plan_.ranks) + " ranks of " : "") +
                      std::to_string(plan_.threads) + (plan_.threads == 1 ? " thread" : " threads");
  if (plan_.steps_done > 0) steps += "; resumed after step " + with_commas(plan_.steps_done);
  header_line("steps", steps);
  header_line("folder", plan_.folder);
  write("\n");
}

void TrainScreen::begin(const RunPlan& plan) {
  plan_ = plan;
  pace_ = StepPace(plan.steps, plan.steps_done);
  as_json() ? write(to_json(plan)) : header();
}

bool TrainScreen::is_due(const StepRecord& record) const {
  if (shown_step_ < 0 || record.step <= shown_step_) return true;  // the first, or the first after a rollback
  const double seconds = record.seconds - shown_seconds_;
  if (on_terminal()) return seconds >= kSecondsOnTerminal || record.step >= plan_.steps;
  const double steps = kShareElsewhere * static_cast<double>(plan_.steps - plan_.steps_done);
  return seconds >= kSecondsElsewhere && static_cast<double>(record.step - shown_step_) >= steps;
}

void TrainScreen::step(const StepRecord& record) {
  seconds_ = record.seconds;
  if (as_json()) return write(to_json(record));
  if (skips_.count > 0) {
    const bool over = !record.skipped || record.seconds - skips_.first_seconds >= kSecondsElsewhere;
    if (over) tell_skips(record.loss_scale);
  }
  if (record.skipped) gather_skip(record);
  pace_.step(record.step, record.seconds);
  latest_ = record;
  if (is_due(record)) show_latest();
}

void TrainScreen::show_latest() {
  if (!latest_) return;
  shown_seconds_ = latest_->seconds;
  shown_step_ = latest_->step;
  std::vector<StatusField> fields = status_fields(plan_, *latest_, skipped_steps_, pace_.seconds_left());
  if (on_terminal()) {
    // What is new first, then what is left of the old line: nothing flickers.
    std::string text(1, '\r');
    write(text.append(status_line(std::move(fields), columns(), options_.colour)).append(kRestOfLine));
    drawn_ = true;
  } else {
    write(status_line(std::move(fields), std::string::npos, false) + "\n");
  }
}

void TrainScreen::gather_skip(const StepRecord& record) {
  ++skipped_steps_;
  if (skips_.count++ == 0) {
    skips_.first_step = record.step;
    skips_.first_seconds = record.seconds;
  }
  skips_.scale = record.loss_scale;
  skips_.last_step = record.step;
  skips_.why = record.why;
  skips_.parameter = record.parameter;
}

void TrainScreen::tell_skips(std::optional<double> scale_now) {
  if (skips_.count == 0) return;
  const Skips skips = std::exchange(skips_, {});
  std::ostringstream text;
  if (skips.count == 1)
    text << step_name(skips.last_step) << " skipped: ";
  else
    text << skips.count << " steps skipped, " << skips.first_step << " to " << skips.last_step
         << "; the last: ";
  // StepReport::sentence() begins with the word that stands there already.
  constexpr std::string_view kSkipped = "skipped: ";
  text << std::string_view(skips.why).substr(skips.why.starts_with(kSkipped) ? kSkipped.size() : 0);
  if (!skips.parameter.empty() && skips.why.find(skips.parameter) == std::string::npos)
    text << " (" << skips.parameter << ")";
  if (scale_now && skips.scale)
    text << "; the loss scale " << (*scale_now == *skips.scale ? "stays " : "is now ")
         << loss_scale_text(*scale_now);
  line(text.str(), kYellow);
}

void TrainScreen::evaluation(const EvaluationRecord& record) {
  seconds_ = record.seconds;
  if (as_json()) return write(to_json(record));
  pace_.pause();
  std::ostringstream text;
  text << step_name(record.step) << ": held-out loss " << loss_text(record.loss);
  if (evaluation_loss_) {
    const double change = record.loss - *evaluation_loss_;
    text << " (" << (change >= 0 ? "+" : "") << loss_text(change) << ")";
  }
  if (record.accuracy)
    text << ", " << std::fixed << std::setprecision(2) << 100 * *record.accuracy << "% right";
  text << ", " << si_text(static_cast<double>(record.items)) << " " << plan_.unit << " in "
       << fine_duration_text(record.duration_seconds);
  evaluation_loss_ = record.loss;
  line(text.str(), kBold);
}

void TrainScreen::sample(const SampleRecord& record) {
  seconds_ = record.seconds;
  if (as_json()) return write(to_json(record));
  pace_.pause();
  line(step_name(record.step) + ": the model writes", kBold);
  std::istringstream lines(record.prompt + record.text);
  size_t count = 0;
  for (std::string text; std::getline(lines, text); ++count) {
    if (count == kSampleLines) return line("    ...");
    line("    " + text);
  }
}

void TrainScreen::note(int64_t step, std::string_view text) {
  if (as_json()) return write(note_to_json(step, seconds_, text));
  pace_.pause();
  line(step_name(step) + ": " + std::string(text));
}

void TrainScreen::end(const RunEnd& end) {
  if (as_json()) return write(to_json(end, seconds_));
  tell_skips(std::nullopt);
  pace_ = StepPace();  // it is over: no time is left
  if (drawn_ || (latest_ && shown_step_ != latest_->step)) show_latest();
  if (std::exchange(drawn_, false)) write("\n");
  const bool was_done = end.outcome == RunOutcome::Done && !latest_ && plan_.steps_done >= plan_.steps;
  std::string text = was_done ? "this run is already done: all " + with_commas(plan_.steps) +
                                    " steps were taken. Continue it with a higher train.steps, or start "
                                    "another run in another folder"
                              : std::string(to_string(end.outcome)) + " after step " + with_commas(end.step) +
                                    ", " + fine_duration_text(seconds_);
  if (!was_done && !end.why.empty()) text += ": " + end.why;
  line(text, colour_of(end.outcome));
  if (end.outcome != RunOutcome::Done) return;
  const std::filesystem::path model = std::filesystem::path(plan_.folder) / "model";
  std::error_code unknown;
  if (std::filesystem::is_directory(model, unknown)) line("the model is in " + model.string());
  line("a page about the run: halfstep report " + plan_.folder);
}

// Past the stream, which the run's own thread may hold.
void TrainScreen::stuck(std::string_view doing, double seconds) {
  const std::string text =
      "\nhalfstep: no progress for " + duration_text(seconds) + ", while " + std::string(doing) + "\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace halfstep::cli
