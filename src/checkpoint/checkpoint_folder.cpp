#include <halfstep/checkpoint.h>
#include <halfstep/error.h>
#include <halfstep/tensor_file.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>

#include <chrono>
#include <future>
#include <vector>

#include "checkpoint/resharding.h"
#include "checkpoint_format/checkpoint_writer.h"
#include "checkpoint_format/step_folders.h"
#include "tensor/faults.h"

namespace halfstep::checkpoint {
namespace {

// A checkpoint's values as bytes, ready to be written.

struct Snapshot {
  std::vector<at::Tensor> tensors;  // own the bytes that `content` points to
  files::CheckpointToSave content;
  uint64_t tensor_bytes = 0;
};

enum class Copies {
  WhereNeeded,  ///< the caller leaves the tensors alone until the write is done
  Always,       ///< training goes on meanwhile; only a tensor that nobody else holds is taken as it is
};

/// Why a tensor cannot be saved, as the end of a sentence; "" if it can.
std::string obstacle(const at::Tensor& tensor) {
  if (!tensor.defined()) return "is undefined";
  if (tensor.layout() != at::kStrided)
    return detail::concat("has the layout ", tensor.layout(), "; make it dense first");
  if (tensor.is_meta()) return "has no data: it is on the meta device";
  try {
    (void)tensor_type_of(tensor.scalar_type());
  } catch (const Error&) {
    return detail::concat("is of type ", tensor.scalar_type(), ", which safetensors files do not have");
  }
  return "";
}

/// Memory that somebody lent to LibTorch (at::from_blob) has no allocator: its owner may write to it still.
bool held_by_nobody_else(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1 &&
         tensor.storage().allocator() != nullptr;
}

/// Row by row on the CPU, in memory that nobody writes to.
at::Tensor bytes_of(const at::Tensor& tensor, Copies copies) {
  const at::NoGradGuard no_grad;
  const bool own = copies == Copies::WhereNeeded || held_by_nobody_else(tensor);
  const at::Tensor rows = tensor.detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous();
  return own || rows.const_data_ptr() != tensor.const_data_ptr() ? rows : rows.clone();
}

/// Kept where they say more than the shape does: elements without gaps, but in another order.
std::vector<int64_t> strides_of(const at::Tensor& tensor) {
  const bool reordered =
      tensor.numel() > 0 && !tensor.is_contiguous() && tensor.is_non_overlapping_and_dense();
  return reordered ? tensor.strides().vec() : std::vector<int64_t>{};
}

/// An Error that lists every value that cannot be saved: undefined, sparse, of a type that the format lacks.
Snapshot snapshot_of(const Checkpoint& checkpoint, Copies copies) {
  Faults faults;
  for (const auto& [part, state] : checkpoint.parts)
    for (const auto& [name, value] : state)
      if (const auto* tensor = std::get_if<at::Tensor>(&value))
        faults.expect(obstacle(*tensor).empty(), "'", name, "' of part '", part, "' ", obstacle(*tensor));
  faults.throw_if_any("checkpoint");

  Snapshot snapshot;
  snapshot.content.step = checkpoint.step;
  snapshot.content.healthy = checkpoint.healthy;
  snapshot.content.score = checkpoint.score;
  for (const auto& [part_name, state] : checkpoint.parts) {
    files::PartToSave part{.name = part_name};
    for (const auto& [name, value] : state) {
      if (const auto* number = std::get_if<int64_t>(&value)) {
        part.scalars.emplace(name, *number);
      } else if (const auto* real = std::get_if<double>(&value)) {
        part.scalars.emplace(name, *real);
      } else if (const auto* text = std::get_if<std::string>(&value)) {
        part.scalars.emplace(name, *text);
      } else {
        const auto& tensor = std::get<at::Tensor>(value);
        snapshot.tensors.push_back(bytes_of(tensor, copies));
        snapshot.tensor_bytes += snapshot.tensors.back().nbytes();
        part.tensors.push_back({to_write(name, snapshot.tensors.back()), strides_of(tensor)});
      }
    }
    snapshot.content.parts.push_back(std::move(part));
  }
  return snapshot;
}

}  // namespace
}  // namespace halfstep::checkpoint

namespace halfstep {

using checkpoint::Copies;
using checkpoint::Snapshot;

struct CheckpointFolder::Impl {
  Impl(const std::filesystem::path& given, const CheckpointOptions& options, CheckpointRanks given_ranks)
      : ranks{.rank = given_ranks.rank, .size = given_ranks.size}, machine(fingerprint()), folder(given) {
    // Two folders of one process are saved to by two threads, in an order of their own on each rank.
    const std::filesystem::path whole = std::filesystem::absolute(given).lexically_normal();
    ranks.decided = [decided = std::move(given_ranks.decided),
                     about = (whole.parent_path().filename() / whole.filename()).string()](
                        const std::string& text, const auto& decide) { return decided(about, text, decide); };
    if (ranks.rank > 0) return;
    writer.emplace(given, files::Retention{.keep_last = options.keep_last,
                                           .keep_every = options.keep_every,
                                           .keep_best = options.keep_best});
    folder = writer->run();
  }

  Snapshot snapshot(const Checkpoint& given, Copies copies) const {
    Snapshot taken;
    try {
      if (ranks.size == 1) check_whole(given);
      taken = checkpoint::snapshot_of(given, copies);
    } catch (const std::exception& error) {
      if (ranks.size == 1) throw;
      // The others are about to wait for this one: it takes part, and all hear why there is nothing to save.
      taken.content.step = given.step;
      taken.content.refusal = error.what();
    }
    taken.content.fingerprint = machine;
    return taken;
  }

  static void check_whole(const Checkpoint& given) {
    for (const auto& [name, part] : given.parts)
      HALFSTEP_CHECK(
          !checkpoint::is_of_parts(part), "checkpoint: part '", name,
          "' belongs to one of several ranks, each of which has a part of the model. All ranks save "
          "together: give CheckpointFolder its CheckpointRanks on each of them.");
  }

  void write(const Snapshot& taken) {
    if (writer)
      writer->save(taken.content, ranks);
    else
      files::save_with_first(folder, taken.content, ranks);
  }

  void wait() {
    if (writing.valid()) writing.get();
  }

  files::SavingRanks ranks;
  std::optional<files::CheckpointWriter> writer;  // rank 0's
  std::map<std::string, std::string> machine;
  std::filesystem::path folder;
  std::future<void> writing;  // last: its destructor waits, and the writer must live until then
};

CheckpointFolder::CheckpointFolder(const std::filesystem::path& folder, CheckpointOptions options,
                                   CheckpointRanks ranks)
    : impl_(std::make_unique<Impl>(folder, options, std::move(ranks))) {}
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
  impl_->write(snapshot);
  return {.step = checkpoint.step, .tensor_bytes = snapshot.tensor_bytes, .waited_seconds = waited};
}

SaveReport CheckpointFolder::save_async(Checkpoint checkpoint) {
  // Before the copy: two snapshots and the live state would not fit where one does.
  const double waited = seconds_to([&] { impl_->wait(); });
  Snapshot snapshot = impl_->snapshot(checkpoint, Copies::Always);
  const uint64_t tensor_bytes = snapshot.tensor_bytes;
  impl_->writing =
      std::async(std::launch::async, [impl = impl_.get(), taken = std::move(snapshot)]() mutable {
        // Into this frame: the future keeps the function, and with it a copy of the state, until it is asked.
        const Snapshot mine = std::move(taken);
        impl->write(mine);
      });
  return {.step = checkpoint.step, .tensor_bytes = tensor_bytes, .waited_seconds = waited};
}

void CheckpointFolder::wait() { impl_->wait(); }

bool CheckpointFolder::writing() const {
  return impl_->writing.valid() &&
         impl_->writing.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
}

std::vector<int64_t> CheckpointFolder::steps() const { return files::checkpoint_steps(impl_->folder); }

Checkpoint CheckpointFolder::load(int64_t step, const std::map<std::string, StateDict>& live) const {
  return checkpoint::load_for_rank(impl_->folder, step, live, impl_->ranks.rank, impl_->ranks.size);
}

std::optional<Checkpoint> CheckpointFolder::load_latest(const std::map<std::string, StateDict>& live) const {
  const std::vector<int64_t> steps = this->steps();
  if (steps.empty()) return std::nullopt;
  try {
    return load(steps.back(), live);
  } catch (const FileError& error) {
    if (error.code() != ENOENT || steps.size() < 2) throw;
    throw FileError(
        detail::concat(error.what(), " The checkpoint before is of step ", steps[steps.size() - 2],
                       ": 'halfstep train --from-step' resumes from it."),
        error.code());
  } catch (const Error& error) {
    const std::string before =
        steps.size() > 1 ? detail::concat("The one before is of step ", steps[steps.size() - 2],
                                          ": 'halfstep train --from-step' resumes from it; in a "
                                          "program, load it and call remove_newer_than with its step.")
                         : "There is none before it.";
    throw Error(detail::concat(error.what(), " ", before));
  }
}

void CheckpointFolder::remove_newer_than(int64_t step) {
  impl_->wait();
  if (impl_->writer) impl_->writer->remove_newer_than(step);
}

}  // namespace halfstep
