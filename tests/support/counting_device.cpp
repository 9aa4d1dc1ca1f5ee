#include "support/counting_device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/convolution.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace halfstep::testing {
namespace {

using Stack = torch::jit::Stack;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;

// ---- what is counted

struct Device {
  std::mutex mutex;
  DeviceCounts counts;
  int forbidden_waits = 0;
  std::vector<std::function<void()>> under_way;  // non-blocking copies
  std::recursive_mutex arrivals;  // held while they arrive: a thread that asks meanwhile sees all or none
};

Device& device() {
  static auto* const it = new Device;  // outlives tensors in static variables
  return *it;
}

void count_launch(const std::string& op) {
  const std::lock_guard lock(device().mutex);
  ++device().counts.launches;
  ++device().counts.launches_of[op];
}

void count_bytes(int64_t DeviceCounts::* direction, size_t bytes) {
  const std::lock_guard lock(device().mutex);
  device().counts.*direction += static_cast<int64_t>(bytes);
}

void wait_because_of(const std::string& cause) {
  const std::lock_guard all_or_none(device().arrivals);
  std::vector<std::function<void()>> arriving;
  {
    const std::lock_guard lock(device().mutex);
    TORCH_CHECK(device().forbidden_waits == 0, "counting device: ", cause,
                " waits for the device, which is forbidden here.");
    ++device().counts.waits;
    ++device().counts.waits_for[cause];
    arriving.swap(device().under_way);
  }
  for (const auto& arrive : arriving) arrive();
}

void until_next_wait(std::function<void()> arrive) {
  const std::lock_guard lock(device().mutex);
  device().under_way.push_back(std::move(arrive));
}

// ---- memory

// An address of the device is the host's plus this: above what x86-64 and aarch64 can map.
constexpr uintptr_t kAboveAllMemory = uintptr_t{1} << 52;

/// What the context of an allocation points to: the same bytes as the kernels see them.
struct Allocation {
  c10::Storage host;
};

c10::Storage host_storage(size_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t{}, bytes, c10::GetCPUAllocator(), /*resizable=*/true);
}

c10::DataPtr device_pointer(c10::Storage host) {
  auto* const address = static_cast<char*>(host.mutable_data());
  return {address ? address + kAboveAllMemory : nullptr, new Allocation{std::move(host)},
          [](void* context) { delete static_cast<Allocation*>(context); }, kCountingDevice};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return device_pointer(host_storage(bytes)); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(static_cast<char*>(to) - kAboveAllMemory, static_cast<const char*>(from) - kAboveAllMemory,
                bytes);
  }
};

DeviceAllocator& allocator() {
  static auto* const it = new DeviceAllocator;
  return *it;
}

Allocation& allocation_of(const c10::Storage& storage) {
  auto* const found = static_cast<Allocation*>(storage.data_ptr().get_context());
  TORCH_CHECK(found, "counting device: a storage that it did not allocate");
  return *found;
}

at::Tensor laid_out_as(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  at::Tensor made =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

/// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  return laid_out_as(tensor, allocation_of(tensor.storage()).host, c10::DispatchKey::CPU);
}

/// The memory of a tensor of the CPU becomes memory of the device.
at::Tensor on_device(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const size_t bytes = tensor.storage().nbytes();
  return laid_out_as(tensor,
                     {c10::Storage::use_byte_size_t{}, bytes, device_pointer(tensor.storage()), &allocator(),
                      /*resizable=*/true},
                     kKey);
}

// ---- what CUDA refuses

/// Operations of LibTorch 2.13 with a CPU kernel, without one for CUDA and without one that is composed of
/// others. The test compares them with LibTorch's own list of operations.
constexpr std::string_view kWithoutCudaKernel[] = {
    "aten::_add_relu.Scalar",
    "aten::_add_relu.Tensor",
    "aten::_add_relu.out",
    "aten::_add_relu_.Scalar",
    "aten::_add_relu_.Tensor",
    "aten::_convert_weight_to_int4pack_for_cpu",
    "aten::_dyn_quant_matmul_4bit",
    "aten::_dyn_quant_pack_4bit_weight",
    "aten::_empty_affine_quantized",
    "aten::_empty_per_channel_affine_quantized",
    "aten::_foobar",
    "aten::_functional_assert_async.msg",
    "aten::_histogramdd_bin_edges",
    "aten::_histogramdd_from_bin_cts",
    "aten::_histogramdd_from_bin_tensors",
    "aten::_make_dep_token",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_spdiags",
    "aten::_test_functorch_fallback",
    "aten::_test_optional_filled_intlist",
    "aten::_test_optional_floatlist",
    "aten::_test_optional_intlist",
    "aten::_upsample_lanczos2d_aa.out",
    "aten::_upsample_lanczos2d_aa_backward.grad_input",
    "aten::_weight_int4pack_mm_for_cpu",
    "aten::from_file",
    "aten::histogram.bin_ct",
    "aten::histogram.bin_ct_out",
    "aten::histogram.bins_tensor",
    "aten::histogram.bins_tensor_out",
    "aten::mkldnn_rnn_layer",
    "aten::mkldnn_rnn_layer_backward",
    "aten::narrow_copy.out",
    "aten::quantize_per_tensor.tensors",
    "aten::slow_conv3d_forward",
    "aten::slow_conv3d_forward.output",
    "aten::to_mkldnn",
};

using TensorLists = std::vector<std::vector<at::Tensor>>;

/// A combination of types that the CPU's kernels take and CUDA's do not.
struct TypeContract {
  std::string_view op;  // as its name begins
  std::string_view source;
  bool (*holds)(const TensorLists& lists);
};

bool all_of_type(const std::vector<at::Tensor>& tensors, at::ScalarType type) {
  return std::ranges::all_of(tensors, [&](const at::Tensor& t) { return t.scalar_type() == type; });
}

bool all_alike(const TensorLists& lists, size_t count) {
  for (size_t i = 0; i < std::min(count, lists.size()); ++i)
    if (!all_of_type(lists[i], lists[0][0].scalar_type())) return false;
  return true;
}

constexpr TypeContract kTypeContracts[] = {
    {"aten::_fused_adam",
     "ATen/native/cuda/fused_adam_utils.cuh of LibTorch 2.13: one type for all, or FP32 "
     "parameters and gradients with BF16 moments",
     [](const TensorLists& lists) {  // params, grads, first moments, second moments, maxima, steps
       const bool bf16_moments = all_of_type(lists[0], at::kFloat) && all_of_type(lists[1], at::kFloat) &&
                                 all_of_type(lists[2], at::kBFloat16) && all_of_type(lists[3], at::kBFloat16);
       return (bf16_moments || all_alike(lists, 4)) && all_of_type(lists.back(), at::kFloat);
     }},
    {"aten::_fused_sgd", "ATen/native/cuda/FusedSgdKernel.cu: one type for all",
     [](const TensorLists& lists) { return all_alike(lists, 3); }},
    {"aten::_amp_foreach_non_finite_check_and_unscale",
     "ATen/native/cuda/AmpKernels.cu: one type a call, and not BFloat16 (pytorch/pytorch#127176)",
     [](const TensorLists& lists) { return all_alike(lists, 1) && !all_of_type(lists[0], at::kBFloat16); }},
};

void check_types(const std::string& op, const TensorLists& lists) {
  for (const TypeContract& contract : kTypeContracts)
    if (op.starts_with(contract.op) && !lists.empty() && !lists[0].empty())
      TORCH_CHECK_NOT_IMPLEMENTED(contract.holds(lists), "counting device: ", op,
                                  " with types that CUDA does not take. ", contract.source);
}

/// Fused optimizers of CUDA read their scalars on the device; a CPU scalar would be read on the host.
void check_scalars(const std::string& op, const Stack& arguments) {
  if (!op.starts_with("aten::_fused_")) return;
  for (const c10::IValue& argument : arguments)
    if (argument.isTensor() && argument.toTensor().defined())
      TORCH_CHECK(argument.toTensor().is_privateuseone(), "counting device: ", op,
                  ": lr, grad_scale and found_inf must be tensors of the device.");
}

/// Layouts and types of products of FP8: ATen/native/cuda/ScaledBlas.cpp of LibTorch 2.13.
void check_scaled_mm(const std::string& op, const Stack& arguments) {
  if (op != "aten::_scaled_mm") return;
  const at::Tensor a = arguments[0].toTensor(), b = arguments[1].toTensor(),
                   scale_a = arguments[2].toTensor();
  const auto output = arguments[6].isNone() ? a.scalar_type() : arguments[6].toScalarType();
  TORCH_CHECK(a.stride(1) == 1 && a.stride(0) >= a.size(1), "counting device: ", op,
              ": self must be row-major.");
  TORCH_CHECK(b.stride(0) == 1 && b.stride(1) >= b.size(0), "counting device: ", op,
              ": mat2 must be column-major.");
  TORCH_CHECK(a.size(1) % 16 == 0 && b.size(0) % 16 == 0 && b.size(1) % 16 == 0, "counting device: ", op,
              ": sizes must be multiples of 16.");
  TORCH_CHECK(a.scalar_type() != at::kFloat8_e5m2 || b.scalar_type() != at::kFloat8_e5m2,
              "counting device: ", op, ": not both may be E5M2.");
  TORCH_CHECK(arguments[4].isNone() || output != at::kFloat, "counting device: ", op,
              ": no bias beside FP32.");
  TORCH_CHECK(arguments[4].isNone() || arguments[4].toTensor().scalar_type() == output,
              "counting device: ", op, ": the bias must have the output's type.");
  TORCH_CHECK(scale_a.numel() == 1 || output == at::kBFloat16, "counting device: ", op,
              ": scales of rows give BF16.");
}

/// Results whose shape depends on values: CUDA's kernels wait for it.
bool waits_for_shape(const std::string& op, const Stack& arguments) {
  static constexpr std::string_view kNames[] = {"aten::nonzero",
                                                "aten::masked_select",
                                                "aten::_unique",
                                                "aten::_unique2",
                                                "aten::unique_dim",
                                                "aten::unique_consecutive",
                                                "aten::equal",
                                                "aten::bincount",
                                                "aten::unique_dim_consecutive",
                                                "aten::repeat_interleave"};
  if (std::ranges::find(kNames, op) != std::end(kNames)) return true;
  if (op != "aten::_index_put_impl_") return false;  // aten::index calls aten::nonzero itself
  for (const c10::IValue& argument : arguments) {
    if (!argument.isOptionalTensorList()) continue;
    for (const std::optional<at::Tensor>& index : argument.toOptionalTensorVector())
      if (index && index->defined() && index->scalar_type() == at::kBool) return true;
  }
  return false;
}

/// Indices may stay on the host, as with CUDA.
bool takes_tensors_of_the_host(const std::string& op) {
  return op == "aten::index" || op == "aten::_index_put_impl_" || op == "aten::index_put_";
}

// ---- any operation

/// `change` applied to every tensor in `value`.
template <typename Change>
c10::IValue changed(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice() == kCountingDevice) return at::Device(at::kCPU);
  return value;
}

/// The tensors of one call as the CPU's kernel sees them, and the way back.
class Translation {
 public:
  explicit Translation(std::string op) : op_(std::move(op)) {}

  at::Tensor to_host(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!is_ours(tensor)) {
      TORCH_CHECK(tensor.dim() == 0 || takes_tensors_of_the_host(op_), "counting device: ", op_,
                  ": expected all tensors to be on the same device, found one on ", tensor.device(),
                  " and one on ", kCountingDevice);
      return tensor;
    }
    for (const auto& [ours, host] : pairs_)
      if (ours.is_same(tensor)) return host;
    pairs_.emplace_back(tensor, on_host(tensor));
    return pairs_.back().second;
  }

  /// An argument itself, a view of one, or a new tensor.
  at::Tensor to_device(const at::Tensor& result) {
    if (!result.defined()) return result;
    for (const auto& [ours, host] : pairs_)
      if (host.is_same(result)) return ours;
    for (const auto& [ours, host] : pairs_)
      if (host.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl())
        return laid_out_as(result, ours.storage(), kKey);
    made_one_ = true;
    return on_device(result);
  }

  /// What the kernel changed of the shape or the memory of an argument: `out` arguments, squeeze_.
  void take_over_shapes() {
    for (const auto& [ours, host] : pairs_) {
      const c10::Storage& storage = ours.storage();
      const c10::Storage present = allocation_of(storage).host;
      auto* const address = static_cast<char*>(present.mutable_data());
      if ((address ? address + kAboveAllMemory : nullptr) != storage.data_ptr().get()) {
        storage.set_data_ptr_noswap(device_pointer(present));
        storage.set_nbytes(present.nbytes());
      }
      if (host.sizes() != ours.sizes() || host.strides() != ours.strides() ||
          host.storage_offset() != ours.storage_offset())
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(),
                                                          host.storage_offset());
    }
  }

  bool made_a_tensor() const { return made_one_; }

 private:
  std::string op_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;  // ours, the host's
  bool made_one_ = false;
};

bool writes_to_an_argument(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::inplace_view)) return false;
  return std::ranges::any_of(op.schema().arguments(), [](const c10::Argument& argument) {
    return argument.alias_info() && argument.alias_info()->isWrite();
  });
}

/// CUDA's fused Adam takes BF16 moments beside FP32 parameters, the CPU's does not: FP32 ones for the time of
/// the call.
class WiderMoments {
 public:
  WiderMoments(const std::string& op, Stack& stack, size_t begin) {
    constexpr size_t kFirstMoments = 2, kSecondMoments = 3;
    if (!op.starts_with("aten::_fused_adam") ||
        stack[begin].toTensorVector()[0].scalar_type() ==
            stack[begin + kFirstMoments].toTensorVector()[0].scalar_type())
      return;
    for (const size_t list : {kFirstMoments, kSecondMoments})
      stack[begin + list] = changed(stack[begin + list], [&](const at::Tensor& low) {
        pairs_.emplace_back(low, low.to(at::kFloat));
        return pairs_.back().second;
      });
  }
  void round_back() const {
    for (const auto& [low, wide] : pairs_) low.copy_(wide);
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

/// A host without instructions for the type takes its products in FP32, as a scope does there: the same bits
/// and many times faster.
std::atomic<int> stock_products{0};

bool host_has_products_of(at::ScalarType type) {
  if (stock_products.load() > 0) return true;
  if (type == at::kBFloat16) return __builtin_cpu_supports("avx512bf16");
  return type != at::kHalf || __builtin_cpu_supports("avx512fp16");
}

/// The arguments of a product, or of the sum that is a bias's gradient, in FP32 for the time of the call.
class WideProduct {
 public:
  WideProduct(const std::string& op, Stack& stack, size_t begin) {
    static constexpr std::string_view kProducts[] = {"aten::mm.out",      "aten::addmm.out",
                                                     "aten::bmm.out",     "aten::addmv.out",
                                                     "aten::baddbmm.out", "aten::convolution_backward",
                                                     "aten::mv",          "aten::sum.IntList_out"};
    if (std::ranges::find(kProducts, op) == std::end(kProducts) ||
        host_has_products_of(stack[begin].toTensor().scalar_type()))
      return;
    low_ = stack[begin].toTensor().scalar_type();
    if (op.ends_with("out")) out_ = stack.back().toTensor();
    if (out_.defined() && out_.scalar_type() != *low_) {  // a sum that is asked for in FP32
      low_.reset();
      return;
    }
    for (size_t i = begin; i < stack.size(); ++i)
      stack[i] = changed(stack[i], [](const at::Tensor& t) { return t.to(at::kFloat); });
  }
  void round(Stack& stack, size_t outputs) const {
    if (!low_) return;
    for (size_t i = stack.size() - outputs; i < stack.size(); ++i)
      stack[i] = changed(stack[i], [&](const at::Tensor& t) { return t.defined() ? t.to(*low_) : t; });
    if (out_.defined()) stack.back() = out_.copy_(stack.back().toTensor());
  }

 private:
  std::optional<at::ScalarType> low_;
  at::Tensor out_;
};

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string& name = schema.name();
  const std::string full_name = toString(op.operator_name());
  TORCH_CHECK_NOT_IMPLEMENTED(
      std::ranges::find(kWithoutCudaKernel, full_name) == std::end(kWithoutCudaKernel),
      "counting device: CUDA has no kernel for ", full_name);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const size_t begin = stack->size() - schema.arguments().size();
  const Stack given(stack->begin() + static_cast<std::ptrdiff_t>(begin), stack->end());
  TensorLists lists;
  for (const c10::IValue& argument : given)
    if (argument.isTensorList()) lists.push_back(argument.toTensorVector());
  check_types(name, lists);
  check_scalars(name, given);
  check_scaled_mm(name, given);
  if (waits_for_shape(name, given)) wait_because_of(name);

  Translation translation(name);
  for (size_t i = begin; i < stack->size(); ++i)
    (*stack)[i] = changed((*stack)[i], [&](const at::Tensor& t) { return translation.to_host(t); });
  const WiderMoments moments(name, *stack, begin);
  const WideProduct product(full_name, *stack, begin);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  product.round(*stack, schema.returns().size());
  moments.round_back();
  translation.take_over_shapes();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = changed((*stack)[i], [&](const at::Tensor& t) { return translation.to_device(t); });
  if (translation.made_a_tensor() || writes_to_an_argument(op)) count_launch(name);
}

// ---- operations of its own

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(type),
                                   format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator(), c10::DispatchKeySet(kKey),
                                           c10::dtype_or_default(type));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool to_host = !is_ours(self), from_host = !is_ours(from);
  if (!to_host && !from_host) {
    on_host(self).copy_(on_host(from));
    count_launch("aten::copy_");
    return self;
  }
  count_bytes(to_host ? &DeviceCounts::bytes_to_host : &DeviceCounts::bytes_to_device, self.nbytes());
  if (!non_blocking) {
    wait_because_of(to_host ? "a copy to the host" : "a copy to the device");
    on_host(self).copy_(on_host(from));
  } else if (to_host) {
    if (self.is_non_overlapping_and_dense()) std::memset(self.mutable_data_ptr(), 0xFF, self.nbytes());
    until_next_wait([values = on_host(from).clone(), target = self] {
      const at::AutoDispatchBelowADInplaceOrView guard;
      target.copy_(values);
    });
  } else {
    on_host(self).copy_(from);
    if (from.is_contiguous())
      until_next_wait([values = from.clone(), source = from] {
        TORCH_CHECK(std::memcmp(values.const_data_ptr(), source.const_data_ptr(), values.nbytes()) == 0,
                    "counting device: the source of a non-blocking copy was changed before the device was "
                    "waited for.");
      });
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  return copy_(target, self, non_blocking);
}

at::Scalar local_scalar(const at::Tensor& self) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  wait_because_of("item()");
  count_bytes(&DeviceCounts::bytes_to_host, self.element_size());
  return at::_local_scalar_dense(on_host(self));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  std::vector<int64_t> strides = stride.vec();
  if (stride.size() != size.size()) {
    strides.assign(size.size(), 1);
    for (size_t i = size.size(); i-- > 1;) strides[i - 1] = strides[i] * size[i];
  }
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides, offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_storage(self, std::move(storage), 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_storage(
      self, {c10::Storage::use_byte_size_t{}, 0, allocator().allocate(0), &allocator(), /*resizable=*/true},
      0, {0}, {1});
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, at::IntArrayRef stride, at::IntArrayRef padding,
                       at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                       int64_t groups) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  count_launch("aten::convolution");
  const at::ScalarType type = input.scalar_type();
  const auto wide = [&](const at::Tensor& t) {
    return host_has_products_of(type) || !t.defined() ? on_host(t) : on_host(t).to(at::kFloat);
  };
  return on_device(at::convolution(wide(input), wide(weight),
                                   bias ? std::optional(wide(*bias)) : std::nullopt, stride, padding,
                                   dilation, transposed, output_padding, groups)
                       .to(type));
}

// Attention as CUDA has it: one launch forward, one backward, where its flash kernels take the arguments.
int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool, std::optional<double>,
                         bool) {
  const bool flash = query.dim() == 4 && dropout == 0.0 && !mask && query.size(-1) == value.size(-1) &&
                     query.size(1) == key.size(1) && query.scalar_type() != at::kDouble;
  return static_cast<int64_t>(flash ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor,
           at::Tensor>
attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
          const std::optional<at::Tensor>&, double dropout, bool causal, bool, std::optional<double> scale) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto [output, log_sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      on_host(query), on_host(key), on_host(value), dropout, causal, std::nullopt, scale);
  count_launch("attention");
  return {on_device(output), on_device(log_sums), {}, {}, query.size(2), key.size(2), {}, {}, {}};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor&, std::array<bool, 4>, const at::Tensor& output, const at::Tensor& log_sums,
    const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal,
    const at::Tensor&, const at::Tensor&, std::optional<double> scale) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      on_host(grad), on_host(query), on_host(key), on_host(value), on_host(output), on_host(log_sums),
      dropout, causal, std::nullopt, scale);
  count_launch("attention backward");
  return {on_device(of_query), on_device(of_key), on_device(of_value), {}};
}

/// Module::to moves parameters by set_data, which asks this.
bool can_replace_each_other(const at::Tensor&, const at::Tensor&) { return true; }

// ---- what LibTorch asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kCountingDevice); }
  static bool idle() {
    const std::lock_guard all_or_none(device().arrivals);
    const std::lock_guard lock(device().mutex);
    return device().under_way.empty();
  }
  c10::DeviceType type() const override { return at::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return kCountingDevice; }
  c10::Device getDevice() const override { return kCountingDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryEvent(void*) const override { return idle(); }
  bool queryStream(const c10::Stream&) const override { return idle(); }
  void synchronizeEvent(void*) const override { wait_because_of("an event"); }
  void synchronizeStream(const c10::Stream&) const override { wait_because_of("a stream"); }
  void synchronizeDevice(c10::DeviceIndex) const override { wait_because_of("the device"); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  at::Device getDeviceFromPtr(void*) const override { return kCountingDevice; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::Storage present = allocation_of(storage).host;
    c10::Storage resized = host_storage(bytes);
    if (const size_t kept = std::min(present.nbytes(), bytes); kept > 0)
      std::memcpy(resized.mutable_data(), present.data(), kept);
    storage.set_data_ptr_noswap(device_pointer(std::move(resized)));
    storage.set_nbytes(bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

[[maybe_unused]] const bool registered = [] {
  c10::register_privateuse1_backend("counting");
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(at::kPrivateUse1, &allocator());
  return true;
}();

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("_has_compatible_shallow_copy_type", &can_replace_each_other);
  library.impl("convolution_overrideable", &convolution);
  library.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);

  // Kernels composed of others would hide these from the fallback; CUDA has kernels of its own for them.
  static constexpr std::string_view kHaveCudaKernels[] = {
      "aten::native_layer_norm", "aten::native_group_norm", "aten::addr",
      "aten::linalg__powsum",    "aten::_chunk_cat",        "aten::convolution_backward"};
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames())
    if (name.name.starts_with("aten::_foreach_") ||
        std::ranges::find(kHaveCudaKernels, name.name) != std::end(kHaveCudaKernels))
      library.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace

std::vector<std::string> ops_without_cuda_kernel() {
  return {std::begin(kWithoutCudaKernel), std::end(kWithoutCudaKernel)};
}

DeviceCounts device_counts() {
  const std::lock_guard lock(device().mutex);
  return device().counts;
}

void reset_device_counts() {
  const std::lock_guard lock(device().mutex);
  device().counts = {};
}

StockProducts::StockProducts() { ++stock_products; }
StockProducts::~StockProducts() { --stock_products; }

NoWaits::NoWaits() {
  const std::lock_guard lock(device().mutex);
  ++device().forbidden_waits;
}

NoWaits::~NoWaits() {
  const std::lock_guard lock(device().mutex);
  --device().forbidden_waits;
}

void wait_for_counting_device() { wait_because_of("the device"); }

at::Tensor peek(const at::Tensor& tensor) {
  return tensor.device() == kCountingDevice ? on_host(tensor.detach()).clone()
                                            : tensor.detach().cpu().clone();
}

at::Device device_under_test() {
  static const at::Device device = [] {
    const char* const chosen = std::getenv("HALFSTEP_TEST_DEVICE");
    return chosen ? at::Device(chosen) : kCountingDevice;
  }();
  return device;
}

}  // namespace halfstep::testing

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &halfstep::testing::choose_attention)
}
