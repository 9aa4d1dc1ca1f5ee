// What a MixedPrecision holds of its models.
#pragma once

#include <halfstep/mixed_precision.h>

#include "train/buffer_guard.h"

namespace halfstep::train {

/// A tensor under two names is one, under the first.
struct Contents {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  NamedBuffers buffers;
};

/// An Error where there is no parameter, where two tensors have one name, and for gradients that will be
/// sparse.
Contents contents_of(const std::vector<NamedModel>& models);
Contents contents_of(const torch::jit::Module& model);
Contents contents_of(const std::vector<NamedParameter>& parameters);

}  // namespace halfstep::train
