#include "quant/session.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <halfstep/error.h>

#include <algorithm>
#include <bit>
#include <cmath>

namespace halfstep {
namespace {

constexpr const char* kRoleNames[kRoles] = {"input", "weight", "grad"};

}  // namespace

std::optional<float> AmaxHistory::amax(const DelayedScaling& options) const {
  if (past_.empty()) return std::nullopt;
  if (options.take == DelayedScaling::Take::MostRecent) return past_.back();
  return *std::max_element(past_.begin(), past_.end());
}

void AmaxHistory::note(float amax) {
  // NaN is kept: the step will be skipped, or what was computed did not matter to it.
  this_step_ = this_step_ && !(amax > *this_step_) && !std::isnan(amax) ? this_step_ : amax;
}

void AmaxHistory::end_step(bool skipped, std::int64_t length) {
  // Zeros tell nothing of the size of what will come: a scale made from them would hold all of it at max.
  if (this_step_ && !skipped && std::isfinite(*this_step_) && *this_step_ > 0) {
    past_.push_back(*this_step_);
    if (past_.size() > static_cast<std::size_t>(length)) past_.erase(past_.begin());
  }
  this_step_.reset();
}

at::Tensor AmaxHistory::saved() const {
  at::Tensor values = at::empty({static_cast<std::int64_t>(past_.size()) + 1}, at::kFloat);
  float* floats = values.mutable_data_ptr<float>();
  std::copy(past_.begin(), past_.end(), floats);
  floats[past_.size()] = this_step_.value_or(kNoAmax);
  return values;
}

void AmaxHistory::load(const at::Tensor& saved, std::int64_t length) {
  const at::Tensor values = saved.to(at::kCPU).contiguous();
  const float* floats = values.const_data_ptr<float>();
  const std::int64_t count = values.numel() - 1;
  past_.assign(floats + std::max<std::int64_t>(0, count - length), floats + count);

  const float last = floats[values.numel() - 1];
  this_step_ = last == kNoAmax ? std::nullopt : std::optional(last);
}

QuantLayer::QuantLayer(std::string name, Recipe recipe, at::Device device)
    : name_(std::move(name)), recipe_(std::move(recipe)), device_(device), number_(0) {
  // FNV-1a: the same on every machine and in every run.
  std::uint32_t hash = 2166136261u;
  for (const char c : name_) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  number_ = hash;
}

Quantised QuantLayer::quantise(const at::Tensor& matrix, const OperandRule& rule, Role role,
                               bool sums_over_rows, bool noted) {
  if (!matrix.is_cpu()) return quantise_on_device(matrix, rule, role, sums_over_rows, noted);
  const auto at_role = static_cast<std::size_t>(role);
  QuantiseRequest request{.rule = rule, .sums_over_rows = sums_over_rows};
  {
    const std::lock_guard lock(mutex_);
    if (recipe_.delayed) {
      request.known_amax = histories_[at_role].amax(*recipe_.delayed);
      request.margin = recipe_.delayed->margin;
    }
    request.random = {.seed = recipe_.seed, .tensor = number_, .cast = 0};
    if (rule.stochastic)
      request.random.cast = static_cast<std::uint32_t>(stochastic_casts_ + stochastic_casts_of_step_++);
  }
  QuantiseCounts counts;
  Quantised made = quantised(matrix, request, counts);
  if (!noted) return made;
  const std::lock_guard lock(mutex_);
  if (recipe_.delayed) histories_[at_role].note(std::bit_cast<float>(counts.largest));
  shares_[at_role].elements += matrix.numel();
  shares_[at_role].saturated += static_cast<std::int64_t>(counts.saturated);
  shares_[at_role].vanished += static_cast<std::int64_t>(counts.vanished);
  return made;
}

Quantised QuantLayer::quantise_on_device(const at::Tensor& matrix, const OperandRule& rule, Role role,
                                         bool sums_over_rows, bool noted) {
  const at::Tensor own = largest_on_device(matrix, rule, sums_over_rows);
  if (!recipe_.delayed) return quantised_on_device(matrix, rule, sums_over_rows, own, /*margin=*/0);
  const std::lock_guard lock(mutex_);
  AmaxHistoryOnDevice& history = histories_on_device_[static_cast<std::size_t>(role)];
  const at::Tensor amax = history.amax(*recipe_.delayed, own);
  if (noted) history.note(own);
  return quantised_on_device(matrix, rule, sums_over_rows, amax, recipe_.delayed->margin);
}

void QuantLayer::end_step_on_device(const at::Tensor& skipped) {
  if (!recipe_.delayed) return;  // and nothing is stochastic there
  const std::lock_guard lock(mutex_);
  for (AmaxHistoryOnDevice& history : histories_on_device_)
    history.end_step(skipped, recipe_.delayed->history);
}

void QuantLayer::end_casts(bool skipped) {
  if (!skipped) stochastic_casts_ += stochastic_casts_of_step_;
  stochastic_casts_of_step_ = 0;
}

void QuantLayer::end_step(bool skipped) {
  if (!device_.is_cpu())
    return end_step_on_device(
        at::full({}, skipped ? 1.0f : 0.0f, at::TensorOptions(device_).dtype(at::kFloat)));

  const std::lock_guard lock(mutex_);
  end_casts(skipped);
  if (!recipe_.delayed) return;
  for (AmaxHistory& history : histories_) history.end_step(skipped, recipe_.delayed->history);
}

void QuantLayer::drop_step() {
  const std::lock_guard lock(mutex_);
  end_casts(/*skipped=*/true);
  for (AmaxHistory& history : histories_) history.drop_step();
  for (AmaxHistoryOnDevice& history : histories_on_device_) history.drop_step();
}

void QuantLayer::get_of_step(std::int32_t (&bits)[kRoles]) const {
  const std::lock_guard lock(mutex_);
  for (int role = 0; role < kRoles; ++role) {
    const auto& noted = histories_[role].of_step();
    bits[role] = noted ? std::bit_cast<std::int32_t>(*noted) & 0x7fffffff : -1;
  }
}

void QuantLayer::set_of_step(const std::int32_t (&bits)[kRoles]) {
  const std::lock_guard lock(mutex_);
  for (int role = 0; role < kRoles; ++role)
    histories_[role].set_of_step(bits[role] < 0 ? std::nullopt
                                                : std::optional(std::bit_cast<float>(bits[role])));
}

QuantiseShares QuantLayer::take_shares(Role role) {
  const std::lock_guard lock(mutex_);
  return std::exchange(shares_[static_cast<std::size_t>(role)], {});
}

std::string QuantLayer::key(Role role) const {
  return std::string("amax.") + kRoleNames[static_cast<std::size_t>(role)] + "." + name_;
}

void QuantLayer::save(StateDict& state, bool step_under_way) const {
  const std::lock_guard lock(mutex_);
  state.set(casts_key(), stochastic_casts_);
  state.set(casts_of_step_key(), step_under_way ? stochastic_casts_of_step_ : std::int64_t{0});
  if (!recipe_.delayed) return;
  for (int role = 0; role < kRoles; ++role) {
    at::Tensor saved = device_.is_cpu() ? histories_[role].saved() : histories_on_device_[role].saved();
    if (!step_under_way) saved.narrow(0, saved.size(0) - 1, 1).fill_(kNoAmax);
    state.set(key(static_cast<Role>(role)), saved);
  }
}

void QuantLayer::check_loadable(const StateDict& state) const {
  state.integer(casts_key());
  state.integer(casts_of_step_key());

  if (!recipe_.delayed) return;
  for (int role = 0; role < kRoles; ++role) {
    const at::Tensor& saved = state.tensor(key(static_cast<Role>(role)));
    HALFSTEP_CHECK(saved.scalar_type() == at::kFloat && saved.dim() == 1 && saved.numel() >= 1,
                   "MixedPrecision: 'recipe.", key(static_cast<Role>(role)), "' is ", saved.scalar_type(),
                   " of shape ", saved.sizes(), ", expected Float with at least one element.");
    const at::Tensor past = saved.to(at::kCPU).narrow(0, 0, saved.numel() - 1);
    HALFSTEP_CHECK(
        at::isfinite(past).logical_and(past > 0).all().item<bool>(), "MixedPrecision: 'recipe.",
        key(static_cast<Role>(role)),
        "' holds a number that is not finite or not above 0; largest magnitudes of clean steps are both.");
  }
}

void QuantLayer::load(const StateDict& state) {
  const std::lock_guard lock(mutex_);
  stochastic_casts_ = state.integer(casts_key());
  stochastic_casts_of_step_ = state.integer(casts_of_step_key());
  if (!recipe_.delayed) return;
  for (int role = 0; role < kRoles; ++role) {
    const at::Tensor& saved = state.tensor(key(static_cast<Role>(role)));
    if (device_.is_cpu())
      histories_[role].load(saved, recipe_.delayed->history);
    else
      histories_on_device_[role].load(saved, recipe_.delayed->history, device_);
  }
}

void QuantSession::add(const at::Tensor& weight, std::string name, const Recipe& recipe) {
  by_weight_.emplace(weight.unsafeGetTensorImpl(), layers_.size());
  layers_.push_back(std::make_shared<QuantLayer>(std::move(name), recipe, weight.device()));
  weights_.push_back(weight);
}

std::shared_ptr<QuantLayer> QuantSession::find(const at::Tensor& weight) const {
  const auto found = by_weight_.find(weight.unsafeGetTensorImpl());
  return found == by_weight_.end() ? nullptr : layers_[found->second];
}

void QuantSession::end_step(bool skipped) {
  for (const auto& layer : layers_) layer->end_step(skipped);
}

void QuantSession::end_step_on_device(const at::Tensor& skipped) {
  for (const auto& layer : layers_) layer->end_step_on_device(skipped);
}

void QuantSession::drop_step() {
  for (const auto& layer : layers_) layer->drop_step();
}

std::vector<std::int32_t> QuantSession::of_step() const {
  std::vector<std::int32_t> all;
  for (const auto& layer : layers_) {
    std::int32_t bits[kRoles];
    layer->get_of_step(bits);
    all.insert(all.end(), std::begin(bits), std::end(bits));
  }
  return all;
}

void QuantSession::set_of_step(const std::vector<std::int32_t>& bits) {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    std::int32_t of_layer[kRoles];
    std::copy_n(bits.begin() + static_cast<std::ptrdiff_t>(i * kRoles), kRoles, of_layer);
    layers_[i]->set_of_step(of_layer);
  }
}

StateDict QuantSession::state_dict(bool step_under_way) const {
  StateDict state;
  for (const auto& layer : layers_) layer->save(state, step_under_way);
  return state;
}

void QuantSession::check_loadable(const StateDict& saved) const {
  for (const auto& layer : layers_) layer->check_loadable(saved);
}

void QuantSession::load_state_dict(const StateDict& saved) {
  for (const auto& layer : layers_) layer->load(saved);
}

}  // namespace halfstep
