#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <halfstep/checkpoint.h>
#include <halfstep/error.h>
#include <halfstep/tensor_file.h>

#include <algorithm>

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

Checkpoint load_checkpoint(const std::filesystem::path& folder, int64_t step) {
  const at::NoGradGuard no_grad;
  const CheckpointReader reader(folder, step);
  std::vector<Read> reads;
  for (const ManifestPart& part : reader.manifest().parts)
    for (Read& read : places_for(part)) reads.push_back(std::move(read));
  read_all(reader, reads);

  Checkpoint checkpoint{.step = step,
                        .parts = {},
                        .fingerprint = reader.manifest().fingerprint,
                        .healthy = reader.manifest().healthy,
                        .score = reader.manifest().score};
  for (const ManifestPart& part : reader.manifest().parts) {
    StateDict& state = checkpoint.parts[part.name];
    for (const auto& [name, scalar] : part.scalars)
      std::visit([&](const auto& value) { state.set(name, value); }, scalar);
  }
  for (const Read& read : reads) checkpoint.parts[read.part->name].set(read.entry->name, as_it_lay(read));
  return checkpoint;
}

CheckpointSummary summarize_checkpoint(const std::filesystem::path& folder, int64_t step) {
  const CheckpointReader reader(folder, step);
  const files::Manifest& manifest = reader.manifest();
  CheckpointSummary summary{.step = step,
                            .fingerprint = manifest.fingerprint,
                            .parts = {},
                            .file_bytes = manifest.file.header_bytes + manifest.file.data_bytes,
                            .healthy = manifest.healthy,
                            .score = manifest.score,
                            .pinned = files::is_pinned(folder, step)};
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
