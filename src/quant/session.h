// What a recipe remembers of each layer from step to step.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/recipe.h>
#include <halfstep/state_dict.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "quant/on_device.h"
#include "quant/quantised.h"

namespace halfstep {

enum class Role : std::uint8_t { Input, Weight, Grad };
inline constexpr int kRoles = 3;

/// The largest magnitudes of one tensor in the last steps. Within a step the scale does not change: a second
/// run of the same forward, another micro-batch or a second use of the layer meet the scale of the first, and
/// what they note is a maximum, which a repetition does not change.
class HALFSTEP_API AmaxHistory {
 public:
  /// What the next scale is made from; nothing before the first step.
  std::optional<float> amax(const DelayedScaling& options) const;
  void note(float amax);
  /// The step is over. A skipped one leaves no trace.
  void end_step(bool skipped, std::int64_t length);
  void drop_step() { this_step_.reset(); }
  /// Of the present step; nothing where nothing was noted.
  const std::optional<float>& of_step() const { return this_step_; }
  void set_of_step(std::optional<float> amax) { this_step_ = amax; }

  /// Oldest first; the last is that of the present step, or -1.
  at::Tensor saved() const;
  /// Of a longer history, the newest.
  void load(const at::Tensor& saved, std::int64_t length);

 private:
  std::vector<float> past_;  // oldest first
  std::optional<float> this_step_;
};

/// Shares of what became codes since the last report. Not counted on an accelerator.
struct QuantiseShares {
  std::int64_t elements = 0, saturated = 0, vanished = 0;
};

/// One weight and its recipe.
class QuantLayer {
 public:
  QuantLayer(std::string name, Recipe recipe, at::Device device);

  const std::string& name() const { return name_; }
  const Recipe& recipe() const { return recipe_; }

  /// One operand. With `noted`, what is seen counts for the scales of later steps.
  Quantised quantise(const at::Tensor& matrix, const OperandRule& rule, Role role, bool sums_over_rows,
                     bool noted);

  void end_step(bool skipped);
  void end_step_on_device(const at::Tensor& skipped);
  void drop_step();
  /// What was noted in this step, for each role, as bits that grow with the number, a NaN's beyond all; -1
  /// where nothing was.
  void get_of_step(std::int32_t (&bits)[kRoles]) const;
  void set_of_step(const std::int32_t (&bits)[kRoles]);
  QuantiseShares take_shares(Role role);
  std::int64_t uses() const { return uses_; }
  void note_use() { ++uses_; }

  /// Without `step_under_way`, as it was when the last step ended.
  void save(StateDict& state, bool step_under_way) const;
  /// An Error by name; load() is then without one.
  void check_loadable(const StateDict& state) const;
  void load(const StateDict& state);

 private:
  Quantised quantise_on_device(const at::Tensor& matrix, const OperandRule& rule, Role role,
                               bool sums_over_rows, bool noted);
  std::string key(Role role) const;
  std::string casts_key() const { return "casts." + name_; }
  std::string casts_of_step_key() const { return "casts_of_step." + name_; }
  void end_casts(bool skipped);

  std::string name_;
  Recipe recipe_;
  at::Device device_;
  std::uint32_t number_;  // names its random bits
  mutable std::mutex mutex_;
  AmaxHistory histories_[kRoles];
  AmaxHistoryOnDevice histories_on_device_[kRoles];  // where the layer is not on the CPU
  QuantiseShares shares_[kRoles];
  std::int64_t stochastic_casts_ = 0;          // of past steps
  std::int64_t stochastic_casts_of_step_ = 0;  // and since: a skipped step gives its numbers back
  std::atomic<std::int64_t> uses_ = 0;
};

/// The layers of one model, by their weights.
class QuantSession {
 public:
  void add(const at::Tensor& weight, std::string name, const Recipe& recipe);

  /// Null for a tensor that is not the weight of a layer.
  std::shared_ptr<QuantLayer> find(const at::Tensor& weight) const;

  void end_step(bool skipped);
  void end_step_on_device(const at::Tensor& skipped);
  void drop_step();  // what was noted since the last end_step
  /// What was noted in this step, of all layers: for ranks, which all take the largest.
  std::vector<std::int32_t> of_step() const;
  void set_of_step(const std::vector<std::int32_t>& bits);
  const std::vector<std::shared_ptr<QuantLayer>>& layers() const { return layers_; }

  /// Without `step_under_way`, as it was when the last step ended.
  StateDict state_dict(bool step_under_way) const;
  /// An Error by name; load_state_dict is then without one.
  void check_loadable(const StateDict& saved) const;
  void load_state_dict(const StateDict& saved);

 private:
  std::vector<std::shared_ptr<QuantLayer>> layers_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> by_weight_;
  std::vector<at::Tensor> weights_;  // keeps the keys alive
};

}  // namespace halfstep
