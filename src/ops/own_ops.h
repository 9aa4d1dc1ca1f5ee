// The operations that Halfstep computes itself: a table.
//
// The kernel on LibTorch's autocast keys looks its operation up here and knows none of them. To add one,
// write a file in this room with a function that returns its row, and name the function below and in
// own_ops.cpp. That function also defines the operation in LibTorch's dispatcher where LibTorch lacks it:
// rows are read before the dispatcher is asked.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <halfstep/config.h>
#include <halfstep/op_policy.h>

#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace halfstep {

class QuantSession;

/// The arguments of one call, in the order of the operation's schema.
using OpArguments = std::span<const c10::IValue>;

/// What holds where the operation is called.
struct OpContext {
  c10::ScalarType low = c10::ScalarType::BFloat16;  // the scope's type
  QuantSession* quant = nullptr;                    // null where there is no recipe
  bool products_in_fp32 = false;                    // of operands that are rounded, or not at all
};

/// One row.
struct OwnOp {
  std::string_view op;  // as op_table() spells it
  OpRule rule;          // run where the policy has this rule for the operation
  /// Whether these arguments are covered. All others go through LibTorch's operation.
  bool (*takes)(OpArguments arguments, const OpContext& context);
  /// The output, with its node in autograd's graph. Called with autocast off.
  at::Tensor (*run)(OpArguments arguments, const OpContext& context);
  /// The same bits from the same arguments, for backward, which then keeps the inputs and not the output.
  /// Called with autocast off. Null where the output is kept.
  at::Tensor (*run_again)(OpArguments arguments);
  /// How many of the first arguments are inputs: tensors that backward keeps anyway.
  std::size_t inputs = 1;
  /// Whether `takes` and `run` get the arguments as the policy has cast them.
  bool of_cast_arguments = false;
};

/// Exported for the test that walks the table.
HALFSTEP_API std::span<const OwnOp> own_ops();

/// Of one operation, in the order in which they are asked. None where only LibTorch computes it.
std::vector<const OwnOp*> own_ops_of(std::string_view op);

// The rows, each in a file of its own.
OwnOp low_addmm();
OwnOp low_gelu();
OwnOp low_layer_norm_function();
OwnOp low_linear();
OwnOp low_logits_cross_entropy();
OwnOp low_matmul();
OwnOp low_mm();
OwnOp low_narrow_convolution();
OwnOp low_rows_attention();
OwnOp low_rows_layer_norm();
OwnOp low_rows_rms_norm();
OwnOp low_rms_norm_function();
OwnOp low_rotary();
OwnOp low_swiglu();
OwnOp quantised_addmm();
OwnOp quantised_linear();
OwnOp quantised_matmul();
OwnOp quantised_mm();

/// BF16 or FP16.
bool is_low(const at::Tensor& tensor);

/// Strided, of no subclass, without a forward-mode gradient, and with its numbers in memory as they are: an
/// operation of ours may take the place of LibTorch's.
bool is_plain(const at::Tensor& tensor);

/// Nothing where None was given, or the undefined tensor that torch::nn::functional passes for none.
std::optional<at::Tensor> given_tensor(const c10::IValue& argument);

}  // namespace halfstep
