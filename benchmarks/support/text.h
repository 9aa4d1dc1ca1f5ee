// Real text to train on, as bytes.
#pragma once

#include <torch/torch.h>

namespace bench {

/// tinyshakespeare as int64 byte values, [1115394]. Found through the Python that tools/setup made, or that
/// HALFSTEP_PYTHON names; an Error with the remedy if that Python has no such text.
torch::Tensor tiny_shakespeare();

struct Batch {
  torch::Tensor tokens;   ///< int64, [sequences, length]
  torch::Tensor targets;  ///< the byte after each
};

/// Sequences from places in `text` that `generator` picks.
Batch random_batch(const torch::Tensor& text, int64_t sequences, int64_t length, at::Generator generator);

/// The same number of sequences from places spread evenly over `text`: the same ones at every call.
Batch even_batch(const torch::Tensor& text, int64_t sequences, int64_t length);

}  // namespace bench
