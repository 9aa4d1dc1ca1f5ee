// Halfstep's kernels on LibTorch's autocast keys: what the policy asks for is done here.
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <halfstep/error.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "autocast/active_policy.h"
#include "autocast/argument_casts.h"
#include "autocast/repeated_outputs.h"
#include "autocast/without_instructions.h"
#include "ops/own_ops.h"

namespace halfstep {
namespace {

using Stack = torch::jit::Stack;

c10::DispatchKey autocast_key(at::DeviceType device) {
  return at::autocast::get_autocast_dispatch_key_from_device_type(device);
}

constexpr int kNone = -1;

int argument_named(const c10::FunctionSchema& schema, const std::string& name) {
  return schema.argumentIndexWithName(name).value_or(kNone);
}

/// Statistics that the operation updates in place although its schema does not say so. When they were cast,
/// the operation wrote to the copies: this brings the news back.
class RunningStatistics {
 public:
  explicit RunningStatistics(const c10::FunctionSchema& schema)
      : updating_index_(
            std::max(argument_named(schema, "training"), argument_named(schema, "use_input_stats"))) {
    for (const char* name : {"running_mean", "running_var"}) {
      if (const int index = argument_named(schema, name); index != kNone) indices_.push_back(index);
    }
  }

  /// Those that this call will update: none in evaluation, where threads may share them.
  std::vector<at::Tensor> tensors(Arguments arguments) const {
    std::vector<at::Tensor> found;
    if (indices_.empty() || !arguments[updating_index_].toBool()) return found;
    for (const int index : indices_) {
      found.push_back(arguments[index].isTensor() ? arguments[index].toTensor() : at::Tensor());
    }
    return found;
  }

  static void write_back(const std::vector<at::Tensor>& originals, const std::vector<at::Tensor>& copies) {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < originals.size(); ++i) {
      if (!originals[i].is_same(copies[i])) originals[i].copy_(copies[i]);
    }
  }

 private:
  int updating_index_;
  std::vector<int> indices_;
};

/// Stands between the dispatcher and one operation on one device. Knows its row, so that the hot path looks
/// nothing up by name.
class PolicyKernel final : public c10::OperatorKernel {
 public:
  PolicyKernel(std::size_t row, at::DeviceType device, const c10::OperatorHandle& op)
      : row_(row),
        device_(device),
        keys_below_(c10::DispatchKeySet::FULL_AFTER, autocast_key(device)),
        argument_count_(op.schema().arguments().size()),
        dtype_index_(argument_named(op.schema(), "dtype")),
        recurrent_weights_(argument_named(op.schema(), "params")),
        lstm_state_(op_table()[row].op.starts_with("lstm.") ? argument_named(op.schema(), "hx") : kNone),
        batch_sizes_(argument_named(op.schema(), "batch_sizes")),
        batch_first_(argument_named(op.schema(), "batch_first")),
        is_lstm_kernel_(op_table()[row].op == "mkldnn_rnn_layer"),
        is_tensordot_(op_table()[row].op == "tensordot"),
        is_binary_cross_entropy_(op_table()[row].op == "binary_cross_entropy"),
        is_cheap_to_repeat_(is_cheap_to_repeat(op_table()[row].op)),
        is_one_product_(device == at::kCPU && is_one_product(op_table()[row].op)),
        is_convolution_(device == at::kCPU && is_convolution(op_table()[row].op)),
        own_(own_ops_of(op_table()[row].op)),
        statistics_(op.schema()) {
    if (op.hasKernelForDispatchKey(autocast_key(device))) {
      stock_ = op.getComputedKernelForDispatchKey(autocast_key(device));
    }
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const ActivePolicy* policy = active_policy();
    if (!policy) return run_stock(op, keys, stack);
    const OpRule rule = policy->ops.rule_of_row(row_);
    if (ran_own(stack, rule, /*of_cast_arguments=*/false)) return;
    switch (rule) {
      case OpRule::Stock:
        return run_stock_without_cache(op, keys, stack);
      case OpRule::AsIs:
        return run_as_is(op, keys, stack);
      case OpRule::Low:
        return run_low(op, keys, stack);
      case OpRule::Fp32:
        return run_fp32(op, keys, stack);
      case OpRule::Promote:
        return run_promoted(op, keys, stack);
      case OpRule::First:
        return run_as_first(op, keys, stack);
    }
    HALFSTEP_BUG("no such rule: ", static_cast<int>(rule));
  }

 private:
  void run_stock(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    if (stock_) return stock_->callBoxed(op, keys, stack);
    op.redispatchBoxed(keys & keys_below_, stack);
  }

  /// The scope switched the cache off, but at::ThreadLocalState does not carry that switch (LibTorch 2.13) to
  /// a thread that autograd moves to.
  void run_stock_without_cache(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    struct CacheOff {
      const bool was_on = at::autocast::is_autocast_cache_enabled();
      CacheOff() {
        if (was_on) at::autocast::set_autocast_cache_enabled(false);
      }
      ~CacheOff() {
        if (was_on) at::autocast::set_autocast_cache_enabled(true);
      }
    } const cache_off;
    run_stock(op, keys, stack);
  }

  /// Whether an operation of our own took this call; else it is LibTorch's to compute.
  bool ran_own(Stack* stack, OpRule rule, bool of_cast_arguments) const {
    // LibTorch's transforms take no nodes that are written in C++.
    if (own_.empty() ||
        c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode))
      return false;
    const ActivePolicy* const policy = active_policy();
    const OpContext context{.low = at::autocast::get_autocast_dtype(device_),
                            .quant = policy->quant.get(),
                            .products_in_fp32 = policy->products_in_fp32};
    for (const OwnOp* own : own_) {
      if (own->rule != rule || own->of_cast_arguments != of_cast_arguments ||
          !own->takes(arguments(stack), context))
        continue;
      run_own(*own, stack, context);
      return true;
    }
    return false;
  }

  /// The operation as Halfstep computes it.
  void run_own(const OwnOp& own, Stack* stack, const OpContext& context) const {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key(device_));
    at::Tensor output = own.run(arguments(stack), context);
    if (own.run_again && active_policy()->repeat_outputs) {
      std::vector<at::Tensor> inputs;
      for (const c10::IValue& input : arguments(stack).first(own.inputs)) inputs.push_back(input.toTensor());
      note_output({.run = own.run_again,
                   .autocast_key = autocast_key(device_),
                   .others = arguments_after(stack, own.inputs)},
                  std::move(inputs), output);
    }
    torch::jit::drop(*stack, argument_count_);
    stack->emplace_back(std::move(output));
  }

  void run_as_is(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    if (recurrent_weights_ != kNone && device_ == at::kCPU) return run_recurrent_layer(op, keys, stack);
    if (is_tensordot_) make_alike_(op, stack);
    if (!is_cheap_to_repeat_) return op.redispatchBoxed(keys & keys_below_, stack);
    run_cheap(op, keys, stack, arguments(stack)[0].toTensor());
  }

  /// A layer over a sequence, made of a product a step. Its weights are cast here, once, as each of the
  /// products would cast them. On CUDA they stay: cuDNN wants them in one buffer, and LibTorch's own kernel
  /// for
  /// `_cudnn_rnn` casts them into one.
  void run_recurrent_layer(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    const Arguments given = arguments(stack);
    const at::ScalarType low = at::autocast::get_autocast_dtype(device_);
    const FloatingArguments floats = floating_arguments(given, device_);
    refuse_unscaled(op, floats, low);
    if (floats.any_fp64) return op.redispatchBoxed(keys & keys_below_, stack);
    if (active_policy()->fp32_without_instructions) return run_cast(op, keys, stack, at::kFloat);
    if (lstm_state_ != kNone && is_for_lstm_kernel(given)) {
      // To LibTorch's kernel, whose row casts the weights; for FP16 input it would not be taken.
      if (!lstm_kernel_takes(low)) return run_cast(op, keys, stack, at::kFloat);
    } else {
      if (lstm_state_ != kNone) keep_c_in_fp32_(given);
      if (steps_of(given) <= kMostStepsOfOneCast)
        cast_arguments_(given.subspan(static_cast<std::size_t>(recurrent_weights_), 1), device_, low);
    }
    op.redispatchBoxed(keys & keys_below_, stack);
  }

  /// Autograd sums the gradients of a weight that was cast once in its low type: over 64 steps the sum is off
  /// by 1 % in BF16, over 2,048 by 60 %. Longer sequences cast at each step and sum in FP32.
  static constexpr int64_t kMostStepsOfOneCast = 64;

  int64_t steps_of(Arguments layer) const {
    if (batch_sizes_ != kNone) return layer[static_cast<std::size_t>(batch_sizes_)].toTensor().numel();
    const at::Tensor& input = layer[0].toTensor();
    return input.size(batch_first_ != kNone && layer[static_cast<std::size_t>(batch_first_)].toBool() ? 1
                                                                                                      : 0);
  }

  /// c is a running sum; a layer that is given low input makes a low one.
  void keep_c_in_fp32_(Arguments lstm) const {
    auto state = lstm[static_cast<std::size_t>(lstm_state_)].toTensorVector();
    if (state.size() != 2 || (state[1].scalar_type() != at::kBFloat16 && state[1].scalar_type() != at::kHalf))
      return;
    state[1] = state[1].to(at::kFloat);
    lstm[static_cast<std::size_t>(lstm_state_)] = state;
  }

  /// LibTorch's kernel does neither projections, which make h of another width than c, nor sequences of
  /// different lengths.
  bool is_for_lstm_kernel(Arguments lstm) const {
    if (!at::globalContext().userEnabledMkldnn()) return false;
    const auto state = lstm[static_cast<std::size_t>(lstm_state_)].toTensorVector();
    if (state.size() != 2 || state[0].size(-1) != state[1].size(-1)) return false;
    if (batch_sizes_ == kNone) return true;
    const at::Tensor& sizes = lstm[static_cast<std::size_t>(batch_sizes_)].toTensor();
    return sizes.numel() > 0 && sizes[0].item<int64_t>() == sizes[-1].item<int64_t>();  // they descend
  }

  /// Everything low but c, which the kernel takes in FP32 beside low tensors.
  void run_lstm_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                       at::ScalarType low) const {
    if (!lstm_kernel_takes(low) || active_policy()->fp32_without_instructions)
      return run_cast(op, keys, stack, at::kFloat);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key(device_));
    constexpr std::size_t kC = 6;  // after input, four weights and h
    cast_arguments_(arguments(stack).first(kC), device_, low);
    cast_arguments_(arguments(stack).subspan(kC, 1), device_, at::kFloat);
    op.redispatchBoxed(keys & keys_below_, stack);
  }

  void run_low(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    const FloatingArguments floats = floating_arguments(arguments(stack), device_);
    const at::ScalarType low = at::autocast::get_autocast_dtype(device_);
    refuse_unscaled(op, floats, low);
    // FP64 was the caller's choice. Lowering the others beside it would only make LibTorch refuse the
    // mixture.
    if (floats.any_fp64) return op.redispatchBoxed(keys & keys_below_, stack);
    if (is_lstm_kernel_) return run_lstm_kernel(op, keys, stack, low);
    if (is_convolution_ && active_policy()->fp32_without_instructions)
      return run_cast(op, keys, stack, at::kFloat, /*of_low_operation=*/true);
    if (is_one_product_ && active_policy()->products_in_fp32 && floats.widest)
      return run_product_in_fp32(op, keys, stack, low);
    run_cast(op, keys, stack, low);
  }

  /// A product of many matrices, or of rows with one matrix, copies an operand whose batches do not lie one
  /// after the other, and backward keeps the copy: here it is a low one.
  static void lay_batches_together(Arguments arguments) {
    const bool by_rows = std::ranges::any_of(arguments, [](const c10::IValue& argument) {
      return argument.isTensor() && argument.toTensor().defined() && argument.toTensor().dim() == 2;
    });
    for (c10::IValue& argument : arguments) {
      if (!argument.isTensor()) continue;
      const at::Tensor& low = argument.toTensor();
      if (!low.defined() || low.dim() < 3 || low.numel() == 0 || low.layout() != at::kStrided ||
          low.is_nested())
        continue;
      const at::Tensor together =
          by_rows ? low.reshape({-1, low.size(-1)}) : low.reshape({-1, low.size(-2), low.size(-1)});
      if (!together.is_alias_of(low)) argument = together.view(low.sizes());
    }
  }

  void run_product_in_fp32(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                           at::ScalarType low) const {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key(device_));
    auto noted = active_policy()->repeat_outputs ? noted_argument(arguments(stack)) : std::nullopt;
    cast_arguments_(arguments(stack), device_, low);
    {
      const RepeatedOutput repeated_output(std::move(noted), arguments(stack));
      if (!is_convolution_) lay_batches_together(arguments(stack));
      auto upcasts = cast_arguments_(arguments(stack), device_, at::kFloat);
      if (!active_policy()->repeat_upcasts) upcasts.clear();
      const RepeatedUpcasts repeated(std::move(upcasts), /*of_low_operation=*/true);
      op.redispatchBoxed(keys & keys_below_, stack);
    }
    stack->back() = stack->back().toTensor().to(low);
  }

  void run_fp32(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    const bool caller_chose = dtype_index_ != kNone && !arguments(stack)[dtype_index_].isNone();
    if (caller_chose) return op.redispatchBoxed(keys & keys_below_, stack);
    if (is_binary_cross_entropy_) refuse_low_probabilities(arguments(stack)[0].toTensor());
    refuse_unscaled(op, floating_arguments(arguments(stack), device_), at::kFloat);
    run_cast(op, keys, stack, at::kFloat);
  }

  /// The type of the probability decides, not that of the operation: FP32 arithmetic cannot bring back what
  /// was rounded away.
  void refuse_low_probabilities(const at::Tensor& probabilities) const {
    const at::ScalarType type = probabilities.scalar_type();
    const bool is_bf16 = type == at::kBFloat16;
    if (!is_bf16 && type != at::kHalf) return;
    detail::throw_error(detail::concat(
        "AutocastScope: binary_cross_entropy of ", type, " probabilities. One above ",
        is_bf16 ? "0.998" : "0.9998", " is 1 in ", type,
        ", where the loss has no useful gradient: the examples that the model gets most wrong would teach it "
        "nothing. Give the logits to binary_cross_entropy_with_logits; or, for a model that ends in a "
        "sigmoid, keep that one in FP32: set(\"sigmoid\", OpRule::Fp32) of the OpPolicy, which is "
        "Precision::ops in a training loop."));
  }

  /// For an operation that refuses a mixture although its parts would cast: the widest decides what it is
  /// given, and its parts follow their own rows.
  void make_alike_(const c10::OperatorHandle& op, Stack* stack) const {
    const FloatingArguments floats = floating_arguments(arguments(stack), device_);
    if (floats.all_alike) return;
    refuse_unscaled(op, floats, *floats.widest);
    cast_arguments_(arguments(stack), device_, *floats.widest);
  }

  /// The first may be written to, so it is never a copy.
  void run_as_first(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    const FloatingArguments floats = floating_arguments(arguments(stack), device_);
    const at::Tensor& first = arguments(stack)[0].toTensor();
    if (floats.all_alike || !first.is_floating_point()) return op.redispatchBoxed(keys & keys_below_, stack);
    refuse_unscaled(op, floats, first.scalar_type());
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key(device_));
    cast_arguments_(arguments(stack).subspan(1), device_, first.scalar_type());
    op.redispatchBoxed(keys & keys_below_, stack);
  }

  void run_promoted(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    const FloatingArguments floats = floating_arguments(arguments(stack), device_);
    const at::ScalarType widest = floats.widest.value_or(at::kFloat);
    if (!floats.all_alike) refuse_unscaled(op, floats, widest);
    run_cast(op, keys, stack, widest);
  }

  /// `of_low_operation`: as RepeatedUpcasts has it.
  void run_cast(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack, at::ScalarType to,
                bool of_low_operation = false) const {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key(device_));
    if (is_cheap_to_repeat_) return run_cheap_cast(op, keys, stack, to);
    const auto originals = statistics_.tensors(arguments(stack));
    auto noted = active_policy()->repeat_outputs ? noted_argument(arguments(stack)) : std::nullopt;
    auto upcasts = cast_arguments_(arguments(stack), device_, to);
    const auto is_statistic = [&](const Upcast& upcast) {
      return std::any_of(originals.begin(), originals.end(),
                         [&](const at::Tensor& original) { return original.is_same(upcast.original); });
    };
    std::erase_if(upcasts, is_statistic);  // they will have changed before backward
    if (!active_policy()->repeat_upcasts) upcasts.clear();
    const auto copies = statistics_.tensors(arguments(stack));
    {
      const RepeatedOutput repeated_output(std::move(noted), arguments(stack));
      const RepeatedUpcasts repeated(std::move(upcasts), of_low_operation);
      if (!ran_own(stack, active_policy()->ops.rule_of_row(row_), /*of_cast_arguments=*/true))
        op.redispatchBoxed(keys & keys_below_, stack);
    }
    RunningStatistics::write_back(originals, copies);
  }

  /// As run_cast, for an operation without statistics whose output a product may want computed again.
  void run_cheap_cast(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                      at::ScalarType to) const {
    const at::Tensor input = arguments(stack)[0].toTensor();
    auto upcasts = cast_arguments_(arguments(stack), device_, to);
    if (!active_policy()->repeat_upcasts) upcasts.clear();
    const at::Tensor& cast = arguments(stack)[0].toTensor();
    const bool input_is_kept =
        cast.is_same(input) || std::any_of(upcasts.begin(), upcasts.end(), [&](const Upcast& upcast) {
          return upcast.original.is_same(input) && original_may_stand_for(upcast);
        });
    const RepeatedUpcasts repeated(std::move(upcasts));
    if (!input_is_kept) return op.redispatchBoxed(keys & keys_below_, stack);
    run_cheap(op, keys, stack, input);
  }

  /// Runs on the arguments as they are, and notes how the output was made from `input`.
  void run_cheap(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                 at::Tensor input) const {  // a copy: the stack will hold the output
    // A nested tensor has no place in a storage that sizes and strides could name.
    if (!active_policy()->repeat_outputs || input.is_nested()) {
      return op.redispatchBoxed(keys & keys_below_, stack);
    }
    OutputRecipe recipe{.run = stock_run(op, arguments(stack)[0].toTensor().scalar_type()),
                        .autocast_key = autocast_key(device_),
                        .others = arguments_after(stack, 1)};
    op.redispatchBoxed(keys & keys_below_, stack);
    note_output(std::move(recipe), {input}, stack->back().toTensor());
  }

  std::vector<c10::IValue> arguments_after(Stack* stack, std::size_t inputs) const {
    const Arguments given = arguments(stack).subspan(inputs);
    return {given.begin(), given.end()};
  }

  void refuse_unscaled(const c10::OperatorHandle& op, const FloatingArguments& floats,
                       at::ScalarType to) const {
    if (!floats.unscaled) return;
    detail::throw_error(detail::concat("AutocastScope: in ", op.operator_name(), ", argument '",
                                       op.schema().arguments()[floats.unscaled->argument].name(), "' is ",
                                       floats.unscaled->type, ". A cast to ", to,
                                       " would drop its scale: decode it with its scale before the call."));
  }

  Arguments arguments(Stack* stack) const {
    return {stack->data() + (stack->size() - argument_count_), argument_count_};
  }

  std::size_t row_;
  at::DeviceType device_;
  c10::DispatchKeySet keys_below_;
  std::size_t argument_count_;
  int dtype_index_;
  int recurrent_weights_;  // the argument of a recurrent layer that lists them
  int lstm_state_;         // the argument of an LSTM layer that holds h and c
  int batch_sizes_;        // the argument of a layer over packed sequences
  int batch_first_;        // the argument of a layer that says which dimension is time
  bool is_lstm_kernel_;
  bool is_tensordot_;
  bool is_binary_cross_entropy_;
  bool is_cheap_to_repeat_;
  bool is_one_product_;  // on the CPU
  bool is_convolution_;
  std::vector<const OwnOp*> own_;  // none where LibTorch computes the operation whatever its arguments
  RunningStatistics statistics_;
  std::optional<c10::SafeKernelFunction> stock_;  // empty when stock autocast does nothing here
};

/// Registers on construction, and unregisters when the library is unloaded.
class Registration {
 public:
  Registration() {
    // LibTorch warns once when a kernel is overridden; here that is the purpose.
    struct Silence final : c10::WarningHandler {
      void process(const c10::Warning&) override {}
    } silence;
    const c10::WarningUtils::WarningHandlerGuard silenced(&silence);
    own_ops();  // defines the operations that LibTorch lacks
    for (const at::DeviceType device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
      for (std::size_t row = 0; row < op_table().size(); ++row) register_row(row, device);
    }
  }

  const std::string& missing_ops() const { return missing_ops_; }

 private:
  void register_row(std::size_t row, at::DeviceType device) {
    const std::string op(op_table()[row].op);
    auto& dispatcher = c10::Dispatcher::singleton();
    // One of LibTorch's, unless the row names another namespace.
    const auto handle =
        dispatcher.findSchema(torch::jit::parseName(op.find("::") == op.npos ? "aten::" + op : op));
    if (!handle) {
      missing_ops_ += " " + op;
      return;
    }
    registered_.push_back(dispatcher.registerImpl(
        handle->operator_name(), autocast_key(device),
        c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<PolicyKernel>(row, device, *handle)),
        /*cpp_signature=*/std::nullopt, /*inferred_function_schema=*/nullptr, "Halfstep's policy"));
  }

  std::vector<c10::RegistrationHandleRAII> registered_;
  std::string missing_ops_;
};

// While the library loads: LibTorch's tables may not change while another thread dispatches, and this is the
// one moment when the user's threads cannot be using Halfstep yet. (docs/decisions/0031.)
const Registration registration;

}  // namespace

void check_every_row_has_its_kernel() {
  HALFSTEP_CHECK(registration.missing_ops().empty(),
                 "AutocastScope: this LibTorch lacks operations of the policy:", registration.missing_ops(),
                 ". Halfstep ", HALFSTEP_VERSION, " is made for LibTorch 2.13.");
}

}  // namespace halfstep
