// Tensors as the raw arrays that the kernels take, and the walk over many of them by many threads.
#pragma once

#include <halfstep/formats.h>
#include <halfstep/params.h>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace halfstep {

/// FP32, BF16 or FP16; nothing for any other type.
std::optional<Format> training_format(c10::ScalarType type);

/// Whether an array over `a` and one over `b` have the same element at the same place.
bool same_layout(const at::Tensor& a, const at::Tensor& b);

/// A shape and the order in which its elements lie in memory, as text: "64x32", "8x3x5x5 by 75x1x15x3".
std::string layout_text(const at::Tensor& tensor);
/// A tensor without memory of that shape and order; undefined for another text.
at::Tensor layout_of(const std::string& text);

/// A run of elements of one of several arrays.
struct Chunk {
  std::size_t array = 0;
  int64_t first_element = 0;
  int64_t count = 0;
};

/// Cuts arrays into runs of at most 2^15 elements: with AdamW about 1 MB of memory traffic each, enough to
/// hide the cost of handing it out, little enough to keep all threads busy to the end.
std::vector<Chunk> chunks_of(const std::vector<int64_t>& element_counts);

/// visit(index) for each chunk, on all of LibTorch's threads, each taking the next one that is left.
template <typename Visit>
void for_each_chunk(std::size_t chunk_count, Visit visit) {
  std::atomic<std::size_t> next = 0;
  const auto work = [&](int64_t, int64_t) {
    for (std::size_t i = next++; i < chunk_count; i = next++) visit(i);
  };
  const auto workers = std::min<int64_t>(at::get_num_threads(), static_cast<int64_t>(chunk_count));
  at::parallel_for(0, workers, 1, work);
}

/// The address of an element in an array whose elements have this many bytes.
inline void* address_of(void* array, int64_t element, std::size_t element_bytes) {
  return array ? static_cast<char*>(array) + element * static_cast<int64_t>(element_bytes) : nullptr;
}
inline const void* address_of(const void* array, int64_t element, std::size_t element_bytes) {
  return array ? static_cast<const char*>(array) + element * static_cast<int64_t>(element_bytes) : nullptr;
}

/// An Error by name for a gradient that the kernels cannot read: sparse, FP64, another shape or device.
void check_grad(const Param& param, const at::Tensor& grad);

/// The gradient itself where it is laid out as the working copy, else a copy that is. LibTorch's own fused
/// optimizers read a transposed gradient as if it were not (2.13; tests/optim/layout_test.cpp).
at::Tensor grad_laid_out_as(const at::Tensor& working, const at::Tensor& grad);

}  // namespace halfstep
