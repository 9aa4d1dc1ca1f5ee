#include "tensor/dense.h"

namespace halfstep {

std::optional<Format> training_format(c10::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return Format::FP32;
    case at::kBFloat16:
      return Format::BF16;
    case at::kHalf:
      return Format::FP16;
    default:
      return std::nullopt;
  }
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (int64_t d = 0; d < a.dim(); ++d)
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  return true;
}

std::vector<Chunk> chunks_of(const std::vector<int64_t>& element_counts) {
  constexpr int64_t kMostElements = 1 << 15;
  std::vector<Chunk> chunks;
  for (std::size_t array = 0; array < element_counts.size(); ++array)
    for (int64_t first = 0; first < element_counts[array]; first += kMostElements)
      chunks.push_back({array, first, std::min(kMostElements, element_counts[array] - first)});
  return chunks;
}

}  // namespace halfstep
