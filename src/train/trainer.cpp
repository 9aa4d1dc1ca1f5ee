#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <halfstep/error.h>
#include <halfstep/findings.h>
#include <halfstep/memory.h>
#include <halfstep/ranks.h>
#include <halfstep/trainer.h>

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <utility>

#include "train/phase_clock.h"
#include "train/run_folder.h"
#include "train/tasks.h"
#include "train/trace.h"
#include "train/training.h"
#include "train/watches.h"

namespace halfstep {
namespace {

using train::PhaseClock;
using train::RunFolder;
using train::Training;

bool due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

std::string precision_text(const RunConfig& config, const MixedPrecision& mixed, bool on_cpu) {
  const Precision& precision = mixed.precision();
  std::string layers;
  if (precision.recipe) {
    const auto quantised = std::count_if(mixed.layers().begin(), mixed.layers().end(),
                                         [](const LayerPlan& layer) { return layer.quantised; });
    layers = detail::concat(" for ", quantised, " of ", mixed.layers().size(), " weights");
  }
  const bool emulated = on_cpu && mixed.support().support != Support::Native;
  return detail::concat(precision.name(), layers, emulated ? " (emulated by this CPU)" : "", ", weights ",
                        to_string(precision.weights), ", moments ", config.precision.moments);
}

RunPlan plan_of(const RunConfig& config, Training& training, const std::filesystem::path& folder) {
  return {.model = training.task().model_text(),
          .parameters = training.parameters(),
          .precision = precision_text(config, training.precision(), config.run.device == "cpu"),
          .data = training.task().data_text(),
          .folder = folder.string(),
          .unit = training.task().unit(),
          .steps = config.train.steps,
          .items_per_step = training.task().items_per_batch() * config.train.accumulation,
          .threads = at::get_num_threads(),
          .ranks = training.ranks().size()};
}

/// Of what ranks say, the first that is something, with the rank.
std::string first_fault(const std::vector<std::string>& texts) {
  for (size_t rank = 0; rank < texts.size(); ++rank)
    if (!texts[rank].empty()) return detail::concat("Rank ", rank, ": ", texts[rank]);
  return "";
}

}  // namespace

struct Trainer::Impl {
  ResolvedConfig resolved;
  std::filesystem::path folder;
  PhaseClock since_start;
  TrainerOptions options;
  Ranks ranks;
  std::optional<train::FolderClaim> claim;  // of rank 0: before text is encoded into the folder
  Training training;
  RunPlan plan;

  /// Without a task of somebody's own: the one that the configuration names.
  Impl(const ResolvedConfig& given, const std::filesystem::path& where, const TrainerOptions& asked,
       std::unique_ptr<Task> own)
      : resolved(given),
        folder(where),
        options(asked),
        ranks(asked.ranks ? *asked.ranks : Ranks()),
        training(given.config, task(std::move(own)), ranks, asked.shadow) {
    plan = plan_of(given.config, training, where);
  }

  /// Rank 0 has the folder, and makes tokens of text there, before the others look into it.
  std::unique_ptr<Task> task(std::unique_ptr<Task> own) {
    check_same_settings();
    if (ranks.rank() > 0) ranks.wait_for_first();
    if (ranks.rank() == 0) claim.emplace(folder);
    std::unique_ptr<Task> made = made_task(std::move(own));
    if (ranks.rank() == 0) ranks.wait_for_first();
    return made;
  }

  /// A variable or a file that only one host has would train another model there, and mix it with the
  /// others'.
  void check_same_settings() const {
    if (ranks.size() == 1) return;
    RunConfig first =
        resolve_config({.file = ConfigText{"rank 0", ranks.told(to_toml(resolved, false))}}).config;
    // Where it runs, not what it computes.
    first.run.folder = config().run.folder;
    first.run.device = config().run.device;
    first.train.threads = config().train.threads;
    std::string changes;
    for (std::string change : config_changes(first, config())) {
      if (const size_t at = change.rfind(", was "); at != std::string::npos)
        change.replace(at, 6, " there, on rank 0 ");
      if (const size_t at = change.find(" is now "); at != std::string::npos) change.erase(at + 3, 4);
      changes += (changes.empty() ? "" : "; ") + change;
    }
    const std::string fault = ranks.decided("settings", changes, first_fault);
    HALFSTEP_CHECK(fault.empty(), "Ranks have different settings. ", fault,
                   ". Give all of them the same configuration; check variables that begin with HALFSTEP_.");
  }

  std::unique_ptr<Task> made_task(std::unique_ptr<Task> own) const {
    if (config().train.threads) at::set_num_threads(static_cast<int>(*config().train.threads));
    at::manual_seed(static_cast<uint64_t>(config().train.seed));  // dropout
    const MemoryClassScope memory(MemoryClass::Working);
    if (own) return own;
    return config().model.kind == "resnet18"
               ? train::image_task(config(), ranks)
               : train::text_task(config(), folder / "tokens", options.most_text_bytes, ranks);
  }

  const RunConfig& config() const { return resolved.config; }
  bool last(int64_t step) const { return step >= config().train.steps; }

  class Run;
};

/// The loop over the steps that are left, from opening the folder to the last save.
class Trainer::Impl::Run {
 public:
  Run(Impl& trainer, RunWatcher& watcher, const std::atomic<bool>& stop)
      : trainer_(trainer),
        training_(trainer.training),
        config_(trainer.config()),
        watcher_(watcher),
        stop_(stop),
        folder_(trainer.resolved, trainer.folder,
                is_first() ? trainer.options.from_step : told_step(trainer.ranks, std::nullopt),
                /*only_reads=*/!is_first(), shards_of(trainer)),
        watchdog_(60 * config_.train.watchdog_minutes, watcher),
        findings_(run_setup(config_, trainer.ranks.size())) {
    if (is_first()) {
      const bool resumes = folder_.checkpoint().has_value();
      told_step(trainer.ranks, resumes ? std::optional(folder_.step()) : std::nullopt);
    }
    // Before anything in the folder changes: a checkpoint that does not fit leaves it as it was.
    HALFSTEP_CHECK(folder_.step() <= config_.train.steps, trainer.folder.string(), ": ", folder_.step(),
                   " steps are done, and train.steps is ", config_.train.steps,
                   ". Raise it, or go back to an earlier checkpoint: --from-step.");
    if (folder_.checkpoint()) {
      training_.restore(*folder_.checkpoint());
      for (std::string& change : training_.task().changes_since(folder_.checkpoint()->part("task")))
        folder_.add_note(std::move(change));
    }
    if (config_.run.shard != "none" && trainer.ranks.size() == 1)
      folder_.add_note(detail::concat(
          "run.shard is ", config_.run.shard, ", and this run has one process, which keeps all of it",
          config_.run.gather == "fp8" ? ": no weight is sent, and none is rounded for sending (run.gather)"
                                      : ""));
    trainer.ranks.barrier();  // all have read their checkpoint
    folder_.begin(trainer.plan.unit, trainer.last(folder_.step()) ? 0 : checkpoint_bytes(), watcher);
    begun_at_ = step_ = told_step_ = trainer.plan.steps_done = folder_.step();
    watcher.begin(trainer.plan);
    for (const std::string& note : folder_.notes()) watcher.note(step_, note);
  }

  RunEnd run() {
    folder_.write_status("training", nullptr, /*at_once=*/true);
    RunEnd end;
    try {
      end = take_steps();
      if (end.outcome != RunOutcome::Diverged) save_what_is_left();
      folder_.finish_saves(step_);
      if (end.outcome == RunOutcome::Done) training_.write_model(trainer_.folder / "model");
    } catch (const std::exception& error) {
      end_failed(error.what());
      throw;
    }
    return told(end);
  }

 private:
  RunEnd take_steps() {
    // Before the first step, to see what the run changes; and where an earlier process was to evaluate and
    // failed.
    if (!training_.evaluated_at(step_)) tell(evaluation_after(step_));
    while (!trainer_.last(step_)) {
      // Right after going back nothing could be saved, and the batches that are left out would be forgotten.
      const bool may_stop = !just_went_back_;
      const auto [stopped, no_time] = agreed_end();
      if ((stopped || no_time) && may_stop) {
        if (const auto end = tell_steps()) return *end;
        if (just_went_back_) continue;
      }
      if (stopped && may_stop)
        return ended(RunOutcome::Interrupted, detail::concat("stopped after step ", step_, " of ",
                                                             config_.train.steps, "; ", how_to_go_on()));
      HALFSTEP_CHECK(longest_step_ > 0 || !no_time, "not one step fits into the ",
                     config_.train.time_limit_minutes.value_or(0),
                     " minutes of train.time_limit_minutes: starting took ", trainer_.since_start.seconds(),
                     " s. Raise it.");
      if (no_time && may_stop)
        return ended(
            RunOutcome::OutOfTime,
            detail::concat("stopped after step ", step_, " of ", config_.train.steps, ": ",
                           *config_.train.time_limit_minutes, " minutes are nearly over; ", how_to_go_on()));
      if (config_.train.patience && training_.evaluations_without_gain() >= *config_.train.patience)
        return ended(RunOutcome::Done, detail::concat("the held-out loss has not fallen for ",
                                                      training_.evaluations_without_gain(), " evaluations"));
      if (auto end = take_step()) return *end;
    }
    const int64_t skipped = training_.skipped_until(step_);
    return ended(RunOutcome::Done, skipped == 0
                                       ? "all steps were taken"
                                       : detail::concat("all steps were taken; ", skipped, " of ", step_,
                                                        " changed nothing: their gradients were not finite"));
  }

  bool is_first() const { return trainer_.ranks.rank() == 0; }

  /// Whether the run is to end before the next step: a signal that any rank got, or rank 0's clock.
  std::pair<bool, bool> agreed_end() const {
    const bool stopped = stop_.load(), no_time = out_of_time();
    if (trainer_.ranks.size() == 1) return {stopped, no_time};
    const at::Tensor wishes = at::zeros({2}, at::kLong);
    auto* const flags = wishes.mutable_data_ptr<int64_t>();
    flags[0] = stopped, flags[1] = is_first() && no_time;
    trainer_.ranks.largest(wishes);
    return {flags[0] != 0, flags[1] != 0};
  }

  /// Rank 0's clock decides, and where each rank has a part of the state, all save.
  bool agreed_save(bool due) const {
    if (!training_.is_sharded()) return due;
    const at::Tensor decision = at::zeros({1}, at::kLong).fill_(due ? 1 : 0);
    trainer_.ranks.broadcast(decision);
    return decision.item<int64_t>() != 0;
  }

  static train::RunShards shards_of(Impl& trainer) {
    if (!trainer.training.is_sharded()) return {.processes = trainer.ranks.size()};
    return {
        .ranks = {.rank = trainer.ranks.rank(),
                  .size = trainer.ranks.size(),
                  .decided = [ranks = trainer.ranks](const auto&... what) { return ranks.decided(what...); }},
        .live_parts = [&trainer] { return trainer.training.live_parts(); },
        .processes = trainer.ranks.size()};
  }

  /// Which checkpoint rank 0 goes on from, if it does.
  static std::optional<int64_t> told_step(const Ranks& ranks, std::optional<int64_t> step) {
    const at::Tensor number = at::zeros({1}, at::kLong).fill_(step.value_or(-1));
    ranks.broadcast(number);
    const auto told = number.item<int64_t>();
    return told < 0 ? std::nullopt : std::optional(told);
  }

  uint64_t checkpoint_bytes() const {
    if (!has_a_part_to_save()) return 0;
    // A copy of the state only where none is at hand.
    return static_cast<uint64_t>(
        train::bytes_of(folder_.checkpoint() ? *folder_.checkpoint() : training_.checkpoint(0)));
  }

  std::string how_to_go_on() const {
    return trainer_.options.from_step ? "the same command without --from-step resumes from there"
                                      : "the same command resumes from there";
  }

  /// One step with all that belongs to it. How the run ends, if it does.
  std::optional<RunEnd> take_step() {
    trace_if_asked();
    watchdog_.now(detail::concat("in step ", step_ + 1));
    PhaseClock clock;
    training_.step(step_ + 1, folder_.histograms_at(step_ + 1));
    ++step_;
    // Here, where all ranks are at the same point: what they have seen is added up.
    for (ProbeRecord& record : training_.probes()) untold_probes_.push_back(std::move(record));
    for (ShadowRecord& record : training_.shadows()) untold_shadows_.push_back(std::move(record));
    for (CulpritRecord& record : training_.culprits()) untold_culprits_.push_back(std::move(record));
    if (!training_.on_accelerator() || longest_step_ == 0)
      longest_step_ = std::max(longest_step_, clock.seconds());
    const bool save_is_due = agreed_save(folder_.save_due(step_)) || just_went_back_;
    just_went_back_ = false;
    if (is_told_at_once(step_) || save_is_due || training_.has_passed_skip_limit()) {
      if (auto end = tell_steps()) return end;
      if (just_went_back_) return std::nullopt;
    }
    write_trace_if_due();
    folder_.look_after_saves(told_step_);
    if ((save_is_due || is_new_best()) && has_a_part_to_save()) save();
    folder_.write_status("training", latest_ ? &*latest_ : nullptr, /*at_once=*/false);
    return std::nullopt;
  }

  /// An accelerator is asked, and waited for, where somebody will read what it says.
  bool is_told_at_once(int64_t step) const {
    return !training_.on_accelerator() || due(step, config_.log.every) || is_evaluated(step) ||
           due(step, config_.train.sample_every) || trainer_.last(step);
  }

  /// Log and watcher learn of the steps that were taken since the last time. How the run ends, if it does.
  std::optional<RunEnd> tell_steps() {
    tell_rest();
    try {
      training_.check_not_diverged();
      if (const auto why = training_.diverged(); why && config_.train.on_divergence != "go_on")
        return after_divergence(*why);
    } catch (const SkipLimitError& error) {
      if (config_.train.on_divergence != "go_on") return after_divergence(error.what());
    }
    return std::nullopt;
  }

  void tell_rest() {
    if (step_ - told_step_ > 1)
      watchdog_.now(detail::concat("waiting for the device after steps ", told_step_ + 1, " to ", step_));
    for (StepRecord& record : training_.records()) untold_.push_back(std::move(record));
    while (!untold_.empty()) {
      latest_ = std::move(untold_.front());
      untold_.pop_front();
      tell_step();
    }
  }

  void tell_step() {
    StepRecord& record = *latest_;
    told_step_ = record.step;
    // Of an accelerator's step only now is known how long it took.
    if (training_.on_accelerator() && record.items_per_second > 0)
      longest_step_ = std::max(longest_step_, static_cast<double>(record.items) / record.items_per_second);
    record.seconds = folder_.seconds();
    std::optional<EvaluationRecord> evaluation;
    try {
      if (record.step == step_) evaluation = evaluation_after(step_);
    } catch (...) {
      folder_.write(record);  // the step was taken, and may be saved
      watcher_.step(record);
      throw;
    }
    if (evaluation) record.evaluation_loss = evaluation->loss;
    if (due(record.step, config_.log.every) || record.skipped || evaluation || trainer_.last(record.step) ||
        !record.rank_losses.empty())
      folder_.write(record);
    watcher_.step(record);
    tell_health(record);
    tell_shadows(record);
    tell(evaluation);
    // A model that has no finite loss has nothing to say.
    if (record.step == step_ && due(step_, config_.train.sample_every) && !record.skipped &&
        std::isfinite(record.loss) && (is_first() || training_.gathers_weights()))
      tell_sample();
  }

  /// What was looked at in this step, and what all of it says of the run's precision.
  void tell_health(const StepRecord& record) {
    std::vector<Finding> found;
    const auto tell_all = [&](auto& untold) {
      while (!untold.empty() && untold.front().step <= record.step) {
        untold.front().seconds = record.seconds;
        folder_.write(untold.front());
        for (Finding& finding : findings_.take(untold.front())) found.push_back(std::move(finding));
        untold.pop_front();
      }
    };
    tell_all(untold_culprits_);  // causes before what follows from them
    for (Finding& finding : findings_.take(record)) found.push_back(std::move(finding));
    tell_all(untold_probes_);
    for (const Finding& finding : found) {
      folder_.write(FindingRecord{.step = record.step, .seconds = record.seconds, .finding = finding});
      if (finding.severity != Severity::Note)
        watcher_.note(record.step, detail::concat(finding.what, " ", finding.remedy));
    }
  }

  void tell_shadows(const StepRecord& record) {
    for (; !untold_shadows_.empty() && untold_shadows_.front().step <= record.step;
         untold_shadows_.pop_front()) {
      untold_shadows_.front().seconds = record.seconds;
      folder_.write(untold_shadows_.front());
    }
  }

  void tell_sample() {
    PhaseClock clock;
    try {
      if (auto sample = training_.sample(step_)) {
        sample->seconds = folder_.seconds();
        folder_.write(*sample);
        watcher_.sample(*sample);
      }
    } catch (const Error& error) {
      folder_.note(step_, detail::concat("no sample: ", error.what()));
    }
    longest_sample_ = std::max(longest_sample_, clock.seconds());
  }

  /// An evaluation that is due after this step: also before the first, to see what the run changes, and after
  /// the last.
  std::optional<EvaluationRecord> evaluation_after(int64_t step) {
    if (!is_evaluated(step)) return std::nullopt;
    watchdog_.now(detail::concat("evaluating after step ", step));
    const EvaluationRecord record = training_.evaluate(step);
    longest_evaluation_ = std::max(longest_evaluation_, record.duration_seconds);
    return record;
  }

  bool is_evaluated(int64_t step) const {
    const int64_t every = config_.train.evaluate_every;
    return every > 0 && (due(step, every) || trainer_.last(step));
  }

  void tell(std::optional<EvaluationRecord> evaluation) {
    if (!evaluation) return;
    evaluation->seconds = folder_.seconds();
    folder_.write(*evaluation);
    watcher_.evaluation(*evaluation);
  }

  bool is_new_best() const { return config_.checkpoint.keep_best && training_.is_best_at(step_); }

  /// Of equal ranks only the first saves: the others make no copy of their state for it.
  bool has_a_part_to_save() const { return is_first() || training_.is_sharded(); }

  void save() {
    watchdog_.now(detail::concat("saving step ", step_));
    folder_.save(training_.checkpoint(step_));
  }

  void save_what_is_left() {
    tell_rest();
    watchdog_.now(detail::concat("saving step ", step_));
    folder_.write_status("saving", latest_ ? &*latest_ : nullptr, /*at_once=*/true);
    folder_.finish_saves(step_);
    tried_last_save_ = true;
    if (step_ > folder_.saved_step() && has_a_part_to_save()) folder_.save_last(training_.checkpoint(step_));
  }

  /// Stops, or goes back to a checkpoint from before the trouble. Nothing is saved: what this state knows
  /// helps nobody.
  std::optional<RunEnd> after_divergence(const std::string& why) {
    folder_.finish_saves(step_);
    worth_saving_ = false;
    // The last whose weights have given a loss that was well: the step after it was taken with them, or the
    // held-out loss was the best.
    int64_t most = training_.trouble_since() - 2;
    std::optional<int64_t> target;
    bool may_go_back = false;
    if (is_first()) {
      most = std::max(most, folder_.best_step().value_or(0));
      target = folder_.healthy_step(most);
      if (target && training_.went_back_to() == target) target = folder_.healthy_step(*target - 1);
      may_go_back = target && config_.train.on_divergence == "rollback" &&
                    training_.rollbacks() < config_.train.most_rollbacks && !folder_.pinned_after(*target) &&
                    !kept_between(*target, most);
    }
    // Rank 0 looks, and all do the same: what is in the folder changes as soon as it goes back.
    const at::Tensor decision = at::zeros({2}, at::kLong);
    auto* const numbers = decision.mutable_data_ptr<int64_t>();
    numbers[0] = may_go_back, numbers[1] = target.value_or(-1);
    trainer_.ranks.broadcast(decision);
    if (numbers[0] == 0) return ended(RunOutcome::Diverged, why + (is_first() ? remedy(target, most) : ""));
    target = numbers[1];
    try {
      go_back_to(*target, why);
    } catch (const Error& error) {
      return ended(RunOutcome::Diverged,
                   detail::concat(why, " Going back to step ", *target, " failed: ", error.what()));
    }
    worth_saving_ = true;
    return std::nullopt;
  }

  /// The first healthy one that checkpoint.keep_every or keep_best keep and that is from before the trouble.
  std::optional<int64_t> kept_between(int64_t target, int64_t most) const {
    for (const CheckpointSummary& each : folder_.kept_after(target))
      if (each.healthy && each.step <= most) return each.step;
    return std::nullopt;
  }

  std::string remedy(std::optional<int64_t> target, int64_t most) const {
    if (!target) return "";
    const auto pinned = folder_.pinned_after(*target), kept = kept_between(*target, most);
    return detail::concat(" The checkpoint of step ", *target, " is from before: --from-step ", *target,
                          " resumes from it.",
                          pinned ? detail::concat(" That would remove the checkpoint of step ", *pinned,
                                                  ", which is pinned: unpin it first.")
                          : kept ? detail::concat(" That would remove the checkpoint of step ", *kept,
                                                  ", which checkpoint.keep_every or keep_best keeps: copy "
                                                  "it elsewhere if you need it.")
                                 : "");
  }

  void go_back_to(int64_t target, const std::string& why) {
    const int64_t from = step_;
    // All have it before anything is removed.
    Checkpoint checkpoint;
    std::string fault;
    try {
      checkpoint = folder_.loaded(target);
    } catch (const Error& error) {
      fault = error.what();
    }
    if (trainer_.ranks.size() > 1) fault = trainer_.ranks.decided("going back", fault, first_fault);
    if (!fault.empty()) throw Error(fault);
    folder_.go_back_to(target, trainer_.plan.unit);
    training_.go_back(checkpoint);
    findings_ = FindingWatch(run_setup(config_, trainer_.ranks.size()));
    untold_probes_.clear();
    untold_shadows_.clear();
    untold_culprits_.clear();
    step_ = told_step_ = target;
    just_went_back_ = true;
    latest_.reset();
    folder_.note(step_, detail::concat("rolled back from step ", from, " to step ", step_, " (",
                                       training_.rollbacks(), " of at most ", config_.train.most_rollbacks,
                                       "), leaving out the batches between: ", why));
  }

  bool out_of_time() const {
    if (!config_.train.time_limit_minutes) return false;
    const int64_t next = step_ + 1;
    const double aside = (is_evaluated(next) ? longest_evaluation_ : 0) +
                         (due(next, config_.train.sample_every) ? longest_sample_ : 0);
    // A step, and twice the longest save: the last one may have to wait for another.
    const auto steps =
        static_cast<double>(1 + step_ - told_step_);  // those too that an accelerator has not done
    const double needed = 1.2 * (steps * longest_step_ + aside) + 2 * folder_.save_seconds() + 1;
    return trainer_.since_start.seconds() + needed > 60 * *config_.train.time_limit_minutes;
  }

  void trace_if_asked() {
    // The first step warms up.
    // Of rank 0: the others would write the same file.
    if (config_.log.trace_steps > 0 && is_first() && step_ == begun_at_ + 1 && !traced_)
      trace_.emplace(), traced_ = true;
  }

  void write_trace_if_due() {
    if (!trace_ || (step_ < begun_at_ + 1 + config_.log.trace_steps && !trainer_.last(step_))) return;
    try {
      trace_->write(trainer_.folder / "trace.json");
      folder_.note(told_step_, "trace.json holds the last steps' operations");
    } catch (const FileError& error) {
      folder_.note(told_step_, error.what());
    }
    trace_.reset();
  }

  RunEnd ended(RunOutcome outcome, std::string why) const {
    return {.outcome = outcome, .step = step_, .why = std::move(why)};
  }

  RunEnd told(const RunEnd& end) {
    folder_.end(end);
    folder_.write_status(std::string(to_string(end.outcome)), latest_ ? &*latest_ : nullptr,
                         /*at_once=*/true);
    const auto unwritten = folder_.unwritten();
    const bool looks_well = end.outcome == RunOutcome::Done;  // another outcome has an exit code of its own
    if (unwritten && !looks_well) watcher_.note(end.step, *unwritten);
    watcher_.end(end);
    if (unwritten && looks_well) throw FileError(*unwritten, EIO);
    return end;
  }

  /// The error itself is the caller's; here, what can still be saved, and the end of the log.
  void end_failed(const std::string& why) {
    try {
      tell_rest();
    } catch (const std::exception&) {
    }
    try {
      if (worth_saving_ && !tried_last_save_ && training_.between_steps()) save_what_is_left();
    } catch (const std::exception&) {
    }
    try {
      told(ended(RunOutcome::Failed, why));
    } catch (const std::exception&) {
    }
  }

  Impl& trainer_;
  Training& training_;
  const RunConfig& config_;
  RunWatcher& watcher_;
  const std::atomic<bool>& stop_;
  RunFolder folder_;
  train::Watchdog watchdog_;
  int64_t step_ = 0, begun_at_ = 0;
  int64_t told_step_ = 0;  // log and watcher know of it; behind step_ on an accelerator
  std::deque<StepRecord> untold_;
  std::deque<ProbeRecord> untold_probes_;
  std::deque<ShadowRecord> untold_shadows_;
  std::deque<CulpritRecord> untold_culprits_;
  FindingWatch findings_;
  bool tried_last_save_ = false, worth_saving_ = true, just_went_back_ = false;
  std::optional<StepRecord> latest_;
  std::optional<train::Trace> trace_;
  bool traced_ = false;
  double longest_step_ = 0, longest_evaluation_ = 0, longest_sample_ = 0;
};

Trainer::Trainer(const ResolvedConfig& resolved, const std::filesystem::path& folder,
                 TrainerOptions options) {
  HALFSTEP_CHECK(resolved.config.model.kind != "own",
                 "model.kind is own: only the program whose model it is can train it, which gives a Task to "
                 "halfstep::Trainer.");
  impl_ = std::make_unique<Impl>(resolved, folder, options, nullptr);
}
Trainer::Trainer(std::unique_ptr<Task> task, const ResolvedConfig& resolved,
                 const std::filesystem::path& folder, TrainerOptions options) {
  HALFSTEP_CHECK(task, "Trainer: the task is a null pointer.");
  HALFSTEP_CHECK(resolved.config.model.kind == "own", "Trainer: a task of your own, but model.kind is ",
                 resolved.config.model.kind.value_or("not given"), ". Set model.kind = \"own\".");
  impl_ = std::make_unique<Impl>(resolved, folder, options, std::move(task));
}
Trainer::~Trainer() = default;
Trainer::Trainer(Trainer&&) noexcept = default;
Trainer& Trainer::operator=(Trainer&&) noexcept = default;

const RunPlan& Trainer::plan() const { return impl_->plan; }
std::optional<Recipe> Trainer::recipe() const { return impl_->training.precision().precision().recipe; }
const std::vector<LayerPlan>& Trainer::layers() const { return impl_->training.precision().layers(); }

RunEstimate Trainer::estimate() {
  constexpr int64_t kTried = 3;
  RunEstimate estimate;
  reset_memory_peak();
  int64_t peak_bytes = 0;
  for (int64_t step = 1; step <= kTried; ++step) {
    PhaseClock clock;
    impl_->training.step(step, nullptr);
    const StepRecord record = impl_->training.records().back();
    impl_->training.check_not_diverged();
    estimate.seconds_per_step = clock.seconds();  // of the last: the first ones warm up
    if (record.memory) peak_bytes = std::max(peak_bytes, record.memory->peak_bytes);
  }
  const RunConfig& config = impl_->config();
  double evaluations = 0;
  if (config.train.evaluate_every > 0) {
    estimate.evaluation_seconds = impl_->training.evaluate(kTried).duration_seconds;
    const int64_t after_steps =
        (config.train.steps + config.train.evaluate_every - 1) / config.train.evaluate_every;
    evaluations = static_cast<double>(1 + after_steps);
  }
  estimate.total_seconds = static_cast<double>(config.train.steps) * estimate.seconds_per_step +
                           evaluations * estimate.evaluation_seconds;
  estimate.peak_bytes = peak_bytes;
  estimate.checkpoint_bytes = train::bytes_of(impl_->training.checkpoint(kTried));
  return estimate;
}

RunEnd Trainer::run(RunWatcher& watcher, const std::atomic<bool>& stop) {
  return Impl::Run(*impl_, watcher, stop).run();
}

}  // namespace halfstep
