#include "tensor/param_checks.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/max.h>
#include <halfstep/error.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "kernels/update.h"
#include "tensor/dense.h"

namespace halfstep {

namespace {

/// The largest magnitude; nothing where a value is not finite.
std::optional<double> largest_on_host(const at::Tensor& values) {
  const auto* data = values.const_data_ptr<float>();
  const auto chunks = chunks_of({values.numel()});
  std::atomic<bool> finite = true;
  std::atomic<float> largest = 0;
  for_each_chunk(chunks.size(), [&](std::size_t i) {
    const float* first = data + chunks[i].first_element;
    if (!std::isfinite(sum_of_squares(Format::FP32, first, chunks[i].count))) {
      finite = false;
      return;
    }
    const float here = std::abs(*std::max_element(
        first, first + chunks[i].count, [](float a, float b) { return std::abs(a) < std::abs(b); }));
    for (float seen = largest; here > seen && !largest.compare_exchange_weak(seen, here);) continue;
  });
  return finite ? std::optional<double>(largest.load()) : std::nullopt;
}

/// The same on an accelerator. Waits for it.
std::optional<double> largest_on_device(const at::Tensor& values) {
  const double largest = values.numel() == 0 ? 0.0 : values.abs().max().item<double>();
  return std::isfinite(largest) ? std::optional(largest) : std::nullopt;
}

}  // namespace

void check_values_fit(const std::string& name, const at::Tensor& values, c10::ScalarType type) {
  const std::optional<double> largest = values.is_cpu() ? largest_on_host(values) : largest_on_device(values);
  HALFSTEP_CHECK(largest, "parameter '", name,
                 "' holds an Inf or a NaN. No training recovers from that: fix its initialisation or the "
                 "file that it was loaded from.");
  const double max = traits(*training_format(type)).max;
  HALFSTEP_CHECK(*largest <= max, "parameter '", name, "' holds a value of magnitude ", *largest,
                 "; the largest in ", type, " is ", max, ". Scale it down or train in BF16.");
}

void check_can_be_param(const std::string& name, const at::Tensor& parameter, WeightStorage storage,
                        c10::ScalarType low) {
  HALFSTEP_CHECK(!name.empty(), "a parameter has no name: reports and saved states use it.");
  HALFSTEP_CHECK(parameter.defined(), "parameter '", name, "' is an undefined tensor.");
  HALFSTEP_CHECK(
      parameter.scalar_type() == at::kFloat, "parameter '", name, "' is ", parameter.scalar_type(),
      ", expected Float: the full values are kept before the model is rounded. If a MixedPrecision holds "
      "this model, use that one: it has rounded the parameters, and a second one cannot. Else "
      "remove the model's own to(...) and give it to Halfstep in FP32.");
  HALFSTEP_CHECK(parameter.layout() == at::kStrided && parameter.is_non_overlapping_and_dense(),
                 "parameter '", name, "' is not dense (sizes ", parameter.sizes(), ", strides ",
                 parameter.strides(), "): make it so with contiguous() before training.");
  HALFSTEP_CHECK(storage == WeightStorage::Fp32 || low == at::kBFloat16 || low == at::kHalf, "parameter '",
                 name, "': a working copy in ", low, " was asked for; expected BFloat16 or Half.");
  HALFSTEP_CHECK(storage != WeightStorage::SplitMaster || low == at::kBFloat16, "parameter '", name,
                 "': a split master needs a BFloat16 working copy, whose 16 bits are the upper half of FP32; "
                 "with ",
                 low, " use WeightStorage::Fp32Master.");
  check_values_fit(name, parameter.detach(), storage == WeightStorage::Fp32 ? at::kFloat : low);
}

void check_memory_apart(const char* whose, const std::vector<NamedTensor>& tensors) {
  struct Span {
    const char* begin;
    const char* end;
    const std::string* name;
  };
  std::vector<Span> spans;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor->defined() || tensor->numel() == 0) continue;
    const auto* begin = static_cast<const char*>(tensor->const_data_ptr());
    spans.push_back({begin, begin + tensor->nbytes(), name});
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < spans.size(); ++i)
    HALFSTEP_CHECK(spans[i].begin >= spans[i - 1].end, whose, ": '", *spans[i - 1].name, "' and '",
                   *spans[i].name,
                   "' share memory. Tie weights by registering the same tensor twice, or give "
                   "each its own with clone().");
}

}  // namespace halfstep
