// Products of BF16 rows with a matrix on processors with AMX, forward and backward, by loops of our own
// (kernels/product.h): the same bits on any number of threads. Weight gradients, whose operands lie across
// the sum, gain the most.
//
// Backward keeps what LibTorch's keeps: rows and matrix.
#include <ATen/Parallel.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <halfstep/error.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cstdlib>
#include <memory>

#include "kernels/product.h"
#include "ops/low_product.h"
#include "ops/own_ops.h"
#include "tensor/update_path.h"

namespace halfstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Of which LibTorch's product is not slower: few rows, as in a step of a recurrent layer or where a model
/// generates, are multiplied before the matrix is copied.
constexpr int64_t kFewestRows = 128, kFewest = 32;

bool has_dense_rows(const at::Tensor& matrix) { return matrix.stride(1) == 1 || matrix.size(1) == 1; }

at::Tensor dense(const at::Tensor& matrix) {
  return has_dense_rows(matrix) || has_dense_rows(matrix.t()) ? matrix : matrix.contiguous();
}

ProductOperand operand_of(const at::Tensor& matrix) {
  const bool is_transposed = !has_dense_rows(matrix);
  return {.codes = static_cast<const std::uint16_t*>(matrix.const_data_ptr()),
          .row = static_cast<std::size_t>(matrix.stride(is_transposed ? 1 : 0)),
          .is_transposed = is_transposed};
}

/// Kept by each thread: to be given so much memory anew takes as long as a small product.
void* scratch_of_thread(std::size_t bytes) {
  thread_local std::unique_ptr<void, decltype(&std::free)> memory(nullptr, std::free);
  thread_local std::size_t size = 0;
  if (bytes > size) {
    memory.reset();
    size = 0;
    memory.reset(std::aligned_alloc(64, bytes));
    TORCH_CHECK(memory, "not enough memory for a product: ", bytes, " bytes");
    size = bytes;
  }
  return memory.get();
}

at::Tensor product(const at::Tensor& given_left, const at::Tensor& given_right,
                   const std::optional<at::Tensor>& given_bias) {
  HALFSTEP_CHECK(kernels().product && given_left.numel() > 0 && given_right.numel() > 0,
                 "halfstep::product: for processors with AMX, and for matrices with elements.");
  const at::Tensor left = dense(given_left), right = dense(given_right);
  const at::Tensor bias = given_bias ? given_bias->contiguous() : at::Tensor();
  const at::Tensor result = at::empty({left.size(0), right.size(1)}, left.options());
  const ProductCall call{
      .left = operand_of(left),
      .right = operand_of(right),
      .bias = bias.defined() ? static_cast<const std::uint16_t*>(bias.const_data_ptr()) : nullptr,
      .result = static_cast<std::uint16_t*>(result.mutable_data_ptr()),
      .result_row = static_cast<std::size_t>(right.size(1)),
      .rows = static_cast<std::size_t>(left.size(0)),
      .columns = static_cast<std::size_t>(right.size(1)),
      .terms = static_cast<std::size_t>(left.size(1))};
  const std::size_t parts = product_parts(call, static_cast<std::size_t>(at::get_num_threads()));
  at::parallel_for(0, static_cast<int64_t>(parts), /*grain_size=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const ProductPart part = product_part(call, parts, static_cast<std::size_t>(i));
      multiply(call, part, scratch_of_thread(kernels().product->bytes(call, part)));
    }
  });
  return result;
}

class LowProduct : public torch::autograd::Function<LowProduct> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, const at::Tensor& matrix,
                            const std::optional<at::Tensor>& bias) {
    // What the other's gradient is made of.
    context->save_for_backward(
        {matrix.requires_grad() ? rows : at::Tensor(), rows.requires_grad() ? matrix : at::Tensor()});
    context->saved_data["by_rows"] = has_dense_rows(matrix);
    context->saved_data["has_bias"] = bias.has_value();
    return product_of(rows, matrix, bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& output_grads) {
    // Where backward runs inside the scope, its products are ours all the same.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &rows = saved[0], &matrix = saved[1], &grad = output_grads[0];
    // LibTorch's can be differentiated again, and takes gradients of other kinds.
    const bool again = at::GradMode::is_enabled() || !is_plain(grad);
    const auto times = [again](const at::Tensor& left, const at::Tensor& right) {
      return again ? at::mm(left, right) : product_of(left, right);
    };
    at::Tensor rows_grad, matrix_grad, bias_grad;
    if (matrix.defined() && context->needs_input_grad(0)) rows_grad = times(grad, matrix.t());
    if (rows.defined() && context->needs_input_grad(1)) {
      // As the matrix lies in memory, so that autograd adds it there without a copy.
      matrix_grad =
          context->saved_data["by_rows"].toBool() ? times(rows.t(), grad) : times(grad.t(), rows).t();
    }
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(2)) bias_grad = grad.sum(0);
    return {rows_grad, matrix_grad, bias_grad};
  }
};

struct Call {
  at::Tensor input, matrix;  // [..., terms], [terms, columns]
  std::optional<at::Tensor> bias;
};

bool is_operand(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 && kernels_serve(tensor) && !tensor.is_nested() &&
         is_plain(tensor) && tensor.numel() > 0;
}

std::optional<Call> call_of(const at::Tensor& input, const at::Tensor& matrix,
                            std::optional<at::Tensor> bias = {}) {
  if (!is_operand(input) || !is_operand(matrix) || input.dim() < 2 || matrix.dim() != 2 ||
      input.size(-1) != matrix.size(0))
    return std::nullopt;
  const int64_t terms = matrix.size(0), columns = matrix.size(1);
  if (terms < kFewest || columns < kFewest || input.numel() / terms < kFewestRows) return std::nullopt;
  if (bias) {
    if (!is_operand(*bias) || bias->dim() != 1 || (bias->size(0) != columns && bias->size(0) != 1))
      return std::nullopt;
    bias = bias->expand({columns});
  }
  return Call{input, matrix, std::move(bias)};
}

std::optional<Call> linear_call(OpArguments given) {
  const at::Tensor& weight = given[1].toTensor();
  if (weight.dim() != 2) return std::nullopt;
  return call_of(given[0].toTensor(), weight.t(), given_tensor(given[2]));
}

/// addmm(bias, x, weight), with a bias for each column and no factors.
std::optional<Call> addmm_call(OpArguments given) {
  if (!given[3].toScalar().equal(1) || !given[4].toScalar().equal(1) || given[1].toTensor().dim() != 2)
    return std::nullopt;
  return call_of(given[1].toTensor(), given[2].toTensor(), given[0].toTensor());
}

std::optional<Call> matmul_call(OpArguments given) {
  return call_of(given[0].toTensor(), given[1].toTensor());
}

std::optional<Call> mm_call(OpArguments given) {
  return given[0].toTensor().dim() == 2 ? matmul_call(given) : std::nullopt;
}

template <auto find>
bool takes(OpArguments given, const OpContext&) {
  return kernels().product && find(given).has_value();
}

template <auto find>
at::Tensor run(OpArguments given, const OpContext&) {
  const Call call = *find(given);
  // Rows outside of the node: LibTorch forbids changing its output in place where that is a view.
  const at::Tensor& x = call.input;
  if (x.dim() == 2) return LowProduct::apply(x, call.matrix, call.bias);
  auto sizes = x.sizes().vec();
  sizes.back() = call.matrix.size(1);
  return at::_unsafe_view(LowProduct::apply(x.reshape({-1, x.size(-1)}), call.matrix, call.bias), sizes);
}

template <auto find>
OwnOp row(std::string_view op) {
  return {.op = op,
          .rule = OpRule::Low,
          .takes = takes<find>,
          .run = run<find>,
          .run_again = nullptr,  // not cheap
          .of_cast_arguments = true};
}

}  // namespace

// As an operation of the dispatcher, so that what looks at operations sees the products of backward.
at::Tensor product_of(const at::Tensor& left, const at::Tensor& right,
                      const std::optional<at::Tensor>& bias) {
  if (!kernels().product || left.scalar_type() != at::kBFloat16)
    return bias ? at::addmm(*bias, left, right) : at::mm(left, right);
  static const auto handle =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("halfstep::product", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&)>();
  return handle.call(left, right, bias);
}

OwnOp low_linear() {
  static const auto definition = [] {
    auto library = std::make_unique<torch::Library>(torch::Library::FRAGMENT, "halfstep", std::nullopt,
                                                    __FILE__, __LINE__);
    library->def("product(Tensor left, Tensor right, Tensor? bias=None) -> Tensor");
    library->impl("product", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(product)));
    return library;
  }();
  return row<linear_call>("linear");
}
OwnOp low_addmm() { return row<addmm_call>("addmm"); }
OwnOp low_matmul() { return row<matmul_call>("matmul"); }
OwnOp low_mm() { return row<mm_call>("mm"); }

}  // namespace halfstep
