#include "tensor/dense.h"

#include <halfstep/error.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>

#include <sstream>

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

std::string layout_text(const at::Tensor& tensor) {
  const auto numbers = [](at::IntArrayRef values) {
    std::string text;
    for (const int64_t value : values) {
      if (!text.empty()) text += 'x';
      text += std::to_string(value);
    }
    return text;
  };
  if (tensor.is_contiguous()) return numbers(tensor.sizes());
  return numbers(tensor.sizes()) + " by " + numbers(tensor.strides());
}

at::Tensor layout_of(const std::string& text) {
  const auto numbers = [](const std::string& part, std::vector<int64_t>& found) {
    std::istringstream stream(part);
    for (std::string number; std::getline(stream, number, 'x');) {
      if (number.empty() || number.size() > 18 || number.find_first_not_of("0123456789") != std::string::npos)
        return false;
      found.push_back(std::stoll(number));
    }
    return true;
  };
  std::vector<int64_t> sizes, strides;
  const std::size_t by = text.find(" by ");
  if (!numbers(text.substr(0, by), sizes)) return {};
  const auto options = at::TensorOptions(at::kMeta).dtype(at::kByte);
  if (by == std::string::npos) return at::empty(sizes, options);
  if (!numbers(text.substr(by + 4), strides) || strides.size() != sizes.size()) return {};
  return at::empty_strided(sizes, strides, options);
}

std::vector<Chunk> chunks_of(const std::vector<int64_t>& element_counts) {
  constexpr int64_t kMostElements = 1 << 15;
  std::vector<Chunk> chunks;
  for (std::size_t array = 0; array < element_counts.size(); ++array)
    for (int64_t first = 0; first < element_counts[array]; first += kMostElements)
      chunks.push_back({array, first, std::min(kMostElements, element_counts[array] - first)});
  return chunks;
}

void check_grad(const Param& param, const at::Tensor& grad) {
  HALFSTEP_CHECK(
      grad.layout() == at::kStrided, "the gradient of '", param.name, "' has layout ", grad.layout(),
      "; Halfstep's optimizers take dense ones. Build the embedding without sparse gradients, or use "
      "GradScaler with a torch::optim optimizer.");
  HALFSTEP_CHECK(grad.device() == param.working.device(), "the gradient of '", param.name, "' is on ",
                 grad.device(), ", its parameter on ", param.working.device(), ".");
  HALFSTEP_CHECK(training_format(grad.scalar_type()), "the gradient of '", param.name, "' is ",
                 grad.scalar_type(), "; Halfstep's optimizers take Float, BFloat16 and Half.");
  HALFSTEP_CHECK(grad.sizes() == param.working.sizes(), "the gradient of '", param.name, "' has shape ",
                 grad.sizes(), ", its parameter ", param.working.sizes(), ".");
}

at::Tensor grad_laid_out_as(const at::Tensor& working, const at::Tensor& grad) {
  if (grad.is_non_overlapping_and_dense() && same_layout(working, grad)) return grad;
  return at::empty_like(working, working.options().dtype(grad.scalar_type()).requires_grad(false))
      .copy_(grad);
}

}  // namespace halfstep
