// An optimizer's step by ATen's fused and foreach operations: on accelerators, where our kernels do not run,
// and on the CPU as the twin that they are compared with.
//
// Nothing waits for the device. Whether a step is skipped, how many were taken and the learning rate of the
// next one are known to the device; the host asks when somebody asks it.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/grads.h>

#include <cstdint>
#include <vector>

#include "optim/optimizer_state.h"

namespace halfstep::optim {

/// An Error by name for what only our kernels do: 8-bit moments.
void check_for_device(const char* whose, const Slot& slot);

/// The same of options.
template <typename Options>
void check_options_for_device(const Options& options);

template <typename Options>
class DeviceUpdate {
 public:
  /// The state stays where it is, and is stepped.
  explicit DeviceUpdate(OptimizerState<Options>& state);

  /// Whether any parameter had a gradient.
  bool step(const GradMultiplier& multiplier);

  /// Steps taken, of the optimizer and of each slot, from the device into the state. Waits.
  void read_counts();
  /// The other way, after the state was loaded.
  void write_counts();

 private:
  /// Lists as the operations take them, all in FP32.
  struct Batch {
    std::vector<at::Tensor> weights{}, grads{}, firsts{}, seconds{}, steps{};

    /// Those of `slots` that are in a group.
    Batch of_group(const std::vector<Slot*>& slots, std::size_t group) const;
  };
  /// Whether the step is taken, as scalars of the device; undefined where it is.
  struct Skip {
    at::Tensor finite{}, found_inf{};
  };

  void count(const std::vector<bool>& has_grad, const at::Tensor& finite);
  /// The slots that have gradients, those together that the same operations update.
  std::vector<std::vector<Slot*>> batches();
  static std::vector<at::Tensor> grads_of(const std::vector<Slot*>& slots, bool will_divide);
  void update_batch(const std::vector<Slot*>& slots, const std::vector<at::Tensor>& rates, const Skip& skip,
                    const at::Tensor& divisor, std::uint32_t key);
  void update(const Options& options, Batch batch, const at::Tensor& rate, const at::Tensor& divisor,
              const at::Tensor& found_inf) const;
  /// The optimizer's count before this step as a scalar of this type.
  at::Tensor count_before(at::ScalarType type) const;
  /// The rate of the next step as a scalar of the device; undefined where it does not depend on the count.
  at::Tensor scheduled_rate(std::size_t group);

  struct Table {
    Schedule schedule{};
    double lr = -1;
    at::Tensor rates{}, source{};  // `source` is the host's, which must outlive its copy
  };

  OptimizerState<Options>& state_;
  at::Tensor counts_;                // FP32: of each slot, then the optimizer's since they were last written
  int64_t steps_before_counts_ = 0;  // the optimizer's until then
  at::Tensor count_before_;          // the optimizer's, before this step
  int64_t issued_ = 0;               // steps, skipped ones too: the count is at most this
  std::vector<Table> tables_;
};

}  // namespace halfstep::optim
