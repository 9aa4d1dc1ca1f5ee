// Cross-entropy of BF16 or FP16 logits, computed in FP32 without an FP32 copy of them: a few rows at a time,
// so that what is FP32 stays small.
//
// Backward keeps the logits as they are and two FP32 numbers a row, and rounds each gradient once. Where the
// graph is not kept and nobody else holds the logits, the gradient takes their memory.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "ops/own_ops.h"
#include "tensor/saved_tensors.h"
#include "tensor/update_path.h"
#include "tensor/vector_math.h"

namespace halfstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Elements that are FP32 at one time: on a CPU what the second-level cache of each thread holds, on an
/// accelerator enough to make the start of a kernel cheap beside it.
int64_t elements_at_a_time(const at::Tensor& logits) {
  return kernels_serve(logits) ? int64_t{1} << 18 : int64_t{1} << 24;
}

/// Calls body(first, count) for runs of rows, on a CPU from several threads: one parallel region for all, not
/// one for each small operation. Autograd is off inside, on those threads too.
template <typename Body>
void for_each_chunk_of_rows(const at::Tensor& logits, Body body) {
  const int64_t rows = logits.size(0);
  const int64_t step = std::max<int64_t>(1, elements_at_a_time(logits) / logits.size(1));
  const auto run = [&](int64_t begin, int64_t end) {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (int64_t first = begin * step; first < std::min(end * step, rows); first += step) {
      body(first, std::min(step, rows - first));
    }
  };
  const int64_t chunks = (rows + step - 1) / step;
  kernels_serve(logits) ? at::parallel_for(0, chunks, /*grain_size=*/1, run) : run(0, chunks);
}

/// Whether backward may write over the logits: it is the last to use them, and no tensor, view or saved
/// variable beside it sees their memory.
///
/// The caller's list holds the logits, and so does the node, or a hook in its place: the hook by a tensor of
/// its own on the same storage. A view is held together with its base, which nobody else may hold then.
bool is_ours_alone(const at::Tensor& logits) {
  if (torch::autograd::get_current_graph_task_keep_graph() || logits.is_leaf()) return false;
  if (!logits.is_non_overlapping_and_dense()) return false;
  const size_t tensors = logits.storage().use_count();
  if (logits.use_count() == 1) return !logits.is_view() && tensors <= 2;  // kept by a hook
  if (logits.use_count() != 2) return false;
  return logits.is_view() ? logits._base().use_count() == 1 && tensors == 2 : tensors == 1;
}

class LowLogitsCrossEntropy : public torch::autograd::Function<LowLogitsCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits, const at::Tensor& target,
                            const std::optional<at::Tensor>& weight, int64_t reduction, int64_t ignore_index,
                            double label_smoothing) {
    settle_vector_math();
    const at::Tensor is_counted = target.ne(ignore_index);
    const at::Tensor classes = at::where(is_counted, target, 0).unsqueeze(1);
    at::Tensor row_weight = is_counted.to(at::kFloat);
    if (weight) row_weight = row_weight * weight->to(at::kFloat).index_select(0, classes.squeeze(1));

    const at::Tensor top = at::empty({logits.size(0), 1}, logits.options().dtype(at::kFloat));
    const at::Tensor sum = at::empty_like(top), expected = at::empty_like(top);
    for_each_chunk_of_rows(logits, [&](int64_t first, int64_t count) {
      const auto rows = [&](const at::Tensor& all) { return all.narrow(0, first, count); };
      const at::Tensor x = rows(logits).to(at::kFloat);
      rows(top).copy_(x.amax(1, /*keepdim=*/true));
      x.sub_(rows(top));
      const at::Tensor of_target = x.gather(1, rows(classes));
      if (label_smoothing > 0) of_target.mul_(1 - label_smoothing).add_(x.mean(1, true), label_smoothing);
      rows(expected).copy_(of_target);
      rows(sum).copy_(x.exp_().sum(1, /*keepdim=*/true));
    });
    // Chosen, not multiplied by zero: a row that does not count may hold a NaN.
    const at::Tensor loss = at::where(is_counted, (sum.log() - expected).squeeze(1) * row_weight, 0);

    at::Tensor divisor;
    if (reduction == at::Reduction::Mean) divisor = row_weight.sum();
    context->save_for_backward({logits, classes, row_weight, top, sum, divisor});
    context->saved_data["label_smoothing"] = label_smoothing;
    if (reduction == at::Reduction::None) return loss;
    return divisor.defined() ? loss.sum() / divisor : loss.sum();
  }

  static variable_list backward(AutogradContext* context, const variable_list& loss_grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &logits = saved[0], &classes = saved[1], &row_weight = saved[2], &top = saved[3],
                     &sum = saved[4], &divisor = saved[5];
    const double label_smoothing = context->saved_data["label_smoothing"].toDouble();
    at::Tensor row_grad = loss_grads[0].to(at::kFloat) * row_weight;
    if (divisor.defined()) row_grad = row_grad / divisor;
    // As in LibTorch 2.13, a row without weight has no gradient even if no row has any: 0 / 0 above.
    row_grad = at::where(row_weight.ne(0), row_grad, 0).unsqueeze(1);
    return {at::GradMode::is_enabled() ? differentiable_gradient(logits, classes, row_grad, label_smoothing)
                                       : gradient(logits, classes, row_grad, top, sum, label_smoothing),
            {},
            {},
            {},
            {},
            {}};
  }

 private:
  /// (p - q) times the gradient of the row: p from softmax, q = 1 for the target and 0 elsewhere, smoothed.
  static at::Tensor gradient(const at::Tensor& logits, const at::Tensor& classes, const at::Tensor& row_grad,
                             const at::Tensor& top, const at::Tensor& sum, double label_smoothing) {
    const at::Tensor result = is_ours_alone(logits) ? logits.detach() : at::empty_like(logits);
    const at::Tensor of_exp = row_grad / sum, of_target = row_grad * (label_smoothing - 1);
    const at::Tensor of_any = row_grad * (label_smoothing / static_cast<double>(logits.size(1)));
    for_each_chunk_of_rows(logits, [&](int64_t first, int64_t count) {
      const auto rows = [&](const at::Tensor& all) { return all.narrow(0, first, count); };
      at::Tensor x = rows(logits).to(at::kFloat).sub_(rows(top)).exp_().mul_(rows(of_exp));
      if (label_smoothing > 0) x.sub_(rows(of_any));
      rows(result).copy_(x.scatter_add_(1, rows(classes), rows(of_target)));
    });
    return result;
  }

  /// The same in operations that can be differentiated again, with all the memory that this takes.
  static at::Tensor differentiable_gradient(const at::Tensor& logits, const at::Tensor& classes,
                                            const at::Tensor& row_grad, double label_smoothing) {
    const at::Tensor p = at::softmax(logits.to(at::kFloat), 1);
    const at::Tensor q =
        at::full_like(p, label_smoothing / static_cast<double>(p.size(1)))
            .scatter_add(1, classes, at::full_like(classes, 1 - label_smoothing, p.options()));
    return ((p - q) * row_grad).to(logits.scalar_type());
  }
};

/// The arguments of aten::cross_entropy_loss.
struct CrossEntropyArguments {
  explicit CrossEntropyArguments(OpArguments given)
      : logits(given[0].toTensor()),
        target(given[1].toTensor()),
        weight(given_tensor(given[2])),
        reduction(given[3].toInt()),
        ignore_index(given[4].toInt()),
        label_smoothing(given[5].toDouble()) {}

  const at::Tensor& logits;
  const at::Tensor& target;
  std::optional<at::Tensor> weight;
  int64_t reduction;  // at::Reduction
  int64_t ignore_index;
  double label_smoothing;
};

/// On an accelerator many small operations cost more than the FP32 copy of few logits.
bool is_worth_it(const at::Tensor& logits) {
  return kernels_serve(logits) || logits.numel() > elements_at_a_time(logits);
}

/// Rows of BF16 or FP16 logits, one class index a row; class weights or label smoothing, not both.
bool takes(OpArguments given) {
  const CrossEntropyArguments arguments(given);
  const at::Tensor &logits = arguments.logits, &target = arguments.target;
  const auto& weight = arguments.weight;
  const bool plain = is_plain(logits) && is_worth_it(logits);
  const bool rows_of_classes = logits.dim() == 2 && logits.numel() > 0 && target.dim() == 1 &&
                               target.size(0) == logits.size(0) && target.scalar_type() == at::kLong &&
                               target.device() == logits.device();
  const bool known_weight =
      !weight || (weight->dim() == 1 && weight->size(0) == logits.size(1) && !weight->requires_grad() &&
                  weight->device() == logits.device() && arguments.label_smoothing == 0);
  const bool known_smoothing = arguments.label_smoothing >= 0 && arguments.label_smoothing <= 1;
  return is_low(logits) && plain && rows_of_classes && known_weight && known_smoothing;
}

/// The FP32 loss, as stock computes it from FP32 copies.
at::Tensor run(OpArguments given) {
  const CrossEntropyArguments arguments(given);
  const ExactSavedTensors exact;
  return LowLogitsCrossEntropy::apply(arguments.logits, arguments.target, arguments.weight,
                                      arguments.reduction, arguments.ignore_index, arguments.label_smoothing);
}

}  // namespace

OwnOp low_logits_cross_entropy() {
  return {.op = "cross_entropy_loss",
          .rule = OpRule::Fp32,
          .takes = [](OpArguments given, const OpContext&) { return takes(given); },
          .run = [](OpArguments given, const OpContext&) { return run(given); },
          .run_again = nullptr};  // a loss is small
}

}  // namespace halfstep
