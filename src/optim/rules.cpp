#include "optim/rules.h"

#include <halfstep/error.h>
#include <halfstep/memory.h>

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <map>
#include <unordered_map>

#include "tensor/dense.h"
#include "tensor/param_checks.h"

namespace halfstep::optim {
namespace {

const char* expected_master(WeightStorage storage) {
  switch (storage) {
    case WeightStorage::Fp32Master:
      return "a Float master";
    case WeightStorage::SplitMaster:
      return "a Short remainder";
    case WeightStorage::Kahan:
      return "a compensation of the working copy's type";
    default:
      return "none";
  }
}

bool master_fits(const Param& param) {
  const at::ScalarType low = param.working.scalar_type();
  if (param.storage == WeightStorage::SplitMaster && low != at::kBFloat16) return false;
  const auto type = master_type(param.storage, low);
  return param.master.defined() == type.has_value() && (!type || param.master.scalar_type() == *type);
}

/// FNV-1a, in 31 bits: the kernels use the last one. Two names that meet share random bits, each still fair.
std::uint32_t id_of(const std::string& name) {
  std::uint32_t hash = 2166136261u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash >> 1;
}

void check_param(const char* whose, const Param& param) {
  const at::Tensor& working = param.working;
  HALFSTEP_CHECK(!param.name.empty(), whose, ": a parameter has no name; reports and saved states use it.");
  HALFSTEP_CHECK(working.defined(), whose, ": parameter '", param.name, "' is an undefined tensor.");
  HALFSTEP_CHECK(working.layout() == at::kStrided && working.is_non_overlapping_and_dense(), whose,
                 ": parameter '", param.name, "' is not dense (sizes ", working.sizes(), ", strides ",
                 working.strides(), "): make it so with contiguous().");
  const bool low = working.scalar_type() == at::kBFloat16 || working.scalar_type() == at::kHalf;
  HALFSTEP_CHECK(param.storage == WeightStorage::Fp32 ? working.scalar_type() == at::kFloat : low, whose,
                 ": the working copy of '", param.name, "' is ", working.scalar_type(), ", expected ",
                 param.storage == WeightStorage::Fp32 ? "Float" : "BFloat16 or Half",
                 ". Build the optimizer from MixedPrecision::params() and leave the model's types alone.");
  HALFSTEP_CHECK(master_fits(param), whose, ": '", param.name, "' has as master ",
                 param.master.defined() ? c10::toString(param.master.scalar_type()) : "nothing",
                 ", expected ", expected_master(param.storage),
                 ". Build the optimizer from MixedPrecision::params(), which keeps the FP32 originals.");
  HALFSTEP_CHECK(!param.master.defined() || param.master.numel() == 0 ||
                     (same_layout(working, param.master) && param.master.is_non_overlapping_and_dense()),
                 whose, ": working copy and master of '", param.name,
                 "' are laid out differently: ", working.sizes(), " with strides ", working.strides(),
                 " against ", param.master.sizes(), " with strides ", param.master.strides(), ".");
}

}  // namespace

std::vector<Slot> make_slots(const char* whose, const std::vector<const std::vector<Param>*>& groups) {
  std::vector<Slot> slots;
  std::unordered_map<const c10::TensorImpl*, std::size_t> group_of;
  std::map<std::string, const c10::TensorImpl*> tensor_of;
  for (std::size_t group = 0; group < groups.size(); ++group)
    for (const Param& param : *groups[group]) {
      check_param(whose, param);
      const auto* tensor = param.working.unsafeGetTensorImpl();
      const auto [seen, is_new] = group_of.emplace(tensor, group);
      HALFSTEP_CHECK(is_new || seen->second == group, whose, ": parameter '", param.name, "' is in group ",
                     seen->second, " and in group ", group, "; it can follow the options of one only.");
      if (!is_new) continue;
      HALFSTEP_CHECK(tensor_of.emplace(param.name, tensor).second, whose, ": two parameters are called '",
                     param.name, "'. Reports and saved states use names: give each its own.");
      slots.push_back({.param = param, .group = group, .id = id_of(param.name)});
    }
  HALFSTEP_CHECK(!slots.empty(), whose, ": there is no parameter to train.");
  for (const Slot& slot : slots)
    HALFSTEP_CHECK(slot.param.working.device() == slots.front().param.working.device(), whose,
                   ": parameter '", slot.param.name, "' is on ", slot.param.working.device(), ", '",
                   slots.front().param.name, "' on ", slots.front().param.working.device(),
                   ". Give each device an optimizer of its own.");
  std::vector<NamedTensor> tensors;
  for (const Slot& slot : slots)
    for (const at::Tensor* tensor : {&slot.param.working, &slot.param.master})
      tensors.push_back({&slot.param.name, tensor});
  check_memory_apart(whose, tensors);
  return slots;
}

Moment make_moment(const Param& param, MomentStorage storage) {
  HALFSTEP_CHECK(storage != MomentStorage::Blockwise8 || param.first_element % kMomentBlockElements == 0, "'",
                 param.name, "' begins at element ", param.first_element,
                 " of the whole parameter, inside a block of 8-bit moments. Cut it at a multiple of ",
                 kMomentBlockElements, ".");
  const MemoryClassScope memory(MemoryClass::Moments);
  const auto type = storage == MomentStorage::Fp32   ? at::kFloat
                    : storage == MomentStorage::Bf16 ? at::kBFloat16
                                                     : at::kByte;
  Moment moment;
  moment.values = at::zeros_like(param.working, param.working.options().dtype(type).requires_grad(false));
  if (storage == MomentStorage::Blockwise8) {
    const int64_t blocks = (param.working.numel() + kMomentBlockElements - 1) / kMomentBlockElements;
    moment.scales = at::zeros({blocks}, param.working.options().dtype(at::kFloat).requires_grad(false));
  }
  return moment;
}

void check_slot(const char* whose, const Slot& slot) {
  check_param(whose, slot.param);
  for (const at::Tensor* moment : {&slot.first.values, &slot.second.values})
    HALFSTEP_CHECK(!moment->defined() || same_layout(slot.param.working, *moment), whose, ": parameter '",
                   slot.param.name, "' has sizes ", slot.param.working.sizes(), " and strides ",
                   slot.param.working.strides(), ", its moments ", moment->sizes(), " and ",
                   moment->strides(), ". It was changed after the optimizer was built; build a new one.");
}

UpdateRun run_of(const Slot& slot, const at::Tensor& grad, int64_t first_element, int64_t count) {
  const auto at_first = [&](const at::Tensor& tensor) {
    return tensor.defined() ? address_of(tensor.mutable_data_ptr(), first_element, tensor.element_size())
                            : nullptr;
  };
  const auto scales_at = [&](const at::Tensor& scales) {
    return scales.defined() ? scales.mutable_data_ptr<float>() + first_element / kMomentBlockElements
                            : nullptr;
  };
  return {.working = at_first(slot.param.working),
          .companion = at_first(slot.param.master),
          .grad = address_of(grad.const_data_ptr(), first_element, grad.element_size()),
          .first_moment = at_first(slot.first.values),
          .second_moment = at_first(slot.second.values),
          .first_scale = scales_at(slot.first.scales),
          .second_scale = scales_at(slot.second.scales),
          .count = static_cast<std::size_t>(count),
          .first_element = static_cast<std::uint64_t>(slot.param.first_element + first_element)};
}

}  // namespace halfstep::optim

namespace halfstep {
namespace {

// Written so that a NaN fails: every comparison with one is false.
void check_rate(const char* whose, const char* name, double value, const char* usual) {
  HALFSTEP_CHECK(value >= 0 && value <= std::numeric_limits<float>::max(), whose, ": ", name, " is ", value,
                 ", expected a number from 0 that FP32 holds; usual is ", usual, ".");
}

void check_fraction(const char* whose, const char* name, double value, const char* usual) {
  HALFSTEP_CHECK(value >= 0 && value < 1, whose, ": ", name, " is ", value,
                 ", expected a number from 0 to below 1; usual is ", usual, ".");
}

}  // namespace

void AdamWOptions::check() const {
  check_rate("AdamW", "lr", lr, "3e-4");
  check_fraction("AdamW", "beta1", betas[0], "0.9");
  check_fraction("AdamW", "beta2", betas[1], "0.999 or, for language models, 0.95");
  // In FP32 a smaller one is 0 or nearly so, and a weight without gradients would become 0 / 0.
  HALFSTEP_CHECK(eps >= std::numeric_limits<float>::min() && eps <= std::numeric_limits<float>::max(),
                 "AdamW: eps is ", eps, ", expected a number from 2^-126 on; usual is 1e-8.");
  check_rate("AdamW", "weight_decay", weight_decay, "0.01 to 0.1");
  schedule.check();
}

void SgdOptions::check() const {
  check_rate("SGD", "lr", lr, "0.1");
  check_fraction("SGD", "momentum", momentum, "0.9");
  check_rate("SGD", "weight_decay", weight_decay, "5e-4");
  HALFSTEP_CHECK(dampening >= 0 && dampening <= 1, "SGD: dampening is ", dampening,
                 ", expected a number from 0 to 1; usual is 0.");
  HALFSTEP_CHECK(!nesterov || (momentum > 0 && dampening == 0),
                 "SGD: nesterov needs a momentum above 0 (it is ", momentum, ") and no dampening (it is ",
                 dampening, ").");
  schedule.check();
}

namespace optim {

AdamWStep Rule<AdamWOptions>::constants(const AdamWOptions& options, double learning_rate,
                                        double grad_multiplier, int64_t step, StochasticKey random) {
  AdamWStep constants = adamw_step({.learning_rate = learning_rate,
                                    .beta1 = options.betas[0],
                                    .beta2 = options.betas[1],
                                    .eps = options.eps,
                                    .weight_decay = options.weight_decay},
                                   step);
  constants.grad_multiplier = static_cast<float>(grad_multiplier);
  constants.random = random;
  return constants;
}

SgdStep Rule<SgdOptions>::constants(const SgdOptions& options, double learning_rate, double grad_multiplier,
                                    int64_t step, StochasticKey random) {
  return {.grad_multiplier = static_cast<float>(grad_multiplier),
          .learning_rate = learning_rate,
          .momentum = options.momentum,
          .dampening = options.dampening,
          .weight_decay = options.weight_decay,
          .nesterov = options.nesterov,
          .first = step == 1,
          .random = random};
}

}  // namespace optim
}  // namespace halfstep
