#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <halfstep/checkpoint.h>
#include <halfstep/error.h>
#include <halfstep/tensor_file.h>

#include <algorithm>
#include <deque>

#include "checkpoint/resharding.h"
#include "checkpoint_format/checkpoint_reader.h"
#include "checkpoint_format/step_folders.h"
#include "io/folder_lock.h"
#include "words/names.h"

namespace halfstep {
namespace {

using files::CheckpointReader;
using files::ManifestPart;
using files::ManifestTensor;

struct Read {
  const ManifestPart* part;
  const ManifestTensor* entry;
  at::Tensor rows;  // row by row, as in the file
};

at::Tensor empty_for(const ManifestTensor& entry) {
  return at::empty(sizes_of(TensorEntry{.name = entry.name, .type = entry.type, .shape = entry.shape}),
                   at::TensorOptions(scalar_type_of(entry.type)));
}

at::Tensor as_it_lay(const Read& read) {
  const std::vector<int64_t>& strides = read.entry->strides;
  if (strides.empty() || strides == read.rows.strides().vec()) return read.rows;
  HALFSTEP_CHECK(strides.size() == static_cast<size_t>(read.rows.dim()), "checkpoint: the strides of ",
                 in_quotes(read.entry->name), " do not fit its shape.");
  const at::Tensor laid_out = at::empty_strided(read.rows.sizes(), strides, read.rows.options());
  return laid_out.copy_(read.rows);
}

// Each tensor is read and hashed by one of LibTorch's threads.
void read_all(const CheckpointReader& reader, const std::vector<Read>& reads) {
  at::parallel_for(0, static_cast<int64_t>(reads.size()), 1, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      const at::Tensor& rows = reads[i].rows;
      reader.read(*reads[i].part, *reads[i].entry,
                  {static_cast<std::byte*>(rows.mutable_data_ptr()), rows.nbytes()});
    }
  });
}

std::vector<Read> places_for(const ManifestPart& part) {
  std::vector<Read> reads;
  for (const ManifestTensor& entry : part.tensors) reads.push_back({&part, &entry, empty_for(entry)});
  return reads;
}

std::string as_text(const files::Scalar& scalar) {
  if (const auto* number = std::get_if<int64_t>(&scalar)) return std::to_string(*number);
  if (const auto* real = std::get_if<double>(&scalar)) return files::to_text(*real);
  return std::get<std::string>(scalar);
}

}  // namespace

const StateDict& Checkpoint::part(std::string_view name) const {
  std::string names;
  for (const auto& [each, state] : parts) {
    if (each == name) return state;
    names += (names.empty() ? "'" : ", '") + each + "'";
  }
  throw Error(detail::concat("checkpoint of step ", step, ": no part ", in_quotes(name), ". It has ",
                             names.empty() ? "none" : names, "."));
}

std::vector<int64_t> checkpoint_steps(const std::filesystem::path& folder) {
  return files::checkpoint_steps(folder);
}

namespace {

StateDict::Value value_of(const CheckpointReader& reader, const ManifestPart& part, const std::string& name) {
  if (const auto scalar = part.scalars.find(name); scalar != part.scalars.end())
    return std::visit([](const auto& value) { return StateDict::Value(value); }, scalar->second);
  const auto entry = std::ranges::find_if(part.tensors, [&](const auto& each) { return each.name == name; });
  const std::vector<Read> reads{{&part, &*entry, empty_for(*entry)}};
  read_all(reader, reads);
  return as_it_lay(reads[0]);
}

/// Rank 0's and the others'.
std::deque<CheckpointReader> readers_of(const std::filesystem::path& folder, int64_t step) {
  std::deque<CheckpointReader> readers;
  readers.emplace_back(folder, step);
  const std::size_t others = readers[0].manifest().ranks.size();
  for (std::size_t rank = 1; rank <= others; ++rank) readers.emplace_back(readers[0], rank);
  return readers;
}

StateDict all_of(const CheckpointReader& reader, const ManifestPart& part) {
  const std::vector<Read> reads = places_for(part);
  read_all(reader, reads);
  StateDict state;
  for (const auto& [name, scalar] : part.scalars)
    std::visit([&](const auto& value) { state.set(name, value); }, scalar);
  for (const Read& read : reads) state.set(read.entry->name, as_it_lay(read));
  return state;
}

const ManifestPart& part_of(const CheckpointReader& reader, const std::string& name) {
  const auto& parts = reader.manifest().parts;
  const auto part = std::ranges::find_if(parts, [&](const auto& each) { return each.name == name; });
  HALFSTEP_CHECK(part != parts.end(), "checkpoint of step ", reader.manifest().step,
                 ": a rank has saved no part ", in_quotes(name), ", which rank 0 has.");
  return *part;
}

SavedByRanks saved_by(const std::deque<CheckpointReader>& readers, const std::string& part, std::size_t own) {
  SavedByRanks saved;
  saved.own = own;
  for (const CheckpointReader& reader : readers) {
    auto& names = saved.names.emplace_back();
    for (const auto& [name, scalar] : part_of(reader, part).scalars) names.push_back(name);
    for (const ManifestTensor& tensor : part_of(reader, part).tensors) names.push_back(tensor.name);
  }
  saved.read = [&readers, part](std::size_t rank, const std::string& name) {
    return value_of(readers[rank], part_of(readers[rank], part), name);
  };
  return saved;
}

}  // namespace

Checkpoint load_checkpoint(const std::filesystem::path& folder, int64_t step,
                           const std::map<std::string, StateDict>& live) {
  return checkpoint::load_for_rank(folder, step, live, /*rank=*/0, /*size=*/1);
}

Checkpoint checkpoint::load_for_rank(const std::filesystem::path& folder, int64_t step,
                                     const std::map<std::string, StateDict>& live, int rank, int size) {
  const at::NoGradGuard no_grad;
  const std::deque<CheckpointReader> readers = readers_of(folder, step);
  const std::size_t own =
      readers.size() == static_cast<std::size_t>(size) ? static_cast<std::size_t>(rank) : 0;
  const files::Manifest& first = readers[0].manifest();
  Checkpoint checkpoint{.step = step,
                        .parts = {},
                        .fingerprint = first.fingerprint,
                        .healthy = first.healthy,
                        .score = first.score};
  std::map<std::string, std::string> layouts;
  if (readers.size() > 1)
    for (const ManifestPart& part : first.parts)
      for (const auto& [name, scalar] : part.scalars)
        if (const auto param = checkpoint::param_of_layout(name)) layouts[*param] = as_text(scalar);
  for (const ManifestPart& part : first.parts) {
    StateDict& state = checkpoint.parts[part.name];
    const auto wanted = live.find(part.name);
    if (wanted != live.end() && checkpoint::is_of_parts(wanted->second))
      state = resharded(saved_by(readers, part.name, own), wanted->second);
    else if (readers.size() > 1)
      state = checkpoint::whole_state(saved_by(readers, part.name, own), layouts);
    else
      state = all_of(readers[0], part);
  }
  return checkpoint;
}

CheckpointSummary summarize_checkpoint(const std::filesystem::path& folder, int64_t step) {
  const CheckpointReader reader(folder, step);
  const files::Manifest& manifest = reader.manifest();
  CheckpointSummary summary{.step = step,
                            .fingerprint = manifest.fingerprint,
                            .parts = {},
                            .file_bytes = 0,
                            .ranks = static_cast<int64_t>(manifest.ranks.size()) + 1,
                            .healthy = manifest.healthy,
                            .score = manifest.score,
                            .pinned = files::is_pinned(folder, step)};
  const auto add_file = [&](const files::ManifestFile& file) {
    summary.file_bytes += file.header_bytes + file.data_bytes;
  };
  add_file(manifest.file);
  for (std::size_t rank = 1; rank <= manifest.ranks.size(); ++rank)
    add_file(CheckpointReader(reader, rank).manifest().file);
  for (const ManifestPart& from : manifest.parts) {
    CheckpointSummary::Part part{.name = from.name};
    for (const auto& [name, scalar] : from.scalars) part.values.emplace(name, as_text(scalar));
    for (const ManifestTensor& tensor : from.tensors) {
      const uint64_t bytes = tensor.end - tensor.begin;
      part.tensors.push_back({tensor.name, tensor.type, tensor.shape, bytes, tensor.sha256});
      part.bytes += bytes;
    }
    summary.parts.push_back(std::move(part));
  }
  return summary;
}

void pin_checkpoint(const std::filesystem::path& folder, int64_t step, bool pinned) {
  files::set_pinned(folder, step, pinned);
}

void remove_checkpoint(const std::filesystem::path& folder, int64_t step) {
  const files::FolderLock lock(folder);
  const std::vector<int64_t> steps = files::checkpoint_steps(folder);
  HALFSTEP_CHECK(std::binary_search(steps.begin(), steps.end(), step), folder.string(),
                 ": has no checkpoint of step ", step, ".");
  HALFSTEP_CHECK(!files::is_pinned(folder, step), folder.string(), ": the checkpoint of step ", step,
                 " is pinned. Unpin it first.");
  for (const files::NotRemoved& kept : files::remove_steps(folder, {step})) throw FileError(kept.why);
}

std::vector<std::string> verify_checkpoint(const std::filesystem::path& folder, int64_t step) {
  return files::verify_checkpoint(folder, step);
}

void export_part(const std::filesystem::path& folder, int64_t step, std::string_view part,
                 const std::filesystem::path& to) {
  const Checkpoint checkpoint = load_checkpoint(folder, step);
  NamedTensors tensors;
  for (const auto& [name, value] : checkpoint.part(part))
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) tensors.emplace_back(name, *tensor);
  HALFSTEP_CHECK(!tensors.empty(), "checkpoint of step ", step, ": part ", in_quotes(part),
                 " has no tensors to export.");
  write_tensors(to, tensors, {{"format", "pt"}});
}

}  // namespace halfstep
