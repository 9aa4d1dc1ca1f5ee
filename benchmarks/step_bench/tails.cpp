#include "tails.h"

#include <halfstep/error.h>
#include <halfstep/grads.h>

#include <algorithm>

namespace bench {
namespace {

Tensors copies(const Tensors& tensors) {
  Tensors made;
  for (const auto& tensor : tensors) made.push_back(tensor.clone());
  return made;
}

Tensors zeros_like(const Tensors& tensors) {
  Tensors made;
  for (const auto& tensor : tensors) made.push_back(at::zeros_like(tensor));
  return made;
}

std::vector<halfstep::Param> make_params(const Tensors& weights, halfstep::WeightStorage storage) {
  std::vector<halfstep::Param> params;
  for (const auto& weight : weights)
    params.push_back(halfstep::make_param("weight." + std::to_string(params.size()),
                                          weight.clone().set_requires_grad(true), storage, at::kBFloat16));
  return params;
}

Tensors trainable(Tensors tensors) {
  for (auto& tensor : tensors) tensor.set_requires_grad(true);
  return tensors;
}

torch::optim::AdamWOptions torch_options(const halfstep::AdamWOptions& options) {
  return torch::optim::AdamWOptions(options.lr)
      .betas({options.betas[0], options.betas[1]})
      .eps(options.eps)
      .weight_decay(options.weight_decay);
}

}  // namespace

HalfstepTail::HalfstepTail(const Tensors& weights, halfstep::WeightStorage storage,
                           const TailSettings& settings)
    : settings_(settings), params_(make_params(weights, storage)), optimizer_(params_, settings.adamw) {}

void HalfstepTail::use_grads(const Tensors& grads) {
  for (std::size_t i = 0; i < params_.size(); ++i) params_[i].working.mutable_grad() = grads[i];
}

double HalfstepTail::norm() const { return halfstep::inspect_grads(params_, settings_.loss_scale).norm(); }

void HalfstepTail::step(double max_norm) {
  const auto grads = halfstep::inspect_grads(params_, settings_.loss_scale);
  const auto report = optimizer_.step(grads.clipped_to(max_norm));
  HALFSTEP_CHECK(report.stepped(), "Halfstep's tail: ", report.sentence());
}

Tensors HalfstepTail::full_precision() const {
  Tensors full;
  for (const auto& param : params_) full.push_back(halfstep::full_precision(param));
  return full;
}

EngineTail::EngineTail(const Tensors& weights, const TailSettings& settings)
    : settings_(settings),
      masters_(copies(weights)),
      grads_(zeros_like(weights)),
      first_moments_(zeros_like(weights)),
      second_moments_(zeros_like(weights)) {
  for (const auto& weight : weights) {
    working_.push_back(weight.to(at::kBFloat16));
    step_counts_.push_back(at::zeros({}, weight.device()));
  }
}

void EngineTail::load_fp32_grads(const Tensors& grads) { at::_foreach_copy_(grads_, grads); }

void EngineTail::step_from_fp32(double max_norm) {
  const at::TensorOptions scalar = grads_[0].options();
  at::Tensor found_inf = at::zeros({}, scalar);
  at::_amp_foreach_non_finite_check_and_unscale_(grads_, found_inf,
                                                 at::full({}, 1 / settings_.loss_scale, scalar));
  last_norm_ = at::stack(at::_foreach_norm(grads_)).norm();
  at::_foreach_mul_(grads_, (max_norm / (last_norm_ + 1e-6)).clamp_max(1.0));
  at::_foreach_add_(step_counts_, 1);
  const auto& adamw = settings_.adamw;
  at::_fused_adamw_(masters_, grads_, first_moments_, second_moments_, /*max_exp_avg_sqs=*/{}, step_counts_,
                    adamw.lr, adamw.betas[0], adamw.betas[1], adamw.weight_decay, adamw.eps,
                    /*amsgrad=*/false,
                    /*maximize=*/false, /*grad_scale=*/{}, found_inf);
  at::_foreach_copy_(working_, masters_);
}

void EngineTail::step_from_bf16(const Tensors& grads, double max_norm) {
  at::_foreach_copy_(grads_, grads);
  step_from_fp32(max_norm);
}

TorchOptimTail::TorchOptimTail(const Tensors& weights, const TailSettings& settings)
    : settings_(settings),
      weights_(trainable(copies(weights))),
      optimizer_(weights_, torch_options(settings.adamw)) {
  for (auto& weight : weights_) weight.mutable_grad() = at::zeros_like(weight);
}

void TorchOptimTail::load_grads(const Tensors& grads) {
  for (std::size_t i = 0; i < weights_.size(); ++i) weights_[i].mutable_grad().copy_(grads[i]);
}

void TorchOptimTail::step(double max_norm) {
  const double unscale = 1 / settings_.loss_scale;
  const bool finite = std::all_of(weights_.begin(), weights_.end(), [&](at::Tensor& weight) {
    at::Tensor& grad = weight.mutable_grad();
    grad.mul_(unscale);
    return at::isfinite(grad).all().item<bool>();
  });
  HALFSTEP_CHECK(finite, "the benchmark's own gradients are not finite");
  torch::nn::utils::clip_grad_norm_(weights_, max_norm);
  optimizer_.step();
}

void TorchOptimTail::step_of_optimizer_alone() { optimizer_.step(); }

}  // namespace bench
