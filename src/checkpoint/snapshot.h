// A checkpoint's values as bytes, ready to be written.
#pragma once

#include <halfstep/checkpoint.h>

#include <vector>

#include "checkpoint_format/checkpoint_writer.h"

namespace halfstep::checkpoint {

struct Snapshot {
  std::vector<at::Tensor> tensors;  // own the bytes that `content` points to
  files::CheckpointToSave content;
  uint64_t tensor_bytes = 0;
};

enum class Copies {
  WhereNeeded,  ///< the caller leaves the tensors alone until the write is done
  Always,       ///< training goes on meanwhile; only a tensor that nobody else holds is taken as it is
};

/// An Error that lists every value that cannot be saved: undefined, sparse, of a type that the format lacks.
Snapshot snapshot_of(const Checkpoint& checkpoint, Copies copies);

}  // namespace halfstep::checkpoint
