#include <ATen/SequenceNumber.h>
#include <c10/core/GradMode.h>
#include <c10/util/Type.h>
#include <halfstep/activations.h>
#include <halfstep/error.h>
#include <halfstep/memory.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <typeinfo>
#include <unordered_set>

#include "nn/second_run.h"
#include "tensor/saved_tensors.h"

namespace halfstep {
namespace {

constexpr const char* kName = "checkpoint_activations";

/// Where a tensor is put when the function was run again. Held by the graph; when the graph lets go of it, so
/// goes the tensor.
struct Slot {
  at::Tensor value;
};

/// Whether somebody changed a tensor in place after the first run ended. What the runs themselves change,
/// such as the rows that Embedding(max_norm) scales, does not count.
class ChangeWatch {
 public:
  explicit ChangeWatch(const at::Tensor& tensor)
      : counter_(tensor.unsafeGetTensorImpl()->version_counter()) {}
  void start() {
    if (counter_.enabled()) version_ = counter_.current_version();
  }
  bool changed() const { return counter_.enabled() && counter_.current_version() != version_; }

 private:
  c10::VariableVersion counter_;  // shared with all views; disabled for inference tensors
  uint32_t version_ = 0;
};

/// A leaf with a gradient that the first run reads.
struct WatchedParameter {
  std::vector<int64_t> sizes;
  at::ScalarType type;
  const c10::TensorImpl* identity;  // compared, never followed
  ChangeWatch watch;
};

/// A tensor that a run saved, as far as both runs must agree.
struct Description {
  std::vector<int64_t> sizes, strides;
  at::ScalarType type;
  at::Device device;
  const std::type_info* producer = nullptr;  // type of the node that made it; null for a leaf
  uint32_t output = 0;                       // which output of that node

  explicit Description(const at::Tensor& tensor)
      : sizes(tensor.sizes().vec()), type(tensor.scalar_type()), device(tensor.device()) {
    if (tensor.layout() == at::kStrided) strides = tensor.strides().vec();
    if (const auto node = tensor.grad_fn()) {
      const torch::autograd::Node& made_by = *node;
      producer = &typeid(made_by);
      output = tensor.output_nr();
    }
  }
  bool same_kind(const Description& other) const {
    return sizes == other.sizes && type == other.type && device == other.device;
  }
  bool same_layout_and_producer(const Description& other) const {
    const bool same_node =
        producer && other.producer ? *producer == *other.producer : producer == other.producer;
    return strides == other.strides && same_node && output == other.output;
  }
  std::string text() const {
    return detail::concat(type, " ", at::IntArrayRef(sizes), " with strides ", at::IntArrayRef(strides),
                          " from ", producer ? c10::demangle(producer->name()) : "no operation", " on ",
                          device);
  }
};

/// A tensor that the first run saved.
struct Record {
  Description description;
  std::weak_ptr<Slot> slot;
  // Of a leaf without a gradient: one that the function captured lies in the same storage in both runs.
  std::optional<ChangeWatch> watch;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};

  Record(const at::Tensor& tensor, const std::shared_ptr<Slot>& slot) : description(tensor), slot(slot) {
    if (description.producer || !tensor.has_storage()) return;
    watch.emplace(tensor);
    storage = tensor.storage().getWeakStorageImpl();
  }
  bool lies_in_storage_of(const at::Tensor& tensor) const {
    return tensor.has_storage() && storage._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl();
  }
};

/// An input, kept as autograd's nodes keep theirs: an outer scope decides about it, and a change in place is
/// noticed. A view of a parameter is kept as it is, because a packer returns it as an ordinary tensor, and
/// AutocastScope treats the two differently.
class KeptInput {
 public:
  explicit KeptInput(const at::Tensor& input)
      : strides_(input.defined() && input.layout() == at::kStrided ? input.strides().vec()
                                                                   : std::vector<int64_t>()) {
    if (!input.defined() || !is_parameter_or_view_of_one(input)) {
      saved_ = torch::autograd::SavedVariable(input, /*is_output=*/false);
      return;
    }
    parameter_ = input;
    version_ = input._version();
  }
  at::Tensor restore() const {
    if (!parameter_.defined()) return saved_.unpack();
    HALFSTEP_CHECK(parameter_._version() == version_, kName, ": an input (", parameter_.scalar_type(), " ",
                   parameter_.sizes(),
                   ") was changed in place between forward and backward: it is at version ",
                   parameter_._version(), ", in forward it was at ", version_,
                   ". Change it after backward, or pass a clone.");
    return parameter_;
  }
  bool has_layout_of(const at::Tensor& restored) const {
    return !restored.defined() || restored.layout() != at::kStrided || restored.strides() == strides_;
  }

 private:
  std::vector<int64_t> strides_;
  at::Tensor parameter_;
  int64_t version_ = 0;
  torch::autograd::SavedVariable saved_;
};

/// One call: how to make again what it saved. Lives as long as the graph needs any of it.
class Call : public std::enable_shared_from_this<Call> {
 public:
  Call(const std::vector<at::Tensor>& inputs, detail::CheckpointedCall::RunAgain run_again)
      : state_(inputs), run_again_(std::move(run_again)), inputs_(inputs.begin(), inputs.end()) {}

  PackedTensor record(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    auto slot = std::make_shared<Slot>();
    records_.emplace_back(tensor, slot);
    watch_parameters_behind(tensor);
    return {{}, [call = shared_from_this(), slot](const at::Tensor&) { return call->value_of(*slot); }};
  }

  RegionRandom& random() { return random_; }

  void end_first_run() {
    const std::lock_guard lock(mutex_);
    first_run_ended_ = true;
    seen_nodes_.clear();
    start_watches();
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
  void watch_parameters_behind(const at::Tensor& tensor);

  void start_watches() {
    for (WatchedParameter& parameter : parameters_) parameter.watch.start();
    for (Record& record : records_) {
      if (record.watch) record.watch->start();
    }
  }

  void check_parameters_unchanged() const {
    for (const WatchedParameter& parameter : parameters_) {
      HALFSTEP_CHECK(
          !parameter.watch.changed(), kName, ": a parameter that the function reads (", parameter.type, " ",
          at::IntArrayRef(parameter.sizes),
          ") was changed in place between forward and backward, which runs the function again and would "
          "read the new values. Call backward before the optimizer's step.");
    }
  }

  RecomputeState state_;
  RegionRandom random_;
  detail::CheckpointedCall::RunAgain run_again_;
  std::vector<KeptInput> inputs_;
  const uint64_t first_node_ = at::sequence_number::peek();
  std::mutex mutex_;
  bool first_run_ended_ = false;
  std::vector<Record> records_;
  std::vector<WatchedParameter> parameters_;  // those that any saved tensor depends on
  std::unordered_set<uint64_t> seen_nodes_;   // by number: a node may go and leave its address to another
};

/// Follows the graph back to the parameters, as far as this call made it. Not every parameter is saved
/// itself: a bias, an embedding and the weight of a layer whose input has no gradient are only read.
void Call::watch_parameters_behind(const at::Tensor& tensor) {
  std::vector<torch::autograd::Node*> open;
  const auto visit = [&](torch::autograd::Node* node) {
    if (!node) return;
    if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      const at::Tensor& parameter = leaf->variable;
      const auto* identity = parameter.unsafeGetTensorImpl();
      const auto known = [&](const WatchedParameter& watched) { return watched.identity == identity; };
      if (!parameter.defined() || std::any_of(parameters_.begin(), parameters_.end(), known)) return;
      parameters_.push_back(
          {parameter.sizes().vec(), parameter.scalar_type(), identity, ChangeWatch(parameter)});
    } else if (node->sequence_nr() >= first_node_ && seen_nodes_.insert(node->sequence_nr()).second) {
      open.push_back(node);
    }
  };
  const auto made_by = tensor.grad_fn();
  visit(made_by.get());
  while (!open.empty()) {
    const torch::autograd::Node& node = *open.back();
    open.pop_back();
    for (const auto& edge : node.next_edges()) visit(edge.function.get());
  }
}

/// Takes what the second run saves, in the order of the first.
class Call::Capture final : public SavedTensorPacker {
 public:
  Capture(const std::vector<Record>& records, bool inputs_have_their_layout)
      : records_(records), inputs_have_their_layout_(inputs_have_their_layout) {
    for (const Record& record : records) changed_.push_back(record.watch && record.watch->changed());
  }

  std::optional<PackedTensor> pack(const at::Tensor& tensor) override {
    const std::lock_guard lock(mutex_);
    const std::size_t index = values_.size();
    HALFSTEP_CHECK(index < records_.size(), kName, ": the function saved ", records_.size(),
                   " tensors in forward and more when it was run again for backward", kAdvice);
    const Record& record = records_[index];
    const Description found(tensor);
    // A packer outside may return an input without the gaps between its elements; operations then choose
    // other layouts and other views.
    HALFSTEP_CHECK(record.description.same_kind(found) &&
                       (!inputs_have_their_layout_ || record.description.same_layout_and_producer(found)),
                   kName, ": the function saved tensor ", index, " as ", record.description.text(),
                   " in forward and as ", found.text(), " when it was run again for backward", kAdvice);
    HALFSTEP_CHECK(!changed_[index] || !record.lies_in_storage_of(tensor), kName,
                   ": a tensor that the function reads (", found.text(),
                   ") was changed in place between forward and backward", kAdvice);
    const at::Tensor value = tensor.is_leaf() ? tensor : tensor.detach();
    values_.push_back(record.slot.expired() ? at::Tensor() : value);
    versions_.push_back(version_of(tensor));
    return PackedTensor{{}, [](const at::Tensor&) -> at::Tensor {
                          HALFSTEP_BUG("backward through the second run of a checkpointed function");
                        }};
  }
  bool replays() const override { return true; }

  /// Only after a whole run that agreed: what a failed one left in the slots would be taken for the values.
  void fill_slots() const {
    HALFSTEP_CHECK(values_.size() == records_.size(), kName, ": the function saved ", records_.size(),
                   " tensors in forward and ", values_.size(), " when it was run again for backward",
                   kAdvice);
    for (std::size_t i = 0; i < records_.size(); ++i) {
      const auto slot = records_[i].slot.lock();
      if (!slot || !values_[i].defined()) continue;
      HALFSTEP_CHECK(version_of(values_[i]) == versions_[i], kName,
                     ": the function changes a tensor in place (", records_[i].description.text(),
                     ") that it needs for its gradient. Make the change on a copy; without the checkpoint "
                     "LibTorch refuses it too.");
      slot->value = values_[i];
    }
  }

 private:
  static int64_t version_of(const at::Tensor& tensor) {
    return tensor.is_inference() ? 0 : tensor._version();
  }

  static constexpr const char* kAdvice =
      ". It must do the same both times: capture by value, and let nothing that it reads change before "
      "backward.";

  const std::vector<Record>& records_;
  const bool inputs_have_their_layout_;
  std::vector<bool> changed_;
  std::mutex mutex_;
  std::vector<at::Tensor> values_;
  std::vector<int64_t> versions_;  ///< when they were saved
};

void Call::run() {
  HALFSTEP_CHECK(
      first_run_ended_, kName,
      ": the function itself calls backward through what it computes, and what it saved is only made "
      "again after it has returned. Leave that part out of the checkpointed function.");
  std::vector<at::Tensor> inputs;
  bool inputs_have_their_layout = true;
  for (const KeptInput& input : inputs_) {
    inputs.push_back(input.restore());
    inputs_have_their_layout &= input.has_layout_of(inputs.back());
  }
  check_parameters_unchanged();
  const auto capture = std::make_shared<Capture>(records_, inputs_have_their_layout);
  state_.run([&] {
    const RegionRandom::SecondRun random(random_);
    const MemoryClassScope memory(MemoryClass::Activation);
    const SavedTensorScope scope(capture, kName);
    run_again_(inputs);
  });
  capture->fill_slots();
  start_watches();
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

class CheckpointedCall::FirstRun {
 public:
  FirstRun(const std::vector<at::Tensor>& inputs, RunAgain run_again)
      : call_(std::make_shared<Call>(inputs, std::move(run_again))),
        random_(call_->random()),
        scope_(std::make_shared<Recorder>(call_), kName) {}
  ~FirstRun() { call_->end_first_run(); }
  FirstRun(const FirstRun&) = delete;
  FirstRun& operator=(const FirstRun&) = delete;

 private:
  std::shared_ptr<Call> call_;
  RegionRandom::FirstRun random_;
  SavedTensorScope scope_;
};

CheckpointedCall::CheckpointedCall(const std::vector<at::Tensor>& inputs, RunAgain run_again) {
  if (at::GradMode::is_enabled()) first_run_ = std::make_unique<FirstRun>(inputs, std::move(run_again));
}

CheckpointedCall::~CheckpointedCall() = default;

}  // namespace detail
}  // namespace halfstep
