// `halfstep rehearse`: a run under several precisions, before anybody pays for one of them.
#include <halfstep/autocast.h>
#include <halfstep/printable.h>
#include <halfstep/trainer.h>

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/forecast_subject.h"
#include "cli/number_checks.h"
#include "cli/step_pace.h"
#include "cli/stop_signals.h"
#include "cli/terminal_text.h"
#include "cli/train_screen.h"
#include "forecast/choice.h"
#include "io/file_error.h"
#include "io/folder_lock.h"
#include "report/rehearsal.h"
#include "report/shadow.h"
#include "words/numbers.h"

namespace halfstep::cli {
namespace {

using nlohmann::ordered_json;
using Path = std::filesystem::path;

constexpr const char* kBaseline = "fp32";

struct RehearseRequest {
  ConfigRequest config;
  std::vector<std::string> recipes{"fp32", "bf16", "fp16", "fp8-delayed", "fp8-current", "mxfp8", "nvfp4"};
  int64_t steps = 100, seeds = 1;
  double bound_percent = 0.5;
  std::string device, folder, output;
  bool json = false, fast = false;
};

/// One recipe with one seed: a run in a folder of its own.
struct PlannedRun {
  std::string recipe;
  int64_t seed_index = 0;
  Path folder{};
  ResolvedConfig resolved{};
};

std::string name_of(const RehearseRequest& request) {
  if (!request.config.preset.empty()) return request.config.preset;
  const Path file(request.config.file);
  return file.empty()          ? "run"
         : file.has_filename() ? file.stem().string()
                               : file.parent_path().filename().string();
}

/// The same command finds its folder again; one with more steps has another, because its rates differ.
Path folder_of(const RehearseRequest& request) {
  if (!request.folder.empty()) return request.folder;
  return Path("runs") / ((request.fast ? "shadow-" : "rehearse-") + name_of(request) + "-" +
                         std::to_string(request.steps) + "-steps");
}

/// The baseline first, none twice.
std::vector<std::string> recipes_of(const RehearseRequest& request) {
  std::vector<std::string> recipes{kBaseline};
  for (const std::string& recipe : request.recipes)
    if (std::ranges::find(recipes, recipe) == recipes.end()) recipes.push_back(recipe);
  if (recipes.size() > kMostRehearsedRecipes)
    throw ExitWith(kUsage,
                   detail::concat("--recipes names ", recipes.size(), " with fp32, and one page shows ",
                                  kMostRehearsedRecipes, ". Rehearse fewer at a time."));
  return recipes;
}

bool is_full(const std::string& recipe) { return recipe == "fp32" || recipe == "tf32"; }
bool is_scaled_by_recipe(const std::string& recipe) {
  return !is_full(recipe) && recipe != "bf16" && recipe != "fp16";
}

/// What the configuration says of a precision stays where it has a meaning for this one.
RunConfig::Precision precision_of(RunConfig::Precision precision, const std::string& recipe) {
  precision.compute = recipe;
  if (!is_scaled_by_recipe(recipe)) precision.keep_high.clear();
  if (recipe != "fp16") precision.loss_scale = {};
  if (is_full(recipe)) precision.ops.clear();
  if (is_full(recipe) || (recipe == "fp16" && precision.weights == "split_master")) precision.weights.reset();
  return precision;
}

bool holds_out(const RunConfig& config) {
  return config.data.images || !config.data.validation.empty() || config.data.validation_fraction;
}

RunConfig config_of(RunConfig config, const RehearseRequest& request, const PlannedRun& run) {
  const int64_t steps = request.steps;
  config.precision = precision_of(config.precision, run.recipe);
  config.data.seed += run.seed_index;
  config.train.seed += run.seed_index;
  config.train.steps = steps;
  // The whole schedule, in fewer steps.
  config.optimizer.warmup_steps = std::min(config.optimizer.warmup_steps, steps / 2);
  if (config.optimizer.decay_steps)
    config.optimizer.decay_steps =
        std::min(*config.optimizer.decay_steps, steps - config.optimizer.warmup_steps);
  const int64_t every = config.train.evaluate_every;
  config.train.evaluate_every = !holds_out(config) ? 0 : every > 0 ? std::min(every, steps) : steps;
  // Every recipe takes all the same steps, or ends by diverging, and each of them is compared.
  config.train.on_divergence = "stop";
  config.train.patience.reset();
  config.train.time_limit_minutes.reset();
  config.train.sample_every = 0;
  config.checkpoint = {
      .every = config.checkpoint.every, .every_minutes = config.checkpoint.every_minutes, .keep_last = 1};
  config.log.every = 1;
  config.log.trace_steps = 0;
  config.watch.prometheus.reset();  // the file is the run's own
  config.run.folder = run.folder.string();
  return config;
}

std::vector<PlannedRun> planned_runs(const RehearseRequest& request, const ResolvedConfig& base) {
  std::vector<PlannedRun> runs;
  for (int64_t seed = 0; seed < request.seeds; ++seed)
    for (const std::string& recipe : recipes_of(request)) {
      PlannedRun run{.recipe = recipe, .seed_index = seed};
      run.folder = folder_of(request) / (recipe + "-seed-" + std::to_string(seed));
      ResolvedConfig changed = base;
      changed.config = config_of(base.config, request, run);
      try {
        // Once more through all checks: a word that fits the run may not fit this recipe.
        run.resolved =
            resolve_config({.file = ConfigText{"rehearsal of " + recipe, to_toml(changed, false)}});
      } catch (const Error& error) {
        throw ExitWith(kUsage, error.what());
      }
      runs.push_back(std::move(run));
    }
  return runs;
}

/// The one run of shadow mode, in FP32.
PlannedRun shadow_run(const RehearseRequest& request, const ResolvedConfig& base) {
  PlannedRun run{.recipe = kBaseline, .folder = folder_of(request) / "fp32"};
  ResolvedConfig changed = base;
  changed.config = config_of(base.config, request, run);
  changed.config.watch.every = 0;                 // the shadow looks
  changed.config.train.recompute_blocks = false;  // and does not see what backward repeats
  run.resolved = resolve_config({.file = ConfigText{"rehearsal", to_toml(changed, false)}});
  return run;
}

[[noreturn]] void refuse_folder(const Path& folder, const std::string& because) {
  throw ExitWith(kUsage, folder.string() + " has a rehearsal " + because +
                             ". Give another --folder, or remove that one.");
}

/// What was written there, in that folder of runs, against what is asked now.
void check_same_configuration(const Path& folder, const Path& written, RunConfig asked,
                              bool compares_keep_high = true) {
  RunConfig before = about_files([&] { return resolve_config({.file = read_config_file(written)}).config; });
  before.run.folder = asked.run.folder;  // it may have been moved
  if (!compares_keep_high)
    for (RunConfig* const one : {&before, &asked}) one->precision.keep_high.clear();
  std::string changes;
  for (const std::string& change : config_changes(before, asked))
    changes += (changes.empty() ? "" : "; ") + change;
  if (!changes.empty()) refuse_folder(folder, "with other settings: " + changes);
}

/// Losses of another configuration are no match for those that are there.
void check_same_settings(const PlannedRun& run) {
  const Path written = run.folder / "config.toml";
  std::error_code unknown;
  if (std::filesystem::exists(written, unknown))
    check_same_configuration(run.folder, written, run.resolved.config);
}

/// Before hours of training: whether the page could be written where it is asked for.
void check_page(const Path& page) {
  std::error_code unknown;
  if (std::filesystem::is_directory(page, unknown))
    throw ExitWith(kFiles, page.string() + " is a folder. Give --output the name of a file.");
  const Path folder = page.has_parent_path() ? page.parent_path() : Path(".");
  // A regular file is replaced, which takes a folder that can be written; /dev/stdout is written itself.
  const bool is_written_itself =
      std::filesystem::exists(page, unknown) && !std::filesystem::is_regular_file(page, unknown);
  const Path& written = is_written_itself ? page : folder;
  if (::access(written.c_str(), W_OK) != 0)
    about_files([&] { files::throw_file_error("write the page", written); });
}

/// Two at a time in one folder would take each other's runs for recipes that cannot train.
files::FolderLock claimed(const Path& folder) {
  return about_files([&] {
    std::error_code failed;
    std::filesystem::create_directories(folder, failed);
    if (failed) throw FileError(folder.string() + ": cannot be made: " + failed.message(), failed.value());
    return files::FolderLock(folder);
  });
}

/// Its history, if nothing is left to do.
std::optional<RunHistory> finished(const PlannedRun& run) {
  std::error_code unknown;
  if (!std::filesystem::exists(run.folder / "log.jsonl", unknown)) return {};
  RunHistory history = read_run(run.folder);
  if (history.steps.empty() || !history.end()) return {};
  const std::string& outcome = history.end()->outcome;
  return outcome == "done" || outcome == "diverged" ? std::optional(std::move(history)) : std::nullopt;
}

/// All that a rehearsal needs of a finished run is its log: the weights of seven recipes fill a disk.
void remove_weights(const PlannedRun& run) {
  std::error_code ignored;
  for (const char* const name : {"checkpoints", "model"})
    std::filesystem::remove_all(run.folder / name, ignored);
}

/// Text is encoded once for all runs: each finds it by its hash.
void hand_on_tokens(const Path& from, const Path& to) {
  std::error_code ignored;
  if (!from.empty()) std::filesystem::rename(from / "tokens", to / "tokens", ignored);
}

/// Shows which recipe is under way, its step and loss, and when all will be done.
class RehearsalScreen final : public RunWatcher {
 public:
  RehearsalScreen(size_t runs, bool names_seeds)
      : options_(screen_options(STDERR_FILENO, /*json=*/false)), runs_(runs), names_seeds_(names_seeds) {}

  void next(const PlannedRun& run, size_t index) {
    name_ = run.recipe + (names_seeds_ ? ", seed " + std::to_string(run.seed_index) : "");
    index_ = index;
  }

  void begin(const RunPlan& plan) override {
    plan_ = plan;
    pace_ = StepPace(plan.steps, plan.steps_done);
    begun_seconds_ = shown_seconds_ = seconds_ = -1;
    if (index_ == 0)
      line(plan.model + ", " + si_text(static_cast<double>(plan.parameters)) + " parameters; " +
           with_commas(plan.steps) + " steps of " + with_commas(plan.items_per_step) + " " + plan.unit);
  }
  void step(const StepRecord& record) override {
    seconds_ = record.seconds;
    if (begun_seconds_ < 0) begun_seconds_ = record.seconds;
    pace_.step(record.step, record.seconds);
    const double pause = on_terminal() ? 0.1 : 10;
    if (shown_seconds_ >= 0 && record.seconds - shown_seconds_ < pause) return;
    shown_seconds_ = record.seconds;
    std::string text = "step " + std::to_string(record.step) + "/" + std::to_string(plan_.steps) + "  loss " +
                       loss_text(record.loss);
    if (const auto left = pace_.seconds_left()) text += "  left " + duration_text(*left) + all_left(*left);
    show(text);
  }
  void evaluation(const EvaluationRecord& record) override {
    pace_.pause();
    held_out_ = record.loss;
  }
  void sample(const SampleRecord&) override {}
  void note(int64_t step, std::string_view text) override {
    pace_.pause();
    // A checkpoint goes when its run is done. What the disk refuses, or a step has found, is worth a line.
    const bool is_saved = text.starts_with("checkpoint of step ") && text.find(" is saved") != text.npos;
    if (!is_saved) line("step " + with_commas(step) + ": " + std::string(text));
  }
  void end(const RunEnd& end) override {
    const double took = std::max(0.0, seconds_ - std::max(0.0, begun_seconds_));
    if (end.outcome == RunOutcome::Done || end.outcome == RunOutcome::Diverged) {
      ++done_here_;
      seconds_of_done_ += took;
    }
    line(std::string(to_string(end.outcome)) + " after step " + with_commas(end.step) +
         (held_out_ ? ", held-out loss " + loss_text(*held_out_) : "") + ", " + duration_text(seconds_) +
         (end.outcome == RunOutcome::Diverged ? ": " + end.why : ""));
    held_out_.reset();
  }
  /// A line that stays.
  void line(const std::string& text) {
    const std::string all = printable(head() + text, Unprintable::Replaced);
    if (drawn_) std::cerr << "\r\033[K";
    drawn_ = false;
    if (!on_terminal()) {
      std::cerr << all << std::endl;
      return;
    }
    for (const std::string& each : wrapped(all, std::max<size_t>(options_.columns(), 2) - 1, /*indent=*/4))
      std::cerr << each << "\n";
    std::cerr << std::flush;
  }

 private:
  bool on_terminal() const { return options_.mode == ScreenMode::Terminal; }
  std::string head() const {
    return "[" + std::to_string(index_ + 1) + "/" + std::to_string(runs_) + "] " + name_ + ": ";
  }
  /// Runs that are still to come are taken to last as long as those that were done here, or as this one.
  std::string all_left(double left) const {
    const size_t to_come = runs_ - std::min(runs_, index_ + 1);
    if (to_come == 0) return "";
    const double each = done_here_ > 0 ? seconds_of_done_ / static_cast<double>(done_here_)
                                       : seconds_ - std::max(0.0, begun_seconds_) + left;
    return ", about " + duration_text(left + static_cast<double>(to_come) * each) + " for all";
  }
  void show(const std::string& text) {
    if (!on_terminal()) return line(text);
    const size_t columns = std::max<size_t>(options_.columns(), 2) - 1;
    std::cerr << "\r" << (head() + text).substr(0, columns) << "\033[K" << std::flush;
    drawn_ = true;
  }

  ScreenOptions options_;
  size_t runs_, index_ = 0, done_here_ = 0;
  bool names_seeds_, drawn_ = false;
  std::string name_{};
  RunPlan plan_{};
  StepPace pace_{};
  std::optional<double> held_out_{};
  double seconds_ = -1, begun_seconds_ = -1, shown_seconds_ = -1, seconds_of_done_ = 0;
};

/// Whether this machine imitates the precision: a CPU has no products of eight or four bits.
bool is_emulated(const std::string& recipe, const std::string& device) {
  if (device != "cpu" || recipe == "fp32") return false;
  if (recipe == "bf16" || recipe == "fp16")
    return precision_support(recipe == "bf16" ? at::kBFloat16 : at::kHalf).support != Support::Native;
  return true;
}

/// Before anything is trained: a device that nobody knows should not cost hours.
void add_forecast_to(RehearsedRecipe& recipe, const RunConfig& config, const forecast::Device& device,
                     const std::string& name) {
  const forecast::ModelShape shape = shape_of_run(config, name);
  const forecast::Arrangement arrangement{.sequence_length = config.data.sequence_length,
                                          .micro_batch = config.data.batch_size,
                                          .accumulation = config.train.accumulation,
                                          .recomputes_blocks = config.train.recompute_blocks};
  const RunConfig::Precision precision = precision_of(config.precision, recipe.name);
  try {
    const auto outcome = forecast::outcome_of(
        shape, forecast::precision_plan(recipe.name, precision.weights, precision.moments), arrangement,
        device);
    recipe.forecast_bytes = outcome.memory.bytes();
    if (outcome.fits)
      recipe.forecast_seconds = outcome.time.total();
    else
      recipe.why_no_forecast = "its " + bytes_text(outcome.memory.bytes()) + " do not fit into the " +
                               bytes_text(device.usable_bytes()) + " that " + device.name +
                               " has for tensors";
  } catch (const Error& error) {
    recipe.why_no_forecast = error.what();
  }
}

Rehearsal rehearsal_of(const RehearseRequest& request, const RunConfig& base) {
  Rehearsal rehearsal{.name = name_of(request), .steps = request.steps, .bound = request.bound_percent / 100};
  std::optional<forecast::Device> device;
  if (!request.device.empty()) {
    try {
      device = device_given(request.device);
    } catch (const Error& error) {
      throw ExitWith(kUsage, error.what());
    }
    rehearsal.device = device->name;
  }
  for (const std::string& name : recipes_of(request)) {
    RehearsedRecipe recipe{.name = name, .emulated = is_emulated(name, base.run.device)};
    if (device) add_forecast_to(recipe, base, *device, rehearsal.name);
    rehearsal.recipes.push_back(std::move(recipe));
  }
  return rehearsal;
}

/// One run, or what is left of it. Nothing if the recipe cannot train this model; then `why` says so.
std::optional<RunHistory> rehearsed(const PlannedRun& run, RehearsalScreen& screen,
                                    const StopSignals& signals, std::string& why,
                                    const TrainerOptions& options = {}) {
  try {
    Trainer trainer(run.resolved, run.folder, options);
    const RunEnd end = trainer.run(screen, signals.requested());
    if (end.outcome == RunOutcome::Interrupted) {
      std::cerr << "The same command resumes from here.\n";
      throw ExitWith(kSignalled + signals.signal(), "");
    }
  } catch (const FileError&) {
    throw;
  } catch (const Bug&) {
    throw;
  } catch (const Error& error) {
    // What is wrong with the data or the model has ended the baseline, which comes first.
    if (run.recipe == kBaseline) throw ExitWith(kFiles, error.what());
    why = error.what();
    return {};
  }
  return read_run(run.folder);
}

void carry_out(const std::vector<PlannedRun>& runs, Rehearsal& rehearsal, bool names_seeds) {
  const StopSignals signals;
  RehearsalScreen screen(runs.size(), names_seeds);
  Path tokens_in;
  std::vector<Path> trained;  // here; what is in the folders of finished runs is not ours to remove
  for (size_t i = 0; i < runs.size(); ++i) {
    const PlannedRun& run = runs[i];
    RehearsedRecipe& recipe = *std::ranges::find(rehearsal.recipes, run.recipe, &RehearsedRecipe::name);
    if (!recipe.why_not_run.empty()) continue;
    screen.next(run, i);
    std::optional<RunHistory> history = finished(run);
    if (history) {
      screen.line("was already done");
    } else {
      (void)claimed(run.folder);  // a process that has it is no fault of the recipe
      hand_on_tokens(tokens_in, run.folder);
      history = rehearsed(run, screen, signals, recipe.why_not_run);
      if (history) remove_weights(run);
      tokens_in = run.folder;
      trained.push_back(run.folder);
    }
    if (!history) {
      screen.line("cannot run: " + recipe.why_not_run);
      recipe.runs.clear();
      continue;
    }
    recipe.runs.push_back(std::move(*history));
    if (signals.requested()) throw ExitWith(kSignalled + signals.signal(), "");
  }
  std::error_code ignored;
  for (const Path& folder : trained) std::filesystem::remove_all(folder / "tokens", ignored);
}

// What it answers.

template <typename Value>
ordered_json or_null(const std::optional<Value>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

ordered_json json_of(const std::optional<PairedDifference>& difference) {
  if (!difference) return nullptr;
  return {{"mean", difference->mean}, {"half_width", or_null(difference->half_width)}};
}

void print_json(const Rehearsal& rehearsal, const RehearsalJudgement& judgement, const std::string& page) {
  ordered_json rows = ordered_json::array();
  for (size_t i = 0; i < judgement.rows.size(); ++i) {
    const RecipeRow& row = judgement.rows[i];
    const RehearsedRecipe& recipe = rehearsal.recipes[i];
    rows.push_back({{"recipe", row.name},
                    {"verdict", to_string(row.verdict)},
                    {"why", row.why},
                    {"held_out_loss", or_null(row.held_out_loss)},
                    {"held_out_difference", json_of(row.held_out)},
                    {"training_loss", or_null(row.training_loss)},
                    {"training_difference", json_of(row.training)},
                    {"peak_bytes", row.peak_bytes},
                    {"activation_bytes", row.activation_bytes},
                    {"skipped", row.skipped},
                    {"emulated", recipe.emulated},
                    {"seconds_per_step", or_null(row.seconds_per_step)},
                    {"forecast_seconds", or_null(recipe.forecast_seconds)},
                    {"forecast_bytes", or_null(recipe.forecast_bytes)},
                    {"why_no_forecast", recipe.why_no_forecast}});
  }
  print_answer(
      {{"recommendation", judgement.recommendation},
       {"recommended", judgement.recommended ? ordered_json(judgement.rows[*judgement.recommended].name)
                                             : ordered_json(nullptr)},
       {"steps", rehearsal.steps},
       {"seeds", rehearsal.recipes.front().runs.size()},
       {"first_step", judgement.first_step},
       {"judged_by", judgement.by_held_out ? "held_out" : "training"},
       {"bound", rehearsal.bound},
       {"device", rehearsal.device.empty() ? ordered_json(nullptr) : ordered_json(rehearsal.device)},
       {"recipes", rows},
       {"page", page.empty() ? ordered_json(nullptr) : ordered_json(page)}});
}

void print_table(const Rehearsal& rehearsal, const RehearsalJudgement& judgement) {
  std::vector<std::vector<std::string>> rows = {
      {"recipe", "verdict", judgement.by_held_out ? "held out" : "loss", "difference, 95%", "peak",
       rehearsal.device.empty() ? "step here" : "step on " + rehearsal.device}};
  for (size_t i = 0; i < judgement.rows.size(); ++i) {
    const RecipeRow& row = judgement.rows[i];
    const auto& loss = judgement.by_held_out ? row.held_out_loss : row.training_loss;
    const auto& difference = judgement.by_held_out ? row.held_out : row.training;
    const auto& seconds =
        rehearsal.device.empty() ? row.seconds_per_step : rehearsal.recipes[i].forecast_seconds;
    // ASCII, so that bytes are columns.
    std::string interval = "-";
    if (difference) {
      char text[64];
      std::snprintf(text, sizeof text, difference->half_width ? "%+.3f +- %.3f%%" : "%+.3f%%",
                    100 * difference->mean, 100 * difference->half_width.value_or(0));
      interval = text;
    }
    rows.push_back({row.name, std::string(to_string(row.verdict)), loss ? loss_text(*loss) : "-", interval,
                    row.peak_bytes > 0 ? bytes_text(static_cast<double>(row.peak_bytes)) : "-",
                    seconds                                                     ? fine_duration_text(*seconds)
                    : rehearsal.device.empty() && rehearsal.recipes[i].emulated ? "emulated"
                                                                                : "-"});
  }
  std::vector<size_t> widths(rows.front().size(), 0);
  for (const auto& row : rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i)
      std::cout << (i == 0 ? "" : "  ") << (i < 2 ? std::left : std::right)
                << std::setw(static_cast<int>(widths[i])) << row[i];
    std::cout << "\n";
  }
}

void print_answer_for_people(const Rehearsal& rehearsal, const RehearsalJudgement& judgement,
                             const std::string& page) {
  print_paragraph(printable(judgement.recommendation, Unprintable::Replaced));
  std::cout << "\n";
  print_table(rehearsal, judgement);
  std::cout << "\n";
  for (size_t i = 1; i < judgement.rows.size(); ++i) {
    const RecipeRow& row = judgement.rows[i];
    const std::string& no_forecast = rehearsal.recipes[i].why_no_forecast;
    if (row.verdict != RecipeVerdict::Holds)
      print_paragraph(printable(row.name + ": " + row.why + ".", Unprintable::Replaced));
    if (!no_forecast.empty())
      print_paragraph(printable(row.name + ", no forecast: " + no_forecast, Unprintable::Replaced));
  }
  print_paragraph(judgement.meaning);
  if (std::ranges::any_of(rehearsal.recipes, &RehearsedRecipe::emulated))
    print_paragraph(
        "This machine emulates some of them: losses are right, times are not those of a device that "
        "has them" +
        std::string(rehearsal.device.empty() ? "; --device h100 forecasts those." : "."));
  if (!page.empty()) std::cout << "\n" << printable(page, Unprintable::Escaped) << "\n";
}

constexpr const char* kPageAgain = " The same command writes the page again, and repeats no run.";

/// Why the page could not be written, if it could not: the answer is worth more than its page.
std::string refused_page(const Path& page, const std::string& html) {
  try {
    write_page(page, html);
    return "";
  } catch (const FileError& error) {
    return error.what();
  }
}

// Shadow mode

constexpr int64_t kShadowLooks = 10;

/// Those of --recipes that differ from the run's FP32.
std::vector<std::string> shadowed_of(const RehearseRequest& request) {
  std::vector<std::string> names;
  for (const std::string& name : recipes_of(request)) {
    if (name == "tf32")
      throw ExitWith(kUsage, "tf32 has no shadow: a CPU has no products of its own for it. Leave it out.");
    if (name != kBaseline) names.push_back(name);
  }
  if (names.empty()) throw ExitWith(kUsage, "--fast compares fp32 with others, and --recipes names none.");
  return names;
}

Path configuration_file(const RehearseRequest& request, const std::string& precision) {
  return folder_of(request) / (precision + ".toml");
}

constexpr std::string_view kWrittenHere =
    "# Written by `halfstep rehearse --fast`, which replaces it when run again: copy it before you edit it.";

bool was_written_here(const Path& file) {
  std::ifstream in(file);
  std::string first_line;
  return std::getline(in, first_line) && first_line == kWrittenHere;
}

void check_replaceable(const Path& file) {
  std::error_code unknown;
  if (std::filesystem::exists(file, unknown) && !was_written_here(file))
    throw ExitWith(kUsage, file.string() +
                               " would be replaced, and this command did not write it. Give another "
                               "--folder, or move that file.");
}

/// The run that was asked about, in this precision and with what is suggested.
void write_configuration(const RehearseRequest& request, const ResolvedConfig& base, const std::string& name,
                         const std::vector<std::string>& keep_high = {}) {
  ResolvedConfig suggested = base;
  suggested.config.precision = precision_of(base.config.precision, name);
  for (const std::string& layer : keep_high)
    if (auto& kept = suggested.config.precision.keep_high; std::ranges::find(kept, layer) == kept.end())
      kept.push_back(layer);
  write_page(configuration_file(request, name),
             std::string(kWrittenHere) + "\n\n" + to_toml(suggested, /*with_origins=*/false));
}

bool is_precision(const std::string& name) {
  const auto key = std::ranges::find(config_keys(), "precision.compute", &ConfigKey::path);
  return std::ranges::find(key->words, name) != key->words.end();
}

/// A run that has begun has all of them, of the same settings: what is looked at in one run goes together.
void check_same_recipes(const RehearseRequest& request, const ResolvedConfig& base, const PlannedRun& run,
                        const std::vector<std::string>& names) {
  std::vector<std::string> before;
  std::error_code unknown;
  if (!std::filesystem::exists(run.folder / "log.jsonl", unknown)) return;
  for (const auto& entry : std::filesystem::directory_iterator(folder_of(request), unknown))
    if (entry.path().extension() == ".toml" && is_precision(entry.path().stem()) &&
        was_written_here(entry.path()))
      before.push_back(entry.path().stem().string());
  if (before.empty()) return;
  for (const std::string& name : names)
    if (std::ranges::find(before, name) == before.end()) refuse_folder(folder_of(request), "without " + name);
  for (const std::string& name : before)
    if (std::ranges::find(names, name) == names.end())
      refuse_folder(folder_of(request), "of " + name + ", too");
  for (const std::string& name : names) {
    RunConfig asked = base.config;
    asked.precision = precision_of(base.config.precision, name);
    check_same_configuration(folder_of(request), configuration_file(request, name), asked,
                             /*compares_keep_high=*/false);  // some of it was suggested
  }
}

void print_shadow_json(const ShadowFindings& findings, const std::vector<std::string>& files,
                       const std::string& page) {
  ordered_json layers = ordered_json::array(), rules = ordered_json::array();
  for (const ShadowLayer& layer : findings.layers) {
    ordered_json cells;
    for (size_t i = 0; i < findings.precisions.size(); ++i)
      if (const auto& cell = layer.cells[i])
        cells[findings.precisions[i]] = {{"output_error", cell->output_error},
                                         {"input_grad_error", cell->input_grad_error},
                                         {"weight_grad_error", cell->weight_grad_error},
                                         {"effect", cell->effect},
                                         {"keep_high", cell->keep_high},
                                         {"why", cell->why}};
    layers.push_back({{"layer", layer.name}, {"precisions", cells}});
  }
  for (size_t i = 0; i < findings.precisions.size(); ++i)
    rules.push_back(
        {{"precision", findings.precisions[i]},
         {"keep_high", findings.keep_high(i)},
         {"unsuited", findings.unsuited[i].empty() ? ordered_json() : ordered_json(findings.unsuited[i])},
         {"configuration", files[i]}});
  print_answer({{"steps", findings.steps},
                {"looks", findings.looks},
                {"layers", layers},
                {"rules", rules},
                {"page", page.empty() ? ordered_json() : ordered_json(page)}});
}

void print_shadow(const ShadowFindings& findings, const std::vector<std::string>& files,
                  const std::string& page) {
  constexpr size_t kColumns = 80;
  size_t taken = 0;
  for (const std::string& name : findings.precisions) taken += 2 + std::max<size_t>(name.size(), 7);
  const size_t most = std::max<size_t>(12, kColumns - std::min(kColumns, taken));
  std::vector<std::string> names;
  size_t width = 5;
  for (const ShadowLayer& layer : findings.layers) {
    std::string text = printable(layer.name, Unprintable::Replaced);
    if (text.ends_with(".weight")) text.erase(text.size() - 7);
    if (text.size() > most) text = "..." + text.substr(text.size() - most + 3);
    width = std::max(width, text.size());
    names.push_back(std::move(text));
  }
  std::cout << std::left << std::setw(static_cast<int>(width)) << "layer";
  for (const std::string& name : findings.precisions)
    std::cout << "  " << std::right << std::setw(static_cast<int>(std::max<size_t>(name.size(), 7))) << name;
  std::cout << "\n";
  for (size_t row = 0; row < names.size(); ++row) {
    std::cout << std::left << std::setw(static_cast<int>(width)) << names[row];
    for (size_t i = 0; i < findings.precisions.size(); ++i) {
      const auto& cell = findings.layers[row].cells[i];
      const std::string text =
          !cell ? "-"
                : (std::isfinite(cell->worst_error()) ? percent(cell->worst_error()) : "inf") +
                      (cell->keep_high ? "*" : " ");
      std::cout << "  " << std::right
                << std::setw(static_cast<int>(std::max<size_t>(findings.precisions[i].size(), 7))) << text;
    }
    std::cout << "\n";
  }
  std::cout << "\n";
  print_paragraph(
      "The largest of each layer's errors (output, input gradient, weight gradient), layers with the most "
      "effect first, from " +
      std::to_string(findings.looks) + " of " + std::to_string(findings.steps) +
      " steps of one FP32 run. *: suggested for precision.keep_high. -: kept high without that.");
  for (size_t i = 0; i < findings.precisions.size(); ++i)
    if (!findings.unsuited[i].empty())
      print_paragraph(findings.precisions[i] + " does not suit this model: " + findings.unsuited[i] + ".");
  std::cout << "\n";
  for (const std::string& file : files) std::cout << printable(file, Unprintable::Escaped) << "\n";
  if (!page.empty()) std::cout << printable(page, Unprintable::Escaped) << "\n";
}

void run_shadow(const RehearseRequest& request, const ResolvedConfig& base) {
  if (base.config.run.device != "cpu")
    throw ExitWith(kUsage, "--fast computes on the CPU, and run.device is " + base.config.run.device +
                               ". Add --set run.device=cpu.");
  if (request.seeds > 1 || !request.device.empty())
    throw ExitWith(kUsage, "--fast is one run and forecasts nothing: leave --seeds and --device out.");
  const std::vector<std::string> names = shadowed_of(request);
  const PlannedRun run = shadow_run(request, base);
  check_same_settings(run);
  for (const std::string& name : names) check_replaceable(configuration_file(request, name));
  check_same_recipes(request, base, run, names);
  const std::string page =
      request.output.empty() ? (folder_of(request) / "rehearsal.html").string() : request.output;
  keep_answer_out_of(page);
  if (!request.output.empty()) check_page(page);
  const files::FolderLock claim = claimed(folder_of(request));
  const StopSignals signals;
  RehearsalScreen screen(1, /*names_seeds=*/false);
  screen.next(run, 0);
  std::optional<RunHistory> history = finished(run);
  if (history) {
    screen.line("was already done");
  } else {
    TrainerShadow shadow{.every = (request.steps + kShadowLooks - 1) / kShadowLooks};
    for (const std::string& name : names) {
      shadow.precisions.push_back(precision_of(base.config.precision, name));
      about_files([&] { write_configuration(request, base, name); });
    }
    std::string why;
    history = rehearsed(run, screen, signals, why, {.shadow = std::move(shadow)});
    remove_weights(run);
  }
  const ShadowFindings findings = shadow_findings(*history);
  if (findings.precisions.empty())
    throw ExitWith(kDiverged,
                   "FP32's own products were not finite in any sampled step: there is nothing "
                   "to compare. `halfstep doctor " +
                       run.folder.string() + "` says what went wrong.");
  std::vector<std::string> files;
  std::string refused;
  for (size_t i = 0; i < findings.precisions.size(); ++i) {
    const std::string& name = findings.precisions[i];
    files.push_back(configuration_file(request, name).string());
    try {
      write_configuration(request, base, name, findings.keep_high(i));
    } catch (const FileError& error) {
      refused = error.what();
    }
  }
  const std::string no_page = refused_page(page, shadow_html(name_of(request), *history, findings, files));
  const std::string written = no_page.empty() ? page : "";
  request.json ? print_shadow_json(findings, files, written) : print_shadow(findings, files, written);
  if (refused.empty()) refused = no_page;
  if (!refused.empty()) throw ExitWith(kFiles, refused + kPageAgain);
  Rehearsal of_fp32{.name = name_of(request), .steps = request.steps};
  of_fp32.recipes.push_back({.name = kBaseline, .runs = {*std::move(history)}});
  if (judge(of_fp32).rows.front().verdict != RecipeVerdict::Baseline) throw ExitWith(kDiverged, "");
}

void run_rehearse(const RehearseRequest& request) {
  spin_briefly();
  const char* const ranks = std::getenv("WORLD_SIZE");
  if (ranks != nullptr && std::strcmp(ranks, "1") != 0)
    throw ExitWith(kUsage, "rehearse runs in one process. Leave 'halfstep launch' out.");
  const ResolvedConfig base = configuration(request.config);
  about_files([&] { check_paths(base); });
  if (request.fast) return run_shadow(request, base);
  Rehearsal rehearsal = rehearsal_of(request, base.config);
  const std::vector<PlannedRun> runs = planned_runs(request, base);
  for (const PlannedRun& run : runs) check_same_settings(run);
  const std::string page =
      request.output.empty() ? (folder_of(request) / "rehearsal.html").string() : request.output;
  keep_answer_out_of(page);
  if (!request.output.empty()) check_page(page);
  const files::FolderLock claim = claimed(folder_of(request));
  carry_out(runs, rehearsal, request.seeds > 1);
  const RehearsalJudgement judgement = judge(rehearsal);
  const std::string no_page = refused_page(page, rehearsal_html(rehearsal, judgement));
  const std::string written = no_page.empty() ? page : "";
  request.json ? print_json(rehearsal, judgement, written)
               : print_answer_for_people(rehearsal, judgement, written);
  if (!no_page.empty()) throw ExitWith(kFiles, no_page + kPageAgain);
  if (judgement.rows.front().verdict != RecipeVerdict::Baseline) throw ExitWith(kDiverged, "");
}

/// What is wrong with a name of --recipes; CLI11's own check would print all names in the help, in one line.
std::string recipe_fault(const std::string& name) {
  std::string known;
  for (const ConfigKey& key : config_keys())
    if (key.path == "precision.compute")
      for (const std::string_view word : key.words) {
        if (word == name) return "";
        known += (known.empty() ? "" : ", ") + std::string(word);
      }
  return name + " is not one of " + known;
}

}  // namespace

void add_rehearse(CLI::App& program) {
  CLI::App* const command = program.add_subcommand("rehearse", "Try precisions on a run, and pick one");
  auto request = std::make_shared<RehearseRequest>();
  add_config_options(*command, request->config);
  command->remove_option(command->get_option("--precision"));  // --recipes names all of them
  command
      ->add_option("--recipes", request->recipes,
                   std::string("Precisions, with commas; fp32 is the baseline"))
      ->delimiter(',')
      ->check(CLI::Validator(recipe_fault, /*validator_desc=*/""))
      ->type_name("NAMES");
  command->add_option("--steps", request->steps, std::string("Steps of each run [100]"))
      ->check(number_from(1, 1e9, "a number of steps, 1 to 1e9"))
      ->type_name("N");
  command->add_option("--seeds", request->seeds, std::string("Runs of each recipe, with different seeds [1]"))
      ->check(number_from(1, 64, "a number of seeds, 1 to 64"))
      ->type_name("K");
  command
      ->add_option("--bound", request->bound_percent,
                   std::string("What a recipe may cost, in % of the loss [0.5]"))
      ->check(number_from(1e-6, 1000, "a share in percent, above 0 and at most 1000"))
      ->type_name("PERCENT");
  command
      ->add_option("--device", request->device,
                   std::string("Forecast step times: a100, h100, ..., or a file"))
      ->type_name("NAME");
  command->add_option("--folder", request->folder, std::string("Of the runs [runs/rehearse-NAME-N-steps]"))
      ->type_name("DIR");
  command->add_option("-o,--output", request->output, std::string("The page [rehearsal.html in the folder]"))
      ->type_name("FILE");
  command->add_flag("--fast", request->fast, std::string("One FP32 run; compare others layer by layer"));
  command->add_flag("--json", request->json, std::string("The answer as JSON"));
  command->footer(
      "Ctrl-C saves; the same command resumes, and finished runs are not repeated.\n"
      "More seeds or recipes in the same folder add their runs. docs/rehearse.md says\n"
      "how recipes are judged. Exit code 4: fp32 itself diverged.");
  command->callback([request] { run_rehearse(*request); });
}

}  // namespace halfstep::cli
