#include "checkpoint/disk_model.h"
#include "checkpoint/sweep/sweep.h"
#include "checkpoint_format/step_folders.h"

namespace halfstep::testing {
namespace {

namespace fs = std::filesystem;
using shim::Event;

std::vector<Event> record(const fs::path& folder, const shim::Plan& sabotage, auto&& body) {
  shim::Plan plan = sabotage;
  plan.folder = folder;
  plan.record = true;
  shim::begin(plan);
  body();
  shim::end();
  return shim::take_events();
}

void save(const Scenario& scenario, files::CheckpointWriter& writer, int64_t step) {
  writer.save(Content(scenario.shape, step).checkpoint());
  shim::note_saved(step);
}

/// What is wrong after a loss of power on this disk, when the checkpoint of `saved` was the last to be saved.
std::string fault_of_loss(const Scenario& scenario, const DiskModel& disk, int64_t saved, Survivors survivors,
                          uint64_t seed) {
  // Until the first save the run's folder itself may be lost, and nothing with it.
  if (saved < Scenario::kPrevious) return "";
  const ScratchFolder scratch;
  disk.lose_power(survivors, seed, scratch.path());
  const fs::path run = scratch.path() / "run";
  return fault_after(scenario, run, saved >= Scenario::kNew);
}

/// Every state in which events [0, count) may leave the disk.
void add_losses(const Scenario& scenario, const DiskModel& disk, int64_t saved, int random_choices,
                const std::string& where, SweepResult& result) {
  for (const Survivors survivors : {Survivors::None, Survivors::All, Survivors::Names, Survivors::Bytes,
                                    Survivors::Inner, Survivors::Outer})
    result.add(where + ", survivors " + std::to_string(static_cast<int>(survivors)),
               fault_of_loss(scenario, disk, saved, survivors, 0));
  for (int choice = 0; choice < random_choices; ++choice)
    result.add(where + ", choice " + std::to_string(choice),
               fault_of_loss(scenario, disk, saved, Survivors::Some, static_cast<uint64_t>(choice)));
}

}  // namespace

SweepResult sweep_power(const Scenario& scenario, int random_choices, const shim::Plan& sabotage) {
  SweepResult result;
  const ScratchFolder scratch;
  const fs::path run = scratch.path() / "run";
  const std::vector<Event> events = record(scratch.path(), sabotage, [&] {
    files::CheckpointWriter writer(run, {.keep_last = Scenario::kKept});
    for (const int64_t step : {Scenario::kOldest, Scenario::kPrevious, Scenario::kNew})
      save(scenario, writer, step);
  });
  DiskModel disk(scratch.path());
  int64_t saved = 0;
  for (size_t i = 0; i < events.size(); ++i) {
    disk.apply(events[i]);
    if (events[i].kind == Event::Kind::Saved) saved = static_cast<int64_t>(events[i].offset);
    if (saved >= Scenario::kPrevious)
      add_losses(scenario, disk, saved, random_choices, "after change " + std::to_string(i), result);
  }
  return result;
}

SweepResult sweep_kill_then_power(const Scenario& scenario, int64_t stride) {
  SweepResult result;
  const ScratchFolder scratch;
  const fs::path run = scratch.path() / "run";
  const std::vector<Event> first = record(scratch.path(), {}, [&] {
    files::CheckpointWriter writer(run, {.keep_last = Scenario::kKept});
    for (const int64_t step : {Scenario::kOldest, Scenario::kPrevious, Scenario::kNew})
      save(scenario, writer, step);
  });
  DiskModel disk(scratch.path());
  int64_t saved = 0, pair = 0;
  for (size_t killed = 0; killed < first.size(); ++killed) {
    disk.apply(first[killed]);
    if (first[killed].kind == Event::Kind::Saved) saved = static_cast<int64_t>(first[killed].offset);
    // The kernel still has all that the dead process did; the next one begins with that.
    fs::remove_all(run);
    disk.lose_power(Survivors::All, 0, scratch.path());
    DiskModel later = disk;
    int64_t saved_later = saved;
    const std::vector<Event> second = record(scratch.path(), {}, [&] {
      files::CheckpointWriter writer(run, {.keep_last = Scenario::kKept});
      const std::vector<int64_t> there = files::checkpoint_steps(run);
      for (const int64_t step : {Scenario::kOldest, Scenario::kPrevious, Scenario::kNew})
        if (there.empty() || there.back() < step) save(scenario, writer, step);
    });
    bool second_is_opening = true;  // until the save makes its folder
    for (size_t i = 0; i < second.size(); ++i) {
      later.apply(second[i]);
      if (second[i].kind == Event::Kind::Saved) saved_later = static_cast<int64_t>(second[i].offset);
      const bool tidying = second_is_opening && second[i].kind != Event::Kind::Mkdir;
      second_is_opening = tidying;
      if (saved_later < Scenario::kPrevious) continue;
      const bool last = i + 1 == second.size();
      if (!tidying && !last && ++pair % stride != 0) continue;
      add_losses(
          scenario, later, saved_later, 2,
          "killed after change " + std::to_string(killed) + ", power lost after change " + std::to_string(i),
          result);
    }
  }
  return result;
}

}  // namespace halfstep::testing
