#include <c10/core/GradMode.h>
#include <halfstep/activations.h>
#include <halfstep/error.h>
#include <halfstep/memory.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <mutex>

#include "nn/recompute_state.h"
#include "tensor/saved_tensors.h"

namespace halfstep {
namespace {

constexpr const char* kName = "checkpoint_activations";

/// Where a tensor is put when the function was run again. Held by the graph; when the graph lets go of it, so
/// goes the tensor.
struct Slot {
  at::Tensor value;
};

/// A tensor that the first run saved.
struct Record {
  std::vector<int64_t> sizes;
  at::ScalarType type;
  at::Device device;
  std::weak_ptr<Slot> slot;

  Record(const at::Tensor& tensor, const std::shared_ptr<Slot>& slot)
      : sizes(tensor.sizes().vec()), type(tensor.scalar_type()), device(tensor.device()), slot(slot) {}
  bool describes(const at::Tensor& tensor) const {
    return tensor.sizes() == sizes && tensor.scalar_type() == type && tensor.device() == device;
  }
};

/// One call: how to make again what it saved. Lives as long as the graph needs any of it.
class Call : public std::enable_shared_from_this<Call> {
 public:
  /// The inputs are saved as autograd's nodes save theirs: an outer scope decides about them, and a change in
  /// place is noticed.
  Call(const std::vector<at::Tensor>& inputs, detail::CheckpointedCall::RunAgain run_again)
      : state_(inputs), run_again_(std::move(run_again)) {
    for (const at::Tensor& input : inputs) inputs_.emplace_back(input, /*is_output=*/false);
  }

  PackedTensor record(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    auto slot = std::make_shared<Slot>();
    records_.emplace_back(tensor, slot);
    return {{}, [call = shared_from_this(), slot](const at::Tensor&) { return call->value_of(*slot); }};
  }

 private:
  class Capture;

  at::Tensor value_of(Slot& slot) {
    const std::lock_guard lock(mutex_);
    if (!slot.value.defined()) run();
    // A graph that is kept keeps its slots, and would keep the tensors.
    if (torch::autograd::get_current_graph_task_keep_graph()) return std::exchange(slot.value, {});
    return slot.value;
  }

  void run();

  RecomputeState state_;
  detail::CheckpointedCall::RunAgain run_again_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::mutex mutex_;
  std::vector<Record> records_;
};

/// Takes what the second run saves, in the order of the first.
class Call::Capture final : public SavedTensorPacker {
 public:
  explicit Capture(const std::vector<Record>& records) : records_(records) {}

  std::optional<PackedTensor> pack(const at::Tensor& tensor) override {
    HALFSTEP_CHECK(count_ < records_.size(), kName, ": the function saved ", records_.size(),
                   " tensors in forward and more when it was run again for backward", kAdvice);
    const Record& record = records_[count_];
    HALFSTEP_CHECK(record.describes(tensor), kName, ": the function saved tensor ", count_, " as ",
                   record.type, " ", at::IntArrayRef(record.sizes), " on ", record.device,
                   " in forward and as ", tensor.scalar_type(), " ", tensor.sizes(), " on ", tensor.device(),
                   " when it was run again for backward", kAdvice);
    ++count_;
    if (const auto slot = record.slot.lock()) slot->value = tensor.is_leaf() ? tensor : tensor.detach();
    return PackedTensor{{}, [](const at::Tensor&) -> at::Tensor {
                          HALFSTEP_BUG("backward through the second run of a checkpointed function");
                        }};
  }

  void check_complete() const {
    HALFSTEP_CHECK(count_ == records_.size(), kName, ": the function saved ", records_.size(),
                   " tensors in forward and ", count_, " when it was run again for backward", kAdvice);
  }

 private:
  static constexpr const char* kAdvice =
      ". It must do the same both times: capture by value, and let nothing that it reads change before "
      "backward.";

  const std::vector<Record>& records_;
  std::size_t count_ = 0;
};

void Call::run() {
  std::vector<at::Tensor> inputs;
  for (const auto& input : inputs_) inputs.push_back(input.unpack());
  const auto capture = std::make_shared<Capture>(records_);
  state_.run([&] {
    const MemoryClassScope memory(MemoryClass::Activation);
    const SavedTensorScope scope(capture, kName);
    run_again_(inputs);
  });
  capture->check_complete();
}

class Recorder final : public SavedTensorPacker {
 public:
  explicit Recorder(std::shared_ptr<Call> call) : call_(std::move(call)) {}
  std::optional<PackedTensor> pack(const at::Tensor& tensor) override { return call_->record(tensor); }
  bool replays() const override { return true; }

 private:
  std::shared_ptr<Call> call_;
};

}  // namespace

namespace detail {

CheckpointedCall::CheckpointedCall(const std::vector<at::Tensor>& inputs, RunAgain run_again) {
  if (!at::GradMode::is_enabled()) return;
  const auto call = std::make_shared<Call>(inputs, std::move(run_again));
  scope_ = std::make_unique<SavedTensorScope>(std::make_shared<Recorder>(call), kName);
}

CheckpointedCall::~CheckpointedCall() = default;

}  // namespace detail
}  // namespace halfstep
