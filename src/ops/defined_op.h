// Operations that LibTorch lacks, for the files of their rows.
#pragma once

#include <torch/library.h>

#include <memory>

namespace halfstep {

/// An operation halfstep::... that LibTorch lacks, for its row to keep. `chain` computes it by LibTorch's
/// operations, which differentiate it and follow their own rows: on every device, and for all arguments that
/// the row does not take.
template <typename Chain>
std::unique_ptr<torch::Library> defined(const char* schema, Chain* chain) {
  auto library = std::make_unique<torch::Library>(torch::Library::FRAGMENT, "halfstep", std::nullopt,
                                                  __FILE__, __LINE__);
  library->def(schema, chain);
  return library;
}

}  // namespace halfstep
