// Checkpoints with a content that can be told from their step alone.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint_format/checkpoint_writer.h"
#include "support/scratch.h"

namespace halfstep::testing {

/// How large a checkpoint is, and how its bytes are divided.
struct ContentShape {
  int tensor_count = 4;
  size_t largest_bytes = 3000;
  uint64_t seed = 1;
};

/// Owns the bytes that a CheckpointToSave points to.
class Content {
 public:
  Content(ContentShape shape, int64_t step);
  const files::CheckpointToSave& checkpoint() const { return checkpoint_; }

 private:
  std::vector<std::vector<std::byte>> bytes_;
  files::CheckpointToSave checkpoint_;
};

/// What is wrong with the saved checkpoint of a step: damage, or a content that is not Content(shape, step);
/// "" if nothing is.
std::string fault_of(const std::filesystem::path& run, ContentShape shape, int64_t step);

}  // namespace halfstep::testing
