// Linear layers of a recipe: the three products of a linear layer from quantised operands.
//
// A call is taken when its weight is one that the recipe covers: `linear` with [out, in], `addmm`, `matmul`
// and `mm` with [in, out], or with the transpose of a weight (which is how torch::nn::Linear calls them).
// Kept for backward: the codes of the input, as the weight gradient will want them, and the weight itself,
// which is quantised again there.
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <halfstep/error.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops/own_ops.h"
#include "quant/session.h"

namespace halfstep {
namespace {

/// A weight matrix: as the layer has it, or its transpose.
struct Weight {
  at::Tensor matrix;
  bool is_in_by_out;
};

struct Call {
  at::Tensor input;
  Weight weight;
  std::optional<at::Tensor> bias;
  std::shared_ptr<QuantLayer> layer;
};

/// Carried by autograd's node.
struct LayerHandle : torch::CustomClassHolder {
  explicit LayerHandle(std::shared_ptr<QuantLayer> layer) : layer(std::move(layer)) {}
  std::shared_ptr<QuantLayer> layer;
};

QuantLayer& layer_of(const c10::IValue& handle) {
  return *static_cast<LayerHandle&>(*handle.toCapsule()).layer;
}

/// As it lies in memory: what is given as a transpose, by its rows.
Weight as_stored(const Weight& weight) {
  if (weight.matrix.is_contiguous() || !weight.matrix.t().is_contiguous()) return weight;
  return {weight.matrix.t(), !weight.is_in_by_out};
}

/// The weight as the recipe's product wants it: it sums over `in` forward, over `out` for the input's
/// gradient.
Quantised quantised_weight(QuantLayer& layer, const Weight& weight, const OperandRule& rule, bool over_out,
                           bool noted) {
  const Weight stored = as_stored(weight);
  return layer.quantise(stored.matrix, rule, Role::Weight,
                        /*sums_over_rows=*/stored.is_in_by_out != over_out, noted);
}

class QuantisedLinear : public torch::autograd::Function<QuantisedLinear> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            bool is_in_by_out, const c10::intrusive_ptr<torch::CustomClassHolder>& handle,
                            at::ScalarType output, bool trains) {
    QuantLayer& layer = *static_cast<LayerHandle&>(*handle).layer;
    const Recipe& recipe = layer.recipe();
    // A forward that nobody can run backward through is an evaluation: it leaves no trace in histories.
    if (trains) layer.note_use();
    at::Tensor y;
    std::optional<Quantised> kept;
    if (recipe.forward.quantised) {
      Quantised codes = layer.quantise(x, recipe.forward.left, Role::Input, /*sums_over_rows=*/false, trains);
      y = product(
          codes,
          quantised_weight(layer, {weight, is_in_by_out}, recipe.forward.right, /*over_out=*/false, trains),
          bias.value_or(at::Tensor()), output);
      const OperandRule& again = recipe.weight_grad.right;
      // One scale for all serves either direction.
      if (again == recipe.forward.left && has_one_scale(again) && !again.hadamard) {
        codes.sums_over_rows = true;
        kept = std::move(codes);
      }
    } else {
      const at::Tensor low = weight.to(output);
      y = is_in_by_out ? at::mm(x.to(output), low) : at::linear(x.to(output), low);
      if (bias) y = y.add(bias->to(output));
    }
    if (trains) keep_for_backward(context, layer, x, weight, std::move(kept));
    context->saved_data["layer"] = c10::IValue::make_capsule(handle);
    context->saved_data["is_in_by_out"] = is_in_by_out;
    context->saved_data["input_type"] = static_cast<std::int64_t>(x.scalar_type());
    context->saved_data["output_type"] = static_cast<std::int64_t>(output);
    context->saved_data["bias_type"] =
        static_cast<std::int64_t>(bias ? bias->scalar_type() : at::ScalarType::Undefined);
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    // Where backward runs inside the scope, its products are ours all the same.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    QuantLayer& layer = layer_of(context->saved_data["layer"]);
    HALFSTEP_CHECK(!at::GradMode::is_enabled(), "a quantised linear layer ('", layer.name(),
                   "') has no second derivative: its codes are rounded. Keep the layer in high precision: "
                   "precision.keep_high(\"",
                   layer.name(), "\").");
    const Recipe& recipe = layer.recipe();
    const auto type = [&](const char* name) {
      return static_cast<at::ScalarType>(context->saved_data[name].toInt());
    };
    const auto saved = context->get_saved_variables();
    const Weight weight{saved[0].detach(), context->saved_data["is_in_by_out"].toBool()};
    const at::Tensor dy = grads[0].detach();
    at::Tensor dx, dw, db;
    if (context->needs_input_grad(0)) {
      dx = input_grad(layer, recipe.input_grad, dy, weight, type("input_type"), type("output_type"));
    }
    if (context->needs_input_grad(1)) {
      // As the weight lies in memory, so that autograd adds it there without a copy.
      const Weight stored = as_stored(weight);
      dw = recipe.weight_grad.quantised ? quantised_weight_grad(context, layer, recipe, dy, saved, stored)
                                        : plain_weight_grad(dy, saved[1], stored, type("output_type"));
      if (stored.is_in_by_out != weight.is_in_by_out) dw = dw.t();
    }
    const bool has_bias = type("bias_type") != at::ScalarType::Undefined;
    if (has_bias && context->needs_input_grad(2)) db = dy.sum({0}, false, at::kFloat).to(type("bias_type"));
    return {dx, dw, db, {}, {}, {}, {}};
  }

 private:
  static void keep_for_backward(torch::autograd::AutogradContext* context, QuantLayer& layer,
                                const at::Tensor& x, const at::Tensor& weight,
                                std::optional<Quantised> kept) {
    torch::autograd::variable_list variables = {weight};
    if (weight.requires_grad() && layer.recipe().weight_grad.quantised) {
      if (!kept)
        kept = layer.quantise(x, layer.recipe().weight_grad.right, Role::Input, /*sums_over_rows=*/true,
                              /*noted=*/!layer.recipe().forward.quantised);
      variables.push_back(kept->codes);
      variables.push_back(kept->scales);
      context->saved_data["outer_scale"] = static_cast<double>(kept->outer_scale);
    } else if (weight.requires_grad()) {
      variables.push_back(x);
    }
    context->save_for_backward(std::move(variables));
  }

  static at::Tensor input_grad(QuantLayer& layer, const ProductRule& rule, const at::Tensor& dy,
                               const Weight& weight, at::ScalarType type, at::ScalarType low) {
    if (!rule.quantised) {
      const at::Tensor matrix = weight.matrix.to(low);
      return at::mm(dy.to(low), weight.is_in_by_out ? matrix.t() : matrix).to(type);
    }
    const Quantised left =
        layer.quantise(dy, rule.left, Role::Grad, /*sums_over_rows=*/false, /*noted=*/true);
    const bool noted = !layer.recipe().forward.quantised;  // else forward has
    return product(left, quantised_weight(layer, weight, rule.right, /*over_out=*/true, noted), {}, type);
  }

  static at::Tensor quantised_weight_grad(torch::autograd::AutogradContext* context, QuantLayer& layer,
                                          const Recipe& recipe, const at::Tensor& dy,
                                          const torch::autograd::variable_list& saved, const Weight& weight) {
    const Quantised x{.codes = saved[1],
                      .scales = saved[2],
                      .rule = recipe.weight_grad.right,
                      .sums_over_rows = true,
                      .outer_scale = static_cast<float>(context->saved_data["outer_scale"].toDouble())};
    // Noted where the input's gradient, which reads the same values, is not computed.
    const bool noted = !context->needs_input_grad(0) || !recipe.input_grad.quantised;
    const Quantised left =
        layer.quantise(dy, recipe.weight_grad.left, Role::Grad, /*sums_over_rows=*/true, noted);
    const at::ScalarType type = weight.matrix.scalar_type();
    return weight.is_in_by_out ? product(x, left, {}, type) : product(left, x, {}, type);
  }

  static at::Tensor plain_weight_grad(const at::Tensor& dy, const at::Tensor& x, const Weight& weight,
                                      at::ScalarType low) {
    const at::Tensor left = dy.to(low), right = x.to(low);
    const at::Tensor grad = weight.is_in_by_out ? at::mm(right.t(), left) : at::mm(left.t(), right);
    return grad.to(weight.matrix.scalar_type());
  }
};

bool can_be_quantised(const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  return (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf) && is_plain(tensor);
}

/// The weight of a layer: a parameter, or the transpose of one, which stands in autograd's graph itself.
std::optional<Weight> weight_of(const at::Tensor& tensor, const OpContext& context, bool is_in_by_out,
                                std::shared_ptr<QuantLayer>& layer) {
  layer = context.quant->find(tensor);
  if (layer) return Weight{tensor, is_in_by_out};
  if (!tensor.is_view()) return std::nullopt;
  const at::Tensor base(tensor._base());
  layer = context.quant->find(base);
  const bool is_transpose = layer && base.dim() == 2 && tensor.dim() == 2 &&
                            tensor.storage_offset() == base.storage_offset() &&
                            tensor.size(0) == base.size(1) && tensor.size(1) == base.size(0) &&
                            tensor.stride(0) == base.stride(1) && tensor.stride(1) == base.stride(0);
  if (!is_transpose) {
    layer = nullptr;
    return std::nullopt;
  }
  return Weight{tensor, is_in_by_out};
}

std::optional<Call> call_of(const at::Tensor& input, const at::Tensor& weight, std::optional<at::Tensor> bias,
                            bool is_in_by_out, const OpContext& context) {
  if (!context.quant || input.dim() < 1 || weight.dim() != 2 || !can_be_quantised(input)) return std::nullopt;
  std::shared_ptr<QuantLayer> layer;
  auto found = weight_of(weight, context, is_in_by_out, layer);
  if (!found || !can_be_quantised(found->matrix) || found->matrix.device() != input.device())
    return std::nullopt;
  // Sizes that do not fit are LibTorch's to refuse.
  if (input.size(-1) != weight.size(is_in_by_out ? 0 : 1)) return std::nullopt;
  const std::int64_t out = weight.size(is_in_by_out ? 1 : 0);
  if (bias && (!can_be_quantised(*bias) || bias->device() != input.device() || bias->dim() != 1 ||
               bias->size(0) != out))
    return std::nullopt;
  return Call{input, std::move(*found), std::move(bias), std::move(layer)};
}

std::optional<Call> linear_call(OpArguments given, const OpContext& context) {
  return call_of(given[0].toTensor(), given[1].toTensor(), given_tensor(given[2]), /*is_in_by_out=*/false,
                 context);
}

/// addmm(bias, x, weight): as a layer uses it, with a bias for each column and no factors.
std::optional<Call> addmm_call(OpArguments given, const OpContext& context) {
  const at::Tensor& bias = given[0].toTensor();
  const at::Tensor& weight = given[2].toTensor();
  const bool is_layer = given[1].toTensor().dim() == 2 && bias.dim() == 1 && given[3].toScalar().equal(1) &&
                        given[4].toScalar().equal(1);
  if (!is_layer) return std::nullopt;
  // One number for all columns is a bias, too.
  const bool is_one = weight.dim() == 2 && bias.size(0) == 1;
  return call_of(given[1].toTensor(), weight, is_one ? bias.expand({weight.size(1)}) : bias,
                 /*is_in_by_out=*/true, context);
}

/// torch::nn::Linear without a bias, or of more than two dimensions.
std::optional<Call> matmul_call(OpArguments given, const OpContext& context) {
  return call_of(given[0].toTensor(), given[1].toTensor(), std::nullopt, /*is_in_by_out=*/true, context);
}

std::optional<Call> mm_call(OpArguments given, const OpContext& context) {
  return given[0].toTensor().dim() == 2 ? matmul_call(given, context) : std::nullopt;
}

template <auto find>
bool takes(OpArguments given, const OpContext& context) {
  return context.quant && find(given, context).has_value();
}

template <auto find>
at::Tensor run(OpArguments given, const OpContext& context) {
  const Call call = *find(given, context);
  const auto wants = [](const at::Tensor& tensor) { return tensor.requires_grad(); };
  const bool trains = c10::GradMode::is_enabled() &&
                      (wants(call.input) || wants(call.weight.matrix) || (call.bias && wants(*call.bias)));
  // Rows outside of the node: LibTorch forbids changing its output in place where that is a view, and
  // torch::nn::Linear adds its bias so.
  const at::Tensor& x = call.input;
  const at::Tensor rows = x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
  const at::Tensor y =
      QuantisedLinear::apply(rows, call.weight.matrix, call.bias, call.weight.is_in_by_out,
                             c10::make_intrusive<LayerHandle>(call.layer), context.low, trains);
  if (x.dim() == 2) return y;
  auto sizes = x.sizes().vec();
  sizes.back() = y.size(1);
  return at::_unsafe_view(y, sizes);
}

template <auto find>
OwnOp row(std::string_view op) {
  return {.op = op, .rule = OpRule::Low, .takes = takes<find>, .run = run<find>, .run_again = nullptr};
}

}  // namespace

OwnOp quantised_linear() { return row<linear_call>("linear"); }
OwnOp quantised_addmm() { return row<addmm_call>("addmm"); }
OwnOp quantised_matmul() { return row<matmul_call>("matmul"); }
OwnOp quantised_mm() { return row<mm_call>("mm"); }

}  // namespace halfstep
