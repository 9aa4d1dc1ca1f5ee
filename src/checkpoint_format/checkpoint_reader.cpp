#include "checkpoint_format/checkpoint_reader.h"

#include <halfstep/error.h>

#include <algorithm>
#include <optional>

#include "checkpoint_format/step_folders.h"
#include "safetensors/tensor_size.h"
#include "words/names.h"

namespace halfstep::files {
namespace {

namespace fs = std::filesystem;

// Read and hashed in pieces that stay in the cache between the two.
constexpr uint64_t kPieceBytes = uint64_t{1} << 18;

fs::path folder_of_step(const fs::path& run, int64_t step) {
  const fs::path folder = run / step_name(step);
  HALFSTEP_CHECK(!fs::is_symlink(fs::symlink_status(folder)), folder.string(),
                 ": is a link, where a checkpoint's folder was expected.");
  return folder;
}

Manifest read_manifest(const fs::path& folder, int64_t step, const Sha256Text* expected) {
  const InputFile file(folder / kManifestName);
  const std::string where = file.path().string();
  HALFSTEP_CHECK(file.size() <= kLargestManifest, where, ": ", file.size(), " bytes; at most ",
                 kLargestManifest, " are read.");
  std::string text(file.size(), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  HALFSTEP_CHECK(expected == nullptr || sha256_of(text) == *expected, where,
                 ": is not the manifest that this rank wrote when the checkpoint was saved.");
  Manifest manifest = parse_manifest(text, where);
  HALFSTEP_CHECK(manifest.step == step, where, ": is of step ", manifest.step, ", not ", step,
                 ": the folder was renamed.");
  return manifest;
}

std::string fault_of(const fs::path& file, const ManifestPart& part, const ManifestTensor& tensor) {
  return detail::concat(file.string(), ": tensor ", in_quotes(tensor.name), " of part ", in_quotes(part.name),
                        " is damaged: its ", tensor.end - tensor.begin,
                        " bytes are not those that were saved.");
}

std::string fault_of_bools(const fs::path& file, const ManifestPart& part, const ManifestTensor& tensor) {
  return detail::concat(file.string(), ": tensor ", in_quotes(tensor.name), " of part ", in_quotes(part.name),
                        " of type BOOL has an element that is neither 0 nor 1.");
}

}  // namespace

CheckpointReader::CheckpointReader(const fs::path& run, int64_t step)
    : CheckpointReader(folder_of_step(run, step), step, nullptr, Open::Always) {}

CheckpointReader::CheckpointReader(const CheckpointReader& first, std::size_t rank)
    : CheckpointReader(first.folder_ / rank_folder_name(rank), first.manifest_.step,
                       &first.manifest_.ranks.at(rank - 1), Open::WhileRead) {}

CheckpointReader::CheckpointReader(const fs::path& folder, int64_t step, const Sha256Text* expected,
                                   Open open)
    : folder_(folder), path_(folder / kTensorsName), manifest_(read_manifest(folder, step, expected)) {
  const InputFile& tensors = tensors_.emplace(path_);
  const auto& [header_bytes, header_sha256, data_bytes] = manifest_.file;
  const std::string where = path_.string();
  HALFSTEP_CHECK(header_bytes <= tensors.size() && tensors.size() - header_bytes == data_bytes, where, ": ",
                 tensors.size(), " bytes; the manifest says ", header_bytes, " and ", data_bytes, ".");
  HALFSTEP_CHECK(header_bytes <= SafetensorsLimits{}.header_bytes + 8, where, ": a header of ", header_bytes,
                 " bytes; at most ", SafetensorsLimits{}.header_bytes, " are read.");
  std::vector<std::byte> header(header_bytes);
  tensors.read(0, header);
  HALFSTEP_CHECK(sha256_of(header) == header_sha256, where,
                 ": its header is damaged: it is not the one that was saved.");
  if (open == Open::WhileRead) tensors_.reset();
}

void CheckpointReader::read(const ManifestPart& part, const ManifestTensor& tensor,
                            std::span<std::byte> into) const {
  if (into.size() != tensor.end - tensor.begin) HALFSTEP_BUG("a tensor's place is not of its size");
  Sha256 hash;
  with_file([&](const InputFile& tensors) {
    uint64_t offset = manifest_.file.header_bytes + tensor.begin;
    for (std::span<std::byte> rest = into; !rest.empty();) {
      const auto piece = rest.first(std::min<size_t>(rest.size(), kPieceBytes));
      tensors.read(offset, piece);
      hash.update(piece);
      offset += piece.size();
      rest = rest.subspan(piece.size());
    }
  });
  HALFSTEP_CHECK(hash.finish() == tensor.sha256, fault_of(path_, part, tensor));
  HALFSTEP_CHECK(tensor.type != TensorType::BOOL || are_bools(into), fault_of_bools(path_, part, tensor));
}

std::vector<std::string> CheckpointReader::faults() const {
  std::vector<std::string> faults;
  std::vector<std::byte> piece(kPieceBytes);
  Sha256 hash;
  with_file([&](const InputFile& tensors) {
    for (const ManifestPart& part : manifest_.parts) {
      for (const ManifestTensor& tensor : part.tensors) {
        bool bools = true;
        for (uint64_t at = tensor.begin; at < tensor.end;) {
          const auto bytes = std::span(piece).first(std::min<uint64_t>(tensor.end - at, kPieceBytes));
          tensors.read(manifest_.file.header_bytes + at, bytes);
          hash.update(bytes);
          bools = bools && (tensor.type != TensorType::BOOL || are_bools(bytes));
          at += bytes.size();
        }
        if (hash.finish() != tensor.sha256)
          faults.push_back(fault_of(path_, part, tensor));
        else if (!bools)
          faults.push_back(fault_of_bools(path_, part, tensor));
      }
    }
  });
  return faults;
}

std::vector<std::string> verify_checkpoint(const fs::path& run, int64_t step) {
  std::vector<std::string> faults;
  const auto look_at = [&](auto&& look) {
    try {
      const std::vector<std::string> found = look();
      faults.insert(faults.end(), found.begin(), found.end());
    } catch (const Error& error) {
      faults.emplace_back(error.what());
    }
  };
  std::optional<CheckpointReader> first;
  look_at([&] { return first.emplace(run, step).faults(); });
  for (std::size_t rank = 1; first && rank <= first->manifest().ranks.size(); ++rank)
    look_at([&] { return CheckpointReader(*first, rank).faults(); });
  return faults;
}

}  // namespace halfstep::files
