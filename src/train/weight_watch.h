// Notices what happens to a model's weights between the calls of a training step.
#pragma once

#include <halfstep/params.h>

#include <cstdint>
#include <vector>

namespace halfstep::train {

class WeightWatch {
 public:
  explicit WeightWatch(const std::vector<Param>& params);

  /// Takes in weights whose memory or type was replaced. torch::load puts a file's memory under the
  /// parameter and leaves its type as it was (LibTorch 2.13), so that FP32 numbers are read as BF16 ones;
  /// set_data and Module::to put another type there.
  void take_replaced(const std::vector<Param>& params);

  /// Called when gradients are inspected.
  void note_weights(const std::vector<Param>& params);

  /// Whether an optimizer of ours has updated a master since note_weights.
  bool master_updated(const std::vector<Param>& params) const;

  /// Throws an Error if a low-precision weight was written to through data() since note_weights, as
  /// torch::optim does, and no master was updated. Looks at 64 elements of each.
  void check_masters_updated(const std::vector<Param>& params) const;

 private:
  struct Seen {
    c10::weak_intrusive_ptr<c10::StorageImpl> memory;  // held weakly: its address is not used again
    at::ScalarType type;
    int64_t version;  // when the memory was seen first
    int64_t noted_version = 0, noted_master_version = 0;
    std::vector<uint16_t> noted_elements{};  // of a working copy that has a master
  };

  std::vector<Seen> seen_;
};

}  // namespace halfstep::train
