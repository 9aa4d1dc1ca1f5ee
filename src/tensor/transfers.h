// Tensors on their way between the host and a device, sent without waiting.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <halfstep/state_dict.h>

#include <unordered_map>
#include <vector>

namespace halfstep {

/// Copies of tensors on the host: clones of what is there already; from a device into pinned memory, all on
/// their way at once.
class Arrival {
 public:
  explicit Arrival(const std::vector<at::Tensor>& tensors);

  /// Whether they are there. Does not wait.
  bool arrived() const;
  /// The i-th of them. Waits.
  const at::Tensor& wait_for(std::size_t i) const;

 private:
  std::vector<at::Tensor> on_host_;
  mutable std::unordered_map<at::Device, c10::Event> sent_;  // one for each device, until it was waited for
};

/// A state on the host, to keep: nobody's later writes change it.
StateDict on_host(const StateDict& live);

/// A tensor of the host on a device, through pinned memory; itself if it is there already.
at::Tensor sent_to(at::Device device, const at::Tensor& tensor);

}  // namespace halfstep
