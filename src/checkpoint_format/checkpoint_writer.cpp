#include "checkpoint_format/checkpoint_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <optional>
#include <set>

#include "checkpoint_format/checkpoint_reader.h"
#include "checkpoint_format/step_folders.h"
#include "io/durable_file.h"
#include "io/file_error.h"
#include "safetensors/tensor_size.h"
#include "words/names.h"

namespace halfstep::files {
namespace {

namespace fs = std::filesystem;

fs::path opened(const fs::path& run) {
  make_folders(run);
  std::error_code broken;
  const fs::path resolved = fs::canonical(run, broken);
  if (broken)
    throw FileError(detail::concat(run.string(), ": is a link to nothing: ", broken.message(),
                                   ". Mount what it leads to, or remove it."),
                    broken.value());
  // Before the first step, not after an hour of training.
  if (::faccessat(AT_FDCWD, resolved.c_str(), W_OK | X_OK, AT_EACCESS) != 0)
    throw_file_error("write into the folder", resolved);
  return resolved;
}

// The tensors of all parts in the order of the file: wide elements first, so that each lies at a multiple of
// its size behind a header padded to 8 bytes, for readers that map the file.
struct Place {
  const TensorToSave* tensor;
  ManifestTensor* entry;
  std::string name;
};

std::vector<Place> places_of(const CheckpointToSave& checkpoint, Manifest& manifest) {
  std::vector<Place> places;
  for (const PartToSave& part : checkpoint.parts)
    manifest.parts.push_back({part.name, part.scalars, std::vector<ManifestTensor>(part.tensors.size())});
  for (size_t p = 0; p < checkpoint.parts.size(); ++p) {
    const PartToSave& part = checkpoint.parts[p];
    for (size_t t = 0; t < part.tensors.size(); ++t)
      places.push_back({&part.tensors[t], &manifest.parts[p].tensors[t],
                        name_in_file(part.name, part.tensors[t].tensor.name)});
  }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    const int a_bits = bits_of(a.tensor->tensor.type), b_bits = bits_of(b.tensor->tensor.type);
    return a_bits != b_bits ? a_bits > b_bits : a.name < b.name;
  });
  uint64_t reached = 0;
  for (const Place& place : places) {
    const auto& [tensor, strides] = *place.tensor;
    const uint64_t end = reached + tensor.bytes.size();
    *place.entry = {tensor.name, tensor.type, tensor.shape, strides, reached, end, {}};
    reached = end;
  }
  manifest.file.data_bytes = reached;
  return places;
}

void check(const CheckpointToSave& checkpoint) {
  if (!checkpoint.refusal.empty()) throw Error(checkpoint.refusal);
  HALFSTEP_CHECK(checkpoint.step >= 0, "checkpoint: step ", checkpoint.step, " is negative.");
  std::set<std::string_view> parts;
  for (const PartToSave& part : checkpoint.parts) {
    check_part_name(part.name, "checkpoint");
    HALFSTEP_CHECK(parts.insert(part.name).second, "checkpoint: part '", part.name, "' occurs twice.");
    for (const auto& [tensor, strides] : part.tensors)
      HALFSTEP_CHECK(tensor.type != TensorType::BOOL || are_bools(tensor.bytes), "checkpoint: tensor ",
                     in_quotes(tensor.name), " of part ", in_quotes(part.name),
                     " of type BOOL has an element that is neither 0 nor 1. Save it as U8.");
  }
}

/// All but the manifest, which is returned.
Manifest write_tensors(const CheckpointToSave& checkpoint, const fs::path& folder) {
  Manifest manifest{.step = checkpoint.step,
                    .fingerprint = checkpoint.fingerprint,
                    .file = {},
                    .parts = {},
                    .healthy = checkpoint.healthy,
                    .score = checkpoint.score};
  const std::vector<Place> places = places_of(checkpoint, manifest);
  std::vector<TensorToWrite> tensors;
  for (const Place& place : places) {
    tensors.push_back(place.tensor->tensor);
    tensors.back().name = place.name;
  }
  const std::string header = safetensors_header(tensors);
  manifest.file.header_bytes = header.size();
  manifest.file.header_sha256 = sha256_of(header);

  // Hashing takes as long as writing; side by side they take as long as one.
  auto hashed = std::async(std::launch::async, [&] {
    for (const Place& place : places) place.entry->sha256 = sha256_of(place.tensor->tensor.bytes);
  });
  OutputFile data(folder / kTensorsName);
  data.write(header);
  for (const TensorToWrite& tensor : tensors) data.write(tensor.bytes);
  data.sync();
  data.close();
  hashed.get();
  return manifest;
}

/// The text that it wrote. The folder is durable then, with all that is in it.
std::string write_manifest(const Manifest& manifest, const fs::path& folder) {
  // What would be refused when it is read must not become the reason to remove an older one.
  const std::string text = to_text(manifest);
  (void)parse_manifest(text, "checkpoint: cannot be saved because its manifest could not be read back");
  OutputFile list(folder / kManifestName);
  list.write(text);
  list.sync();
  list.close();
  sync_folder(folder);
  return text;
}

/// Runs `body` on each rank. On rank 0, what it returned, by rank; on all, the first rank's error.
template <typename Body>
std::vector<std::string> agree(const SavingRanks& ranks, Body body) {
  if (ranks.size == 1) return {body()};
  constexpr char kFine = '+', kFailed = '-', kRefused = '!', kOldStays = 'o';
  std::string told;
  try {
    told = kFine + body();
  } catch (const OldCheckpointError& error) {
    told = detail::concat(kOldStays, error.code(), " ", error.what());
  } catch (const FileError& error) {
    told = detail::concat(kFailed, error.code(), " ", error.what());
  } catch (const std::exception& error) {
    told = detail::concat(kRefused, 0, " ", error.what());
  }
  std::vector<std::string> all;
  const std::string verdict = ranks.decided(told, [&](const std::vector<std::string>& texts) {
    for (const std::string& text : texts) all.push_back(text.substr(1));
    for (std::size_t rank = 0; rank < texts.size(); ++rank)
      if (texts[rank].front() != kFine)
        return detail::concat(texts[rank].front(), all[rank].substr(0, all[rank].find(' ')), " rank ", rank,
                              ":", all[rank].substr(all[rank].find(' ')));
    return std::string(1, kFine);
  });
  if (verdict.front() == kFine) return all;
  const std::string what = verdict.substr(verdict.find(' ') + 1);
  const int code = std::atoi(verdict.c_str() + 1);
  if (verdict.front() == kOldStays) throw OldCheckpointError(what, code);
  if (verdict.front() == kFailed) throw FileError(what, code);
  throw Error(what);
}

}  // namespace

CheckpointWriter::CheckpointWriter(const fs::path& run, const Retention& retention)
    : run_(opened(run)), retention_(retention), lock_(run_) {
  HALFSTEP_CHECK(retention.keep_last >= 0, "checkpoints: keep_last is ", retention.keep_last,
                 ", expected a count; 0 keeps all.");
  HALFSTEP_CHECK(retention.keep_every >= 0, "checkpoints: keep_every is ", retention.keep_every,
                 ", expected a number of steps; 0 keeps none permanently.");
  remove_leftovers(run_);
}

void CheckpointWriter::save(const CheckpointToSave& checkpoint, const SavingRanks& ranks) {
  const fs::path aside = aside_folder(run_, checkpoint.step);
  try {
    agree(ranks, [&] {
      check(checkpoint);
      const std::vector<int64_t> steps = checkpoint_steps(run_);
      HALFSTEP_CHECK(steps.empty() || steps.back() < checkpoint.step, run_.string(), ": step ",
                     checkpoint.step, " cannot be saved because there is a checkpoint of step ", steps.back(),
                     ", which would be taken for the latest. If this run began from an older one, call "
                     "remove_newer_than first.");
      remove_leftovers(run_);
      remove_aside(run_, checkpoint.step);
      make_folder(aside);
      return std::string();
    });
    Manifest manifest;
    const std::vector<std::string> of_ranks = agree(ranks, [&] {
      manifest = write_tensors(checkpoint, aside);
      return std::string();
    });
    manifest.ranks.assign(of_ranks.begin() + 1, of_ranks.end());
    agree(ranks, [&] {
      (void)write_manifest(manifest, aside);
      give_name(aside, checkpoint.step);
      // Known without reading; and after going back to an older step, other than what was seen under this
      // name.
      seen_[checkpoint.step] = {
          .step = checkpoint.step, .healthy = checkpoint.healthy, .score = checkpoint.score};
      remove_old();
      return std::string();
    });
  } catch (const std::exception&) {
    // The reason is what the caller must hear; what cannot be removed now is removed before the next save.
    try {
      remove_leftovers(run_);
    } catch (const Error&) {
    }
    throw;
  }
}

void save_with_first(const fs::path& run, const CheckpointToSave& checkpoint, const SavingRanks& ranks) {
  const fs::path mine =
      aside_folder(run, checkpoint.step) / rank_folder_name(static_cast<std::size_t>(ranks.rank));
  agree(ranks, [&] {
    check(checkpoint);
    return std::string();
  });
  agree(ranks, [&] {
    make_folder(mine);
    return sha256_of(write_manifest(write_tensors(checkpoint, mine), mine));
  });
  agree(ranks, [] { return std::string(); });
}

void CheckpointWriter::give_name(const fs::path& aside, int64_t step) {
  const fs::path name = run_ / step_name(step);
  if (::rename(aside.c_str(), name.c_str()) != 0) throw_file_error("rename into place", name);
  try {
    sync_folder(run_);
  } catch (const FileError&) {
    // Not known to be durable, so not saved: the caller may try the same step again.
    ::rename(name.c_str(), aside.c_str());
    throw;
  }
}

KeptCheckpoint CheckpointWriter::kept(int64_t step) {
  auto seen = seen_.find(step);
  if (seen == seen_.end()) {
    KeptCheckpoint one{.step = step};
    try {
      const Manifest manifest = CheckpointReader(run_, step).manifest();
      one = {.step = step, .healthy = manifest.healthy, .score = manifest.score};
    } catch (const FileError&) {
      throw;
    } catch (const Error&) {
      one.healthy = false;  // damaged: nothing to go back to
    }
    seen = seen_.emplace(step, one).first;
  }
  KeptCheckpoint one = seen->second;
  one.pinned = is_pinned(run_, step);
  return one;
}

void CheckpointWriter::remove_old() {
  if (retention_.keep_last == 0) return;
  std::optional<FileError> news;
  try {
    std::vector<KeptCheckpoint> all;
    for (const int64_t step : checkpoint_steps(run_)) all.push_back(kept(step));
    for (const NotRemoved& each : remove_steps(run_, steps_to_remove(all, retention_)))
      if (told_.insert(each.step).second && !news) news = each.why;
  } catch (const FileError& error) {
    news = error;
  }
  if (news)
    throw OldCheckpointError(
        detail::concat("the checkpoint is saved, but an older one could not be removed: ", news->what()),
        news->code());
}

void CheckpointWriter::remove_newer_than(int64_t step) {
  std::vector<int64_t> steps = checkpoint_steps(run_);
  std::erase_if(steps, [&](int64_t each) { return each <= step; });
  const std::vector<NotRemoved> kept = remove_steps(run_, steps);
  // What has lost its name and not all of its files is no checkpoint any more: the next save removes the
  // rest.
  const std::vector<int64_t> left = checkpoint_steps(run_);
  for (const NotRemoved& one : kept)
    if (std::binary_search(left.begin(), left.end(), one.step)) throw FileError(one.why);
}

}  // namespace halfstep::files
