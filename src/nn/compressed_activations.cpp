#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/where.h>
#include <halfstep/activations.h>
#include <halfstep/error.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>
#include <span>
#include <string_view>

#include "kernels/cast.h"
#include "tensor/dense.h"
#include "tensor/saved_tensors.h"
#include "tensor/update_path.h"

namespace halfstep {
namespace {

constexpr int64_t kFewestElements = 512;

/// Nodes that hand on one tensor's values in another shape, order or type.
constexpr std::string_view kHandsOn[] = {
    "AliasBackward0",        "CloneBackward0",      "ExpandBackward0",    "PermuteBackward0",
    "ReshapeAliasBackward0", "SelectBackward0",     "SliceBackward0",     "SplitBackward0",
    "SqueezeBackward0",      "SqueezeBackward1",    "TBackward0",         "ToCopyBackward0",
    "TransposeBackward0",    "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0",
};

/// Whether the tensor is a parameter seen or cast in another way: a weight, not an activation.
bool is_a_form_of_a_parameter(const at::Tensor& tensor) {
  for (const torch::autograd::Node* node = tensor.grad_fn().get(); node;) {
    const std::string name = node->name();
    if (name == "torch::autograd::AccumulateGrad") return true;
    if (std::find(std::begin(kHandsOn), std::end(kHandsOn), name) == std::end(kHandsOn)) return false;
    if (node->num_outputs() != 1) return false;
    node = node->next_edge(0).function.get();
  }
  return false;
}

/// Backward takes exp of it, which turns an absolute error into a relative one.
bool is_a_logarithm(const at::Tensor& tensor) {
  return tensor.grad_fn() && tensor.grad_fn()->name() == "LogSoftmaxBackward0";
}

bool is_activation(const at::Tensor& tensor) {
  return !ExactSavedTensors::asked_for() && !is_a_logarithm(tensor) && tensor.is_floating_point() &&
         tensor.layout() == at::kStrided && tensor.requires_grad() && tensor.numel() >= kFewestElements &&
         !is_a_form_of_a_parameter(tensor);
}

// Tensors as FP8 codes with one power of two for each block of elements.
constexpr int64_t kFp8BlockElements = 128, kBlocksATask = 64;

int64_t block_count(int64_t elements) { return (elements + kFp8BlockElements - 1) / kFp8BlockElements; }

Format format_of(at::ScalarType type) {
  const auto format = training_format(type);
  if (!format) HALFSTEP_BUG("no FP8 blocks of ", type);
  return *format;
}

/// The largest exponent that brings `largest` to at most `max`; such that 2^exponent and its inverse are
/// normal.
int exponent_for(float largest, double max) {
  if (largest == 0 || !std::isfinite(largest)) return 0;
  int exponent = std::ilogb(max) - std::ilogb(largest);
  if (std::ldexp(static_cast<double>(largest), exponent) > max) --exponent;
  return std::clamp(exponent, -126, 126);
}

/// NaN where there is one: it must not hide behind a comparison.
float largest_magnitude(std::span<const float> values) {
  float largest = 0;
  for (const float value : values) {
    const float magnitude = std::fabs(value);
    if (!(magnitude <= largest)) largest = magnitude;
    if (std::isnan(largest)) break;
  }
  return largest;
}

/// body(block, first element, element count) for each block, by several threads.
template <typename Body>
void for_each_block(int64_t elements, Body body) {
  at::parallel_for(0, block_count(elements), kBlocksATask, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kFp8BlockElements;
      body(block, first, std::min(kFp8BlockElements, elements - first));
    }
  });
}

/// FP32, BF16 or FP16 elements in a row on a CPU to bytes: the codes, then one exponent (int8) a block, by
/// whose power of two the block was multiplied. Values are held at the format's max; what is not finite stays
/// so.
at::Tensor fp8_blocks(const at::Tensor& flat, Format format) {
  const int64_t elements = flat.numel();
  const Format given = format_of(flat.scalar_type());
  at::Tensor bytes = at::empty({elements + block_count(elements)}, flat.options().dtype(at::kByte));
  auto* const codes = bytes.mutable_data_ptr<uint8_t>();
  auto* const exponents = reinterpret_cast<int8_t*>(codes + elements);
  const auto* const source = static_cast<const char*>(flat.const_data_ptr());
  const auto element_bytes = static_cast<int64_t>(flat.element_size());
  for_each_block(elements, [&](int64_t block, int64_t first, int64_t count) {
    std::array<float, kFp8BlockElements> buffer;
    const std::span<float> values(buffer.data(), static_cast<std::size_t>(count));
    if (given == Format::FP32) {
      std::copy_n(reinterpret_cast<const float*>(source) + first, count, values.begin());
    } else {
      decode(source + first * element_bytes, given, values);
    }
    const int exponent = exponent_for(largest_magnitude(values), traits(format).max);
    const float factor = std::ldexp(1.0f, exponent);
    for (float& value : values) value *= factor;
    cast(values, format, {}, codes + first);
    exponents[block] = static_cast<int8_t>(exponent);
  });
  return bytes;
}

/// Back, into as many elements in a row. Exact, but for an FP16 or subnormal FP32 result that cannot hold it.
void decode_fp8_blocks(const at::Tensor& bytes, Format format, const at::Tensor& flat) {
  const int64_t elements = flat.numel();
  const Format wanted = format_of(flat.scalar_type());
  const auto* const codes = bytes.const_data_ptr<uint8_t>();
  const auto* const exponents = reinterpret_cast<const int8_t*>(codes + elements);
  auto* const target = static_cast<char*>(flat.mutable_data_ptr());
  const auto element_bytes = static_cast<int64_t>(flat.element_size());
  for_each_block(elements, [&](int64_t block, int64_t first, int64_t count) {
    std::array<float, kFp8BlockElements> buffer;
    const std::span<float> values(buffer.data(), static_cast<std::size_t>(count));
    decode(codes + first, format, values);
    const float factor = std::ldexp(1.0f, -exponents[block]);
    for (float& value : values) value *= factor;
    if (wanted == Format::FP32) {
      std::copy(values.begin(), values.end(), reinterpret_cast<float*>(target) + first);
    } else {
      cast(values, wanted, {}, target + first * element_bytes);
    }
  });
}

at::ScalarType fp8_type(Format format) {
  return format == Format::E4M3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2;
}

/// 2^exponents: the bits of FP32, without a power's rounding.
at::Tensor powers_of_two(const at::Tensor& exponents) {
  return ((exponents + 127) * (1 << 23)).view(at::kFloat);
}

/// fp8_blocks and decode_fp8_blocks by ATen's operations, where our kernels do not run: the same bytes, but
/// for the payload of NaNs.
at::Tensor fp8_blocks_by_aten(const at::Tensor& flat, Format format) {
  const int64_t elements = flat.numel(), blocks = block_count(elements);
  const double max = traits(format).max;
  const at::Tensor values =
      at::constant_pad_nd(flat.to(at::kFloat), {0, blocks * kFp8BlockElements - elements})
          .view({blocks, kFp8BlockElements});
  const at::Tensor largest = values.abs().amax(1);
  const auto [fraction, exponent] = at::frexp(largest);  // from 1/2 up to below 1
  const at::Tensor lower = fraction.gt(std::ldexp(max, -std::ilogb(max) - 1));
  const at::Tensor raised = (std::ilogb(max) + 1 - exponent - lower.to(at::kInt)).clamp_(-126, 126);
  const at::Tensor exponents =
      raised.masked_fill(largest.eq(0).logical_or(at::isfinite(largest).logical_not()), 0);
  const at::Tensor scaled = values * powers_of_two(exponents).unsqueeze(1);
  // LibTorch 2.13 makes E4M3's max of an Inf, which must stay visible.
  const at::Tensor held = scaled.clamp(-max, max);
  const at::Tensor marked = format == Format::E4M3 ? held.masked_fill(at::isinf(scaled), NAN)
                                                   : at::where(at::isinf(scaled), scaled, held);
  const at::Tensor codes = marked.flatten().narrow(0, 0, elements).to(fp8_type(format));
  return at::cat({codes.view(at::kByte), exponents.to(at::kChar).view(at::kByte)});
}

at::Tensor decoded_by_aten(const at::Tensor& bytes, Format format, at::ScalarType type) {
  const int64_t blocks = (bytes.numel() + kFp8BlockElements) / (kFp8BlockElements + 1);
  const int64_t elements = bytes.numel() - blocks;
  const at::Tensor exponents = bytes.narrow(0, elements, blocks).view(at::kChar).to(at::kInt);
  const at::Tensor values = bytes.narrow(0, 0, elements).view(fp8_type(format)).to(at::kFloat);
  const at::Tensor factors =
      powers_of_two(exponents.neg()).unsqueeze(1).expand({blocks, kFp8BlockElements}).flatten();
  return (values * factors.narrow(0, 0, elements)).to(type);
}

/// The elements as they lie in memory.
at::Tensor flat(const at::Tensor& dense) {
  return dense.as_strided({dense.numel()}, {1}, dense.storage_offset());
}

class Compressor final : public SavedTensorPacker {
 public:
  explicit Compressor(Format format) : format_(format) {}

  std::optional<PackedTensor> pack(const at::Tensor& tensor) override {
    if (!is_activation(tensor)) return std::nullopt;
    const at::ScalarType type = tensor.scalar_type();
    if (format_ == Format::BF16) {
      if (type != at::kFloat) return std::nullopt;
      return PackedTensor{once(tensor, [](const at::Tensor& t) { return t.to(at::kBFloat16); }),
                          [](const at::Tensor& kept) { return kept.to(at::kFloat); }};
    }
    if (type != at::kFloat && type != at::kBFloat16 && type != at::kHalf) return std::nullopt;
    // In the order of its elements in memory, gaps left out: what is computed from it again has that order
    // too.
    const at::Tensor dense =
        tensor.is_non_overlapping_and_dense() ? tensor : tensor.clone(at::MemoryFormat::Preserve);
    return PackedTensor{
        once(tensor,
             [&](const at::Tensor&) {
               const at::Tensor values = flat(dense.detach());
               return kernels_serve(values) ? fp8_blocks(values, format_)
                                            : fp8_blocks_by_aten(values, format_);
             }),
        [format = format_, sizes = dense.sizes().vec(), strides = dense.strides().vec(),
         options = dense.options()](const at::Tensor& kept) {
          at::Tensor restored = at::empty_strided(sizes, strides, options);
          if (kernels_serve(kept))
            decode_fp8_blocks(kept, format, flat(restored));
          else
            flat(restored).copy_(decoded_by_aten(kept, format, c10::typeMetaToScalarType(options.dtype())));
          return restored;
        }};
  }

 private:
  /// What was made of a tensor not long ago. The storage is held weakly, which keeps its address from being
  /// used again.
  struct Made {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
    int64_t offset = 0, version = 0;
    std::vector<int64_t> sizes, strides;
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> kept{
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  };

  /// Several operations may save one tensor, as three projections of one input do: keep one copy for all.
  template <typename Make>
  at::Tensor once(const at::Tensor& tensor, Make make) {
    const std::lock_guard lock(mutex_);
    for (const Made& made : made_) {
      if (made.storage._unsafe_get_target() != tensor.storage().unsafeGetStorageImpl() ||
          made.offset != tensor.storage_offset() || made.version != tensor._version() ||
          tensor.sizes() != made.sizes || tensor.strides() != made.strides || made.storage.expired())
        continue;
      if (auto kept = made.kept.lock()) return at::Tensor(std::move(kept));
    }
    at::Tensor kept = make(tensor);
    made_[next_++ % made_.size()] = {
        tensor.storage().getWeakStorageImpl(),
        tensor.storage_offset(),
        tensor._version(),
        tensor.sizes().vec(),
        tensor.strides().vec(),
        c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(kept.getIntrusivePtr())};
    return kept;
  }

  Format format_;
  std::mutex mutex_;
  std::array<Made, 8> made_;
  std::size_t next_ = 0;
};

}  // namespace

CompressedActivations::CompressedActivations(Format format) {
  HALFSTEP_CHECK(format == Format::BF16 || format == Format::E4M3 || format == Format::E5M2,
                 "CompressedActivations: cannot keep activations in ", traits(format).name,
                 ". Use Format::BF16, Format::E4M3 or Format::E5M2.");
  scope_ = std::make_unique<SavedTensorScope>(std::make_shared<Compressor>(format), "CompressedActivations");
}

CompressedActivations::~CompressedActivations() = default;

}  // namespace halfstep
