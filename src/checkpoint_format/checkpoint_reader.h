// One checkpoint, read back with every byte checked.
#pragma once

#include <functional>
#include <optional>

#include "checkpoint_format/manifest.h"
#include "io/input_file.h"

namespace halfstep::files {

class CheckpointReader {
 public:
  /// Checks the manifest, the size of the tensors' file and its header.
  CheckpointReader(const std::filesystem::path& run, int64_t step);
  /// What rank 1, 2, ... has written of a checkpoint that several ranks have saved: `first` is rank 0's.
  CheckpointReader(const CheckpointReader& first, std::size_t rank);

  const Manifest& manifest() const { return manifest_; }

  /// A tensor's bytes into `into`, which has room for exactly them; an Error if their hash is another.
  void read(const ManifestPart& part, const ManifestTensor& tensor, std::span<std::byte> into) const;

  /// The fault of each tensor that is damaged; none if all are whole.
  std::vector<std::string> faults() const;

 private:
  enum class Open { Always, WhileRead };
  CheckpointReader(const std::filesystem::path& folder, int64_t step, const Sha256Text* expected, Open open);
  /// `use` of the tensors' file.
  template <typename Use>
  void with_file(Use use) const {
    if (tensors_) return use(*tensors_);
    use(InputFile(path_));
  }

  std::filesystem::path folder_, path_;
  Manifest manifest_;
  /// Rank 0's, which stays readable while somebody removes it. Of other ranks there may be more than a
  /// process can have open.
  std::optional<InputFile> tensors_;
};

/// All that is wrong with a checkpoint, each in a sentence; none if it is whole.
std::vector<std::string> verify_checkpoint(const std::filesystem::path& run, int64_t step);

}  // namespace halfstep::files
