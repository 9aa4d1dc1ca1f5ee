// Gradients of many shapes and layouts, and single elements of them to spoil.
#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

namespace halfstep::testing {

enum class GradLayout { Contiguous, Transposed, Sliced };

inline std::string name_of(GradLayout layout) {
  constexpr const char* names[] = {"Contiguous", "Transposed", "Sliced"};
  return names[static_cast<int>(layout)];
}

// Thirty shapes of every rank from 0 to 4; sizes around the vector widths and their tails.
inline std::vector<std::vector<int64_t>> fault_shapes() {
  std::vector<std::vector<int64_t>> shapes = {{}, {1}, {2}, {7}, {8}, {9}, {15}, {16}, {17}, {31}};
  for (const int64_t n : {32, 33, 63, 64, 65, 127, 128, 129}) shapes.push_back({n});
  for (const int64_t n : {1, 3, 8, 17}) shapes.push_back({n, 5});
  for (const int64_t n : {2, 16}) shapes.push_back({3, n});
  for (const int64_t n : {2, 5, 8}) shapes.push_back({4, n, 3});
  shapes.push_back({2, 3, 3, 3});
  shapes.push_back({1, 1, 1, 1});
  shapes.push_back({});
  return shapes;
}

/// The same values in another memory layout.
inline torch::Tensor laid_out(const torch::Tensor& values, GradLayout layout) {
  switch (layout) {
    case GradLayout::Contiguous:
      return values.clone();
    case GradLayout::Transposed: {  // dense, dimensions stored in reverse; 0- and 1-dim tensors have one
                                    // order
      at::DimVector reversed;
      for (int64_t d = values.dim() - 1; d >= 0; --d) reversed.push_back(d);
      return values.permute(reversed).clone(at::MemoryFormat::Contiguous).permute(reversed);
    }
    case GradLayout::Sliced: {  // every second element of a larger buffer; a 0-dim one sits inside a vector
      auto buffer = torch::zeros({values.numel() * 2 + 1}, values.options());
      auto view = buffer.slice(0, 1, values.numel() * 2 + 1, 2).view(values.sizes());
      return view.copy_(values);
    }
  }
  return {};
}

/// By index, not through a flat copy: what is written lands in the strided tensor itself.
inline torch::Tensor element_of(const torch::Tensor& tensor, int64_t position) {
  torch::Tensor element = tensor;
  for (int64_t d = 0, rest = position, stride = tensor.numel(); d < tensor.dim(); ++d) {
    stride /= tensor.size(d);
    element = element.select(0, rest / stride);
    rest %= stride;
  }
  return element;
}

}  // namespace halfstep::testing
