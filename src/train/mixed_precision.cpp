#include <ATen/core/grad_mode.h>
#include <halfstep/error.h>
#include <halfstep/mixed_precision.h>
#include <torch/nn/module.h>

#include <unordered_set>

#include "scaling/scaler_state.h"
#include "scaling/skip_limit.h"
#include "tensor/faults.h"
#include "tensor/param_checks.h"
#include "tensor/vector_math.h"
#include "train/accumulator.h"
#include "train/float32_products.h"

namespace halfstep {
namespace {

std::vector<Param> take_in(const Precision& precision, torch::nn::Module& model) {
  const auto named = model.named_parameters();
  HALFSTEP_CHECK(!named.is_empty(), "MixedPrecision: the model has no parameters.");
  std::vector<NamedTensor> tensors;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : named)
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      tensors.push_back({&item.key(), &item.value()});

  // All before the first is rounded: a model that is refused is left as it was. Memory too: once rounded, two
  // parameters that shared theirs would each have its own, and be tied no more.
  for (const auto& [name, tensor] : tensors)
    check_can_be_param(*name, *tensor, precision.weights, precision.compute);
  check_memory_apart("MixedPrecision", tensors);

  std::vector<Param> params;
  for (const auto& [name, tensor] : tensors)
    params.push_back(make_checked_param(*name, *tensor, precision.weights, precision.compute));
  return params;
}

const std::string kLossScalePrefix = "loss_scale.";
const std::string kAccumulationPrefix = "accumulation.";

/// The values under a prefix, by the rest of their names.
StateDict under(const StateDict& saved, const std::string& prefix) {
  StateDict found;
  for (const auto& [name, value] : saved)
    if (name.starts_with(prefix)) found.set(name.substr(prefix.size()), value);
  return found;
}

}  // namespace

struct MixedPrecision::Impl {
  Precision precision;
  MixedPrecisionOptions options;
  std::optional<train::Float32ProductsGuard> float32_products;
  std::vector<Param> params;
  scaling::ScalerState scaler;
  std::optional<train::GradAccumulator> accumulator;

  Impl(Precision given, torch::nn::Module& model, MixedPrecisionOptions given_options)
      : precision(std::move(given)), options(given_options) {
    precision.check();
    if (options.cpu_allocator) install_cpu_allocator();
    settle_vector_math();
    // Before the model is touched: it refuses a precision that this machine only emulates.
    if (precision.compute != at::kFloat) {
      const AutocastScope probe(precision.compute, precision.ops, options.autocast);
    }
    if (precision.float32_products != Float32Products::Full)
      float32_products.emplace(precision.float32_products);
    // Without loss scaling a scale that cannot move: skipped steps are counted and limited all the same.
    scaler.options = precision.loss_scaling.value_or(LossScaling{.initial = 1, .floor = 1, .cap = 1});
    scaler.state = initial_state(scaler.options);
    params = take_in(precision, model);
    if (options.accumulation != Accumulation::None) accumulator.emplace(options.accumulation);
  }

  /// Autograd would add to it: in the parameter's own low precision, which rounds away what later
  /// micro-batches add; with an accumulator, to the sum of a step that is over.
  void check_no_grad_left() const {
    for (const Param& param : params)
      HALFSTEP_CHECK(
          (param.storage == WeightStorage::Fp32 && !accumulator) || !param.working.grad().defined(),
          "MixedPrecision: backward, but '", param.name, "' still has a gradient, of type ",
          param.working.grad().scalar_type(),
          ", which autograd would add to. Call optimizer.zero_grad() after each step; set "
          "requires_grad_(false) on a parameter that no optimizer updates; ask for "
          "Accumulation::Fp32 if several micro-batches are meant.");
  }
};

MixedPrecision::ForwardScope::ForwardScope(const MixedPrecision& mp) : memory_(MemoryClass::Activation) {
  const Precision& precision = mp.impl_->precision;
  if (precision.compute != at::kFloat)
    autocast_.emplace(precision.compute, precision.ops, mp.impl_->options.autocast);
}

MixedPrecision::MixedPrecision(Precision precision, torch::nn::Module& model, MixedPrecisionOptions options)
    : impl_(std::make_unique<Impl>(std::move(precision), model, options)) {}
MixedPrecision::~MixedPrecision() = default;
MixedPrecision::MixedPrecision(MixedPrecision&&) noexcept = default;
MixedPrecision& MixedPrecision::operator=(MixedPrecision&&) noexcept = default;

const std::vector<Param>& MixedPrecision::params() const { return impl_->params; }
const Precision& MixedPrecision::precision() const { return impl_->precision; }
double MixedPrecision::loss_scale() const { return impl_->scaler.state.loss_scale; }
const LossScaleState& MixedPrecision::loss_scale_state() const { return impl_->scaler.state; }

void MixedPrecision::backward(const at::Tensor& loss) {
  HALFSTEP_CHECK(loss.defined() && loss.numel() == 1,
                 "MixedPrecision: backward needs a loss of one element, not ",
                 loss.defined() ? detail::concat("a tensor of shape ", loss.sizes()) : "an undefined tensor",
                 ". Take its mean or sum first.");
  if (impl_->accumulator) impl_->accumulator->check_open();
  impl_->check_no_grad_left();
  const MemoryClassScope memory(MemoryClass::Gradient);
  // In FP32: 2^16 times a loss of 2 is Inf in FP16.
  impl_->precision.loss_scaling ? (loss.to(at::kFloat) * loss_scale()).backward() : loss.backward();
  if (impl_->accumulator) impl_->accumulator->add_micro_batch(impl_->params, loss_scale());
}

GradSummary MixedPrecision::inspect_grads(GradDetail detail) {
  if (impl_->accumulator) return impl_->accumulator->close(impl_->params, loss_scale(), detail);
  return halfstep::inspect_grads(impl_->params, loss_scale(), detail);
}

void MixedPrecision::advance(const GradSummary& grads) {
  if (impl_->accumulator) impl_->accumulator->begin_step();
  if (!grads.any) return;  // neither a clean step nor a skipped one
  auto& [options, state] = impl_->scaler;
  HALFSTEP_CHECK(grads.loss_scale == state.loss_scale,
                 "MixedPrecision: advance with gradients that carry a loss "
                 "scale of ",
                 grads.loss_scale, "; the present one is ", state.loss_scale,
                 ". Call it once a step, with what inspect_grads returned in that step.");
  state = next_state(options, state, grads.finite);
  scaling::check_skip_limit("MixedPrecision", options, state, grads.first_bad);
}

// Weights by name, as they lie in memory: visit(name, tensor).
template <typename Visit>
static void for_each_weight(const std::vector<Param>& params, Visit visit) {
  for (const Param& param : params) {
    visit("working." + param.name, param.working);
    if (param.master.defined()) visit("master." + param.name, param.master);
  }
}

StateDict MixedPrecision::state_dict() const {
  StateDict saved;
  saved.set("precision", impl_->precision.name());
  saved.set("weights", std::string(to_string(impl_->precision.weights)));
  for_each_weight(impl_->params, [&](const std::string& name, const at::Tensor& tensor) {
    saved.set(name, tensor.detach().clone());
  });
  for (const auto& [name, value] : scaling::saved_form(impl_->scaler))
    saved.set(kLossScalePrefix + name, value);
  if (impl_->accumulator)
    for (const auto& [name, value] : impl_->accumulator->saved_form(impl_->params))
      saved.set(kAccumulationPrefix + name, value);
  return saved;
}

void MixedPrecision::load_state_dict(const StateDict& saved) {
  const at::NoGradGuard no_grad;
  const StateDict present = state_dict();
  // The sum of micro-batches is there or not, as the step was begun or not; the accumulator looks at its
  // names.
  std::vector<std::string_view> names;
  for (const auto& [name, value] : present)
    if (!name.starts_with(kAccumulationPrefix)) names.push_back(name);
  for (const auto& [name, value] : saved)
    if (impl_->accumulator && name.starts_with(kAccumulationPrefix)) names.push_back(name);
  saved.expect_exactly("MixedPrecision", names);

  Faults faults;
  for (const char* name : {"precision", "weights"})
    faults.expect(saved.text(name) == present.text(name), "'", name, "' is ", saved.text(name), ", expected ",
                  present.text(name));
  for_each_weight(impl_->params, [&](const std::string& name, const at::Tensor& tensor) {
    faults.expect_like(name, saved.tensor(name), tensor);
  });
  faults.throw_if_any("MixedPrecision");
  const scaling::ScalerState scaler = scaling::loaded_from(under(saved, kLossScalePrefix));
  if (impl_->accumulator) impl_->accumulator->load(under(saved, kAccumulationPrefix), impl_->params);
  impl_->scaler = scaler;
  for_each_weight(impl_->params,
                  [&](const std::string& name, at::Tensor tensor) { tensor.copy_(saved.tensor(name)); });
}

}  // namespace halfstep
