#include <halfstep/checkpoint.h>
#include <halfstep/error.h>

#include <chrono>
#include <future>

#include "checkpoint/snapshot.h"
#include "checkpoint_format/step_folders.h"

namespace halfstep {

using checkpoint::Copies;
using checkpoint::Snapshot;

struct CheckpointFolder::Impl {
  Impl(const std::filesystem::path& folder, const CheckpointOptions& options)
      : writer(folder, {.keep_last = options.keep_last,
                        .keep_every = options.keep_every,
                        .keep_best = options.keep_best}),
        machine(fingerprint()) {}

  Snapshot snapshot(const Checkpoint& given, Copies copies) const {
    Snapshot taken = checkpoint::snapshot_of(given, copies);
    taken.content.fingerprint = machine;
    return taken;
  }

  void wait() {
    if (writing.valid()) writing.get();
  }

  files::CheckpointWriter writer;
  std::map<std::string, std::string> machine;
  std::future<void> writing;  // last: its destructor waits, and the writer must live until then
};

CheckpointFolder::CheckpointFolder(const std::filesystem::path& folder, CheckpointOptions options)
    : impl_(std::make_unique<Impl>(folder, options)) {}
CheckpointFolder::~CheckpointFolder() = default;
CheckpointFolder::CheckpointFolder(CheckpointFolder&&) noexcept = default;
CheckpointFolder& CheckpointFolder::operator=(CheckpointFolder&&) noexcept = default;

static double seconds_to(auto&& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

SaveReport CheckpointFolder::save(const Checkpoint& checkpoint) {
  const double waited = seconds_to([&] { impl_->wait(); });
  const Snapshot snapshot = impl_->snapshot(checkpoint, Copies::WhereNeeded);
  impl_->writer.save(snapshot.content);
  return {.step = checkpoint.step, .tensor_bytes = snapshot.tensor_bytes, .waited_seconds = waited};
}

SaveReport CheckpointFolder::save_async(Checkpoint checkpoint) {
  // Before the copy: two snapshots and the live state would not fit where one does.
  const double waited = seconds_to([&] { impl_->wait(); });
  Snapshot snapshot = impl_->snapshot(checkpoint, Copies::Always);
  const uint64_t tensor_bytes = snapshot.tensor_bytes;
  impl_->writing =
      std::async(std::launch::async, [&writer = impl_->writer, taken = std::move(snapshot)]() mutable {
        // Into this frame: the future keeps the function, and with it a copy of the state, until it is asked.
        const Snapshot mine = std::move(taken);
        writer.save(mine.content);
      });
  return {.step = checkpoint.step, .tensor_bytes = tensor_bytes, .waited_seconds = waited};
}

void CheckpointFolder::wait() { impl_->wait(); }

bool CheckpointFolder::writing() const {
  return impl_->writing.valid() &&
         impl_->writing.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
}

std::vector<int64_t> CheckpointFolder::steps() const { return files::checkpoint_steps(impl_->writer.run()); }

Checkpoint CheckpointFolder::load(int64_t step) const { return load_checkpoint(impl_->writer.run(), step); }

std::optional<Checkpoint> CheckpointFolder::load_latest() const {
  const std::vector<int64_t> steps = this->steps();
  if (steps.empty()) return std::nullopt;
  try {
    return load(steps.back());
  } catch (const FileError& error) {
    if (error.code() != ENOENT || steps.size() < 2) throw;
    throw FileError(
        detail::concat(error.what(), " The checkpoint before is of step ", steps[steps.size() - 2],
                       ": 'halfstep train --from-step' goes on from it."),
        error.code());
  } catch (const Error& error) {
    const std::string before =
        steps.size() > 1 ? detail::concat("The one before is of step ", steps[steps.size() - 2],
                                          ": 'halfstep train --from-step' goes on from it; in a "
                                          "program, load it and call remove_newer_than with its step.")
                         : "There is none before it.";
    throw Error(detail::concat(error.what(), " ", before));
  }
}

void CheckpointFolder::remove_newer_than(int64_t step) {
  impl_->wait();
  impl_->writer.remove_newer_than(step);
}

}  // namespace halfstep
