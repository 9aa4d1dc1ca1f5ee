#include "autocast/repeated_outputs.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <utility>

#include "tensor/update_path.h"

namespace halfstep {
namespace {

constexpr std::string_view kCheap[] = {"gelu", "silu", "layer_norm", "rms_norm"};

std::vector<int64_t> versions_of(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> versions;
  for (const at::Tensor& tensor : tensors) versions.push_back(tensor._version());
  return versions;
}

/// Held weakly: an output that nobody uses goes when its caller drops it.
struct NotedOutput {
  c10::weak_intrusive_ptr<c10::TensorImpl> output;
  int64_t output_version;
  std::vector<at::Tensor> inputs;
  std::vector<int64_t> input_versions;
  std::shared_ptr<RepeatableOutput> repeatable;
};

thread_local std::optional<NotedOutput> noted;
thread_local int open_scopes = 0;

class OutputPacker final : public SavedTensorPacker {
 public:
  OutputPacker(NotedArgument argument, at::Tensor cast)
      : output_(std::move(argument.output)),
        inputs_(std::move(argument.inputs)),
        given_(argument.given),
        cast_(std::move(cast)) {}

  std::optional<PackedTensor> pack(const at::Tensor& tensor) override {
    if (tensor.scalar_type() != cast_.scalar_type() || !share_storage(tensor, cast_)) return std::nullopt;
    // The output and the cast of it are made in the same layout again, so that views lie in them at the same
    // places.
    auto& part = output_->add_user(given_, cast_.scalar_type());
    return PackedTensor{inputs_.front(), [output = output_, &part, saved = StoragePlace(tensor),
                                          others = saved_others()](const at::Tensor& first) {
                          std::vector<at::Tensor> inputs{first};
                          for (const auto& other : *others) inputs.push_back(other.unpack());
                          return saved.in(output->compute(inputs, part));
                        }};
  }

 private:
  using SavedVariables = std::vector<torch::autograd::SavedVariable>;

  /// The inputs after the first, kept as LibTorch would keep them: outer packers are asked about each.
  std::shared_ptr<const SavedVariables> saved_others() const {
    auto saved = std::make_shared<SavedVariables>();
    for (std::size_t i = 1; i < inputs_.size(); ++i) saved->emplace_back(inputs_[i], /*is_output=*/false);
    return saved;
  }

  std::shared_ptr<RepeatableOutput> output_;
  std::vector<at::Tensor> inputs_;
  StoragePlace given_;
  at::Tensor cast_;
};

}  // namespace

bool is_cheap_to_repeat(std::string_view op) {
  return std::find(std::begin(kCheap), std::end(kCheap), op) != std::end(kCheap);
}

std::function<at::Tensor(OpArguments)> stock_run(const c10::OperatorHandle& op, at::ScalarType input_type) {
  return [op, input_type](OpArguments arguments) {
    torch::jit::Stack stack(arguments.begin(), arguments.end());
    stack.front() = stack.front().toTensor().to(input_type);
    op.callBoxed(stack);
    return stack.front().toTensor();
  };
}

at::Tensor RepeatableOutput::whole(const std::vector<at::Tensor>& inputs) const {
  std::vector<c10::IValue> arguments(inputs.begin(), inputs.end());
  arguments.insert(arguments.end(), recipe_.others.begin(), recipe_.others.end());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(recipe_.autocast_key);
  return recipe_.run(arguments);
}

RepeatableOutput::Part& RepeatableOutput::add_user(const StoragePlace& place, at::ScalarType type) {
  const std::lock_guard lock(mutex_);
  Part& part = parts_[{place, type}];
  ++part.users;
  return part;
}

at::Tensor RepeatableOutput::compute(const std::vector<at::Tensor>& inputs, Part& part) {
  const std::lock_guard lock(mutex_);
  if (!part.kept.defined()) {
    const at::Tensor made = whole(inputs);
    for (auto& [key, each] : parts_) {
      if (!each.kept.defined()) each.kept = key.first.in(made).to(key.second);
    }
  }
  at::Tensor result = part.kept;
  if (++part.asked % part.users == 0) part.kept.reset();
  return result;
}

void note_output(OutputRecipe recipe, std::vector<at::Tensor> inputs, const at::Tensor& output) {
  noted.reset();
  // An accelerator has memory for it, and each launch takes the host's time.
  if (open_scopes == 0 || !kernels_serve(inputs.front())) return;
  if (SavedTensorScope::is_replayed()) return;
  if (!at::GradMode::is_enabled() || !output.requires_grad() || !saved_tensors_can_be_packed()) return;
  if (output.storage_offset() != 0 || !output.is_non_overlapping_and_dense()) return;
  // One with gaps may come back from another packer in another order, and the output with it.
  const auto can_be_kept = [](const at::Tensor& input) {
    return input.layout() == at::kStrided && input.is_non_overlapping_and_dense() && !input.is_inference() &&
           !is_parameter_or_view_of_one(input);
  };
  if (!std::ranges::all_of(inputs, can_be_kept)) return;
  for (c10::IValue& other : recipe.others) {
    // A norm's gain or bias, one row: an optimizer may change it before backward unseen.
    if (other.isTensor() && other.toTensor().defined()) other = other.toTensor().detach().clone();
  }
  const auto versions = versions_of(inputs);
  noted = NotedOutput{c10::weak_intrusive_ptr<c10::TensorImpl>(output.getIntrusivePtr()), output._version(),
                      std::move(inputs), versions, std::make_shared<RepeatableOutput>(std::move(recipe))};
}

void begin_notes() { ++open_scopes; }

void end_notes() {
  --open_scopes;
  noted.reset();
}

std::optional<NotedArgument> noted_argument(OpArguments arguments) {
  if (!noted || !at::GradMode::is_enabled()) return std::nullopt;
  const auto held = noted->output.lock();
  if (!held) return std::nullopt;
  const at::Tensor output(held);
  if (output._version() != noted->output_version || versions_of(noted->inputs) != noted->input_versions) {
    return std::nullopt;
  }
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isTensor()) continue;
    const at::Tensor& given = arguments[i].toTensor();
    if (given.defined() && given.scalar_type() == output.scalar_type() && share_storage(given, output)) {
      return NotedArgument{i, given, noted->inputs, noted->repeatable};
    }
  }
  return std::nullopt;
}

RepeatedOutput::RepeatedOutput(std::optional<NotedArgument> argument, OpArguments cast_arguments) {
  if (!argument || SavedTensorScope::is_replayed()) return;
  at::Tensor cast = cast_arguments[argument->index].toTensor();
  scope_.emplace(std::make_shared<OutputPacker>(std::move(*argument), std::move(cast)), "AutocastScope");
}

}  // namespace halfstep
