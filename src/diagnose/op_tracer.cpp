#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <halfstep/error.h>
#include <halfstep/op_tracer.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <set>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "diagnose/aside.h"
#include "diagnose/layer_memory.h"
#include "diagnose/trace_backward.h"
#include "words/numbers.h"

namespace halfstep {
namespace {

using diagnose::Aside;

constexpr std::string_view kTracerName = "halfstep::OpTracer";
c10::DebugInfoKind tracer_kind() {
  static const c10::DebugInfoKind kind(&kTracerName);
  return kind;
}

/// What of a tensor is not finite.
enum Fault : unsigned { kNone = 0, kNan = 1, kPlusInf = 2, kMinusInf = 4 };

bool is_looked_at(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_nested() || tensor.is_meta() ||
      tensor.numel() == 0 || !tensor.has_storage())
    return false;
  const at::ScalarType type = tensor.scalar_type();
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16 ||
         type == at::kComplexFloat || type == at::kComplexDouble;
}

/// Its numbers, for reading; a complex one is two.
at::Tensor numbers_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach();
  return values.is_complex() ? at::view_as_real(values.resolve_conj()) : values;
}

unsigned faults_of(const at::Tensor& tensor) {
  if (!is_looked_at(tensor)) return kNone;
  const Aside aside;
  const at::Tensor values = numbers_of(tensor);
  if (std::isfinite(at::amax(at::abs(values)).item<double>())) return kNone;  // both hand a NaN on
  const bool has_nan = at::isnan(values).any().item<bool>();
  constexpr double kInf = std::numeric_limits<double>::infinity();
  return (has_nan ? kNan : kNone) | ((values == kInf).any().item<bool>() ? kPlusInf : kNone) |
         ((values == -kInf).any().item<bool>() ? kMinusInf : kNone);
}

template <typename Function>
void for_each_tensor(const c10::IValue& value, Function&& function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector())
      if (tensor.defined()) function(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) for_each_tensor(each, function);
  } else if (value.isTuple()) {
    for (const c10::IValue& each : value.toTupleRef().elements()) for_each_tensor(each, function);
  }
}

bool is_infinite_scalar(const c10::IValue& value) {
  return value.isDouble() && !std::isfinite(value.toDouble());
}

std::string type_text(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return "FP16";
    case at::kBFloat16:
      return "BF16";
    case at::kFloat:
      return "FP32";
    case at::kDouble:
      return "FP64";
    default:
      return c10::toString(type);
  }
}

std::string largest_text(at::ScalarType type) {
  type = c10::toRealValueType(type);
  return type == at::kHalf       ? "65504"
         : type == at::kBFloat16 ? "3.39e38"
         : type == at::kFloat    ? "3.40e38"
                                 : "1.80e308";
}

double largest_of(at::ScalarType type) {
  type = c10::toRealValueType(type);
  return type == at::kHalf       ? 65504.0
         : type == at::kBFloat16 ? 3.3895313892515355e38
         : type == at::kFloat    ? static_cast<double>(std::numeric_limits<float>::max())
                                 : std::numeric_limits<double>::max();
}

std::string shape_text(const at::Tensor& tensor) {
  std::string text = type_text(tensor.scalar_type()) + " [";
  for (int64_t i = 0; i < tensor.dim(); ++i) text += (i > 0 ? ", " : "") + std::to_string(tensor.size(i));
  return text + "]";
}

/// "FP16 [8, 128], -3.1 to 71.2".
std::string range_text(const at::Tensor& tensor) {
  if (!is_looked_at(tensor) || tensor.is_complex()) return shape_text(tensor);
  const Aside aside;
  const at::Tensor values = tensor.detach();
  return detail::concat(shape_text(tensor), ", ", short_digits(at::amin(values).item<double>()), " to ",
                        short_digits(at::amax(values).item<double>()));
}

/// "FP16 [8, 128]: 3 of 1,024 are Inf, 1 is NaN".
std::string faults_text(const at::Tensor& tensor) {
  const Aside aside;
  const at::Tensor values = tensor.detach();
  const int64_t nans = at::isnan(values).sum().item<int64_t>();
  const int64_t infinities =
      (at::abs(values) == std::numeric_limits<double>::infinity()).sum().item<int64_t>();
  return detail::concat(shape_text(tensor), ": of ", with_commas(tensor.numel()), " numbers ",
                        with_commas(infinities), " Inf and ", with_commas(nans), " NaN");
}

/// Never the tensor itself: an operation may write to what it is given.
at::Tensor wide_copy(const at::Tensor& tensor) {
  const at::ScalarType wide = tensor.is_complex() ? at::kComplexDouble : at::kDouble;
  return tensor.detach().to(wide, /*non_blocking=*/false, /*copy=*/true);
}

/// "aten::mm" is "mm", and "torch::autograd::CppNode<halfstep::Loss>" is "Loss".
std::string_view without_namespace(std::string_view name) {
  constexpr std::string_view kNode = "torch::autograd::CppNode<";
  if (name.starts_with(kNode) && name.ends_with('>')) {
    name.remove_prefix(kNode.size());
    name.remove_suffix(1);
  }
  const std::size_t colons = name.rfind("::", name.find('<'));
  return colons == name.npos ? name : name.substr(colons + 2);
}

/// Whether the tensor is all of its memory.
bool is_whole(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && tensor.nbytes() == tensor.storage().nbytes();
}

/// All of a tensor's memory, as numbers of its type.
at::Tensor memory_of(const at::Tensor& tensor) {
  const auto elements = static_cast<int64_t>(tensor.storage().nbytes()) / tensor.element_size();
  return at::empty({0}, tensor.options()).set_(tensor.storage(), 0, {elements}, {1});
}

/// Repeating an operation, it may be a custom one that draws, must not change what is drawn after it.
class RandomNumbersKept {
 public:
  RandomNumbersKept() : generator_(at::detail::getDefaultCPUGenerator()), before_(generator_.get_state()) {}
  ~RandomNumbersKept() { generator_.set_state(before_); }
  RandomNumbersKept(const RandomNumbersKept&) = delete;
  RandomNumbersKept& operator=(const RandomNumbersKept&) = delete;

 private:
  at::Generator generator_;
  at::Tensor before_;
};

/// "layers.0.up.weight" is of the layer "layers.0.up".
std::string layer_of(const std::string& parameter) {
  const std::size_t dot = parameter.rfind('.');
  return dot == parameter.npos ? "the model" : parameter.substr(0, dot);
}

/// Whose memory is not written yet: what is in it means nothing.
bool only_allocates(std::string_view op) {
  return op.starts_with("empty") || op.starts_with("new_empty") || op.starts_with("resize") ||
         op.starts_with("_empty") || op == "set_";
}

constexpr const char* kBackward = "backward";
constexpr std::string_view kLeaf = "AccumulateGrad";  // autograd's node that has a leaf's gradient

constexpr int64_t kGiven = -1;  // on purpose, as a mask's -Inf: the producer of nobody's trouble

}  // namespace

struct OpTracer::State final : c10::DebugInfoBase, std::enable_shared_from_this<OpTracer::State> {
  struct Site {
    std::string op, layer;
  };

  /// One call that is under way. Frames of a thread are inside one another.
  struct Frame final : at::ObserverContext {
    std::shared_ptr<State> state{};  // a call that is under way may outlive its tracer
    Frame* below = nullptr;          // around this one, of whatever tracer
    Frame* parent = nullptr;         // too, of the same tracer
    int64_t backward = -1;           // the number of the backward that it is a part of
    std::string name;
    std::string layer;
    bool is_node = false;  // of autograd's graph
    bool in_backward = false;
    bool is_seed = false;  // of a backward's first gradient, before its nodes
    bool is_view = false;  // what it puts out is memory that it was given
    std::optional<c10::OperatorHandle> handle{};
    std::vector<c10::IValue> inputs{};
    std::vector<std::size_t> only_written{};  // of inputs: where the result goes
    unsigned input_faults = kNone;
    at::Tensor
        unwritten_input{};  // the first whose memory nobody is known to have written, and is not finite
    bool has_infinite_scalar = false;
    std::optional<int64_t> input_producer{};   // of the first input that is not finite
    std::optional<int64_t> producer_inside{};  // in a call that this one made

    const c10::StorageImpl* written = nullptr;  // in place
    bool is_overwritten = false;                // without having been read
    /// Not of numbers that were bad before: an operation copies what it has made inside, and is the culprit.
    bool fills_from_finite() const {
      return is_overwritten && (name != "copy_" || faults_of(inputs[1].toTensor()) == kNone);
    }
    at::Tensor before{};  // a copy of what was read there; `inputs` has it, too

    bool is_outermost() const { return !parent || parent->is_node; }

    bool is_given(const c10::StorageImpl* memory) const {
      bool found = memory == written;
      for (const c10::IValue& input : inputs)
        for_each_tensor(input, [&](const at::Tensor& tensor) {
          found |= tensor.has_storage() && tensor.storage().unsafeGetStorageImpl() == memory;
        });
      return found;
    }
  };

  std::mutex mutex;
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  std::unordered_map<const c10::TensorImpl*, std::string> parameters;  // and their layers
  diagnose::LayerMemory layers;
  struct Bad {
    int64_t producer;
    c10::Storage kept;  // so that its address is nobody else's
  };
  std::unordered_map<const c10::StorageImpl*, Bad> bad;
  std::unordered_map<const c10::StorageImpl*, WeakStorage> unwritten;  // allocated, and no call's result yet
  std::vector<CulpritRecord> producers;
  /// What a producer's numbers came to in a backward.
  struct Use {
    int64_t backward, producer;
    auto operator<=>(const Use&) const = default;
  };
  std::set<Use> used;       // by an operation
  std::set<Use> in_leaves;  // what is in a leaf's gradient did harm; an operation may put others in the place
  std::set<int64_t> filled;  // backwards that gave leaves their gradients, other than autograd::grad
  std::unordered_map<int64_t, std::set<int64_t>> backwards_of;  // of autograd's node, by its number
  std::unordered_map<int64_t, Site> sites;                      // by the number that autograd's node gets
  std::string last_layer;
  std::string last_node_layer;   // in backward
  std::string next_leaf_layer;   // of the leaf whose gradient the next node has
  bool is_before_nodes = false;  // a backward has begun, and none of its nodes yet

  /// The tracers of one thread, which those that run its backward get too. The last one made looks.
  struct Tracers final : c10::DebugInfoBase, std::enable_shared_from_this<Tracers> {
    std::mutex mutex;
    std::vector<std::weak_ptr<State>> all;
    at::CallbackHandle callback{};
  };
  std::shared_ptr<Tracers> tracers;

  static std::shared_ptr<State> active() {
    auto* const tracers = static_cast<Tracers*>(c10::ThreadLocalDebugInfo::get(tracer_kind()));
    if (!tracers) return nullptr;
    const std::lock_guard lock(tracers->mutex);
    return tracers->all.empty() ? nullptr : tracers->all.back().lock();
  }
  void join();
  void leave();
  static Frame*& top() {
    static thread_local Frame* frame = nullptr;
    return frame;
  }

  const std::string* named(const at::Tensor& tensor) {
    // The memory of weights in parts comes and goes; the model's tensors stay.
    if (const auto found = parameters.find(tensor.unsafeGetTensorImpl()); found != parameters.end())
      return &found->second;
    return layers.find(tensor);
  }

  const Bad* badness(const at::Tensor& tensor) const {
    if (!tensor.has_storage()) return nullptr;
    const auto found = bad.find(tensor.storage().unsafeGetStorageImpl());
    return found == bad.end() ? nullptr : &found->second;
  }
  /// A part of the memory is finite; the rest may still not be.
  void forgive(const at::Tensor& tensor) {
    if (badness(tensor) && (is_whole(tensor) || faults_of(memory_of(tensor)) == kNone))
      bad.erase(tensor.storage().unsafeGetStorageImpl());
  }
  void blame(const at::Tensor& tensor, int64_t producer) {
    bad.insert_or_assign(tensor.storage().unsafeGetStorageImpl(), Bad{producer, tensor.storage()});
  }

  bool is_unwritten(const at::Tensor& tensor) const {
    const auto found = unwritten.find(tensor.storage().unsafeGetStorageImpl());
    return found != unwritten.end() && !found->second.expired();
  }

  std::string place() const { return last_layer.empty() ? "before the first layer" : "after " + last_layer; }

  void see_input(Frame& frame, const at::Tensor& tensor);
  /// What a call has put out, and as which of its results; nothing for what it made inside.
  void see_values(Frame& frame, const at::Tensor& tensor, std::optional<std::size_t> index);
  void name_derived(const Frame& frame, const at::Tensor& output);
  static std::string direction_of(const Frame& frame) {
    return frame.in_backward || frame.is_seed ? kBackward : "forward";
  }
  int64_t new_producer(const Frame& frame, const at::Tensor& output, std::optional<std::size_t> index);
  int64_t outside_producer(const Frame& frame, const at::Tensor& input);
  void replay(const Frame& frame, const at::Tensor& output, std::optional<std::size_t> index,
              CulpritRecord& culprit) const;
  void see_node(const torch::autograd::Node& node, const torch::autograd::variable_list& outputs,
                const torch::autograd::variable_list& inputs);
  /// Has every node that a backward of this loss may run looked at.
  void watch_graph(const at::Tensor& loss);

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call);
  static void end(const at::RecordFunction& call, at::ObserverContext* context);
};

std::unique_ptr<at::ObserverContext> OpTracer::State::begin(const at::RecordFunction& call) {
  const std::shared_ptr<State> state = active();
  if (!state) return nullptr;
  const Aside aside;
  const std::lock_guard lock(state->mutex);
  auto frame = std::make_unique<Frame>();
  frame->state = state;
  frame->below = top();
  if (frame->below && frame->below->state == state) frame->parent = frame->below;
  frame->name = without_namespace(call.name());
  frame->is_node = call.scope() == at::RecordScope::BACKWARD_FUNCTION;
  // Autograd sums and checks gradients between its nodes, too.
  frame->backward =
      frame->parent ? frame->parent->backward : int64_t{torch::autograd::get_current_graph_task_id()};
  frame->in_backward = frame->is_node || torch::autograd::get_current_graph_task_id() != -1;
  frame->is_seed = !frame->in_backward && state->is_before_nodes;
  // Around a node the engine sums what the node has given: that is the node's, too.
  const bool is_engines = frame->parent && frame->parent->name.starts_with("evaluate_function");
  if (frame->parent && !is_engines)
    frame->layer = frame->parent->layer;
  else if (frame->in_backward)
    frame->layer = state->last_node_layer;
  frame->inputs.assign(call.inputs().begin(), call.inputs().end());
  if (frame->is_node) {
    state->is_before_nodes = false;
    if (frame->name == kLeaf) {
      if (!state->next_leaf_layer.empty()) frame->layer = std::exchange(state->next_leaf_layer, {});
      state->filled.insert(frame->backward);
    } else if (const auto site = state->sites.find(call.seqNr()); site != state->sites.end()) {
      frame->layer = site->second.layer;
    }
    state->backwards_of[call.seqNr()].insert(frame->backward);
    state->last_node_layer = frame->layer;
  } else if (const auto name = call.operator_name()) {
    frame->handle = c10::Dispatcher::singleton().findSchema(*name);
  }
  const auto* arguments = frame->handle ? &frame->handle->schema().arguments() : nullptr;
  frame->is_view =
      frame->handle && std::ranges::any_of(frame->handle->schema().returns(), [](const auto& result) {
        return result.alias_info() && !result.alias_info()->isWrite();
      });
  // Before the inputs are judged: one that comes with the batch is told by the layer that it is given to.
  std::string layer;
  for (const c10::IValue& input : frame->inputs)
    for_each_tensor(input, [&](const at::Tensor& tensor) {
      if (const std::string* found = state->named(tensor); found && layer.empty()) layer = *found;
    });
  if (!frame->in_backward && !layer.empty()) frame->layer = layer;
  std::unordered_set<const c10::StorageImpl*> overwritten;
  for (std::size_t i = 0; i < frame->inputs.size(); ++i) {
    frame->has_infinite_scalar |= is_infinite_scalar(frame->inputs[i]);
    const bool is_written = arguments && i < arguments->size() && (*arguments)[i].alias_info() &&
                            (*arguments)[i].alias_info()->isWrite();
    const bool is_only_written = is_written && ((*arguments)[i].is_out() || frame->name == "copy_" ||
                                                frame->name == "fill_" || frame->name == "zero_");
    if (is_only_written) frame->only_written.push_back(i);
    for_each_tensor(frame->inputs[i], [&](const at::Tensor& tensor) {
      // What is written or viewed is not read, unless a view turns out to be a copy.
      if (is_only_written) return;
      if (state->badness(tensor) || !(is_written || frame->is_view)) state->see_input(*frame, tensor);
    });
    if (is_written && frame->inputs[i].isTensor() && frame->inputs[i].toTensor().has_storage())
      overwritten.insert(frame->inputs[i].toTensor().storage().unsafeGetStorageImpl());
    // What it was, for a repetition.
    if (is_written && frame->inputs[i].isTensor() && is_looked_at(frame->inputs[i].toTensor())) {
      frame->written = frame->inputs[i].toTensor().storage().unsafeGetStorageImpl();
      frame->is_overwritten = is_only_written;
      if (!is_only_written) frame->inputs[i] = frame->before = frame->inputs[i].toTensor().detach().clone();
    }
  }
  // x.mul_(x) reads what it writes by another argument, too.
  for (std::size_t i = 0; !overwritten.empty() && i < frame->inputs.size(); ++i) {
    const auto* const alias = i < arguments->size() ? (*arguments)[i].alias_info() : nullptr;
    const c10::IValue& input = frame->inputs[i];
    if ((alias && alias->isWrite()) || !input.isTensor() || !is_looked_at(input.toTensor())) continue;
    if (overwritten.contains(input.toTensor().storage().unsafeGetStorageImpl()))
      frame->inputs[i] = input.toTensor().detach().clone();
  }
  if (frame->name == kLeaf && frame->input_producer && *frame->input_producer != kGiven)
    state->in_leaves.insert({frame->backward, *frame->input_producer});
  if (!frame->in_backward) {
    if (!layer.empty()) {
      frame->layer = state->last_layer = layer;
    } else if (frame->layer.empty()) {
      frame->layer = state->place();
    }
    if (call.seqNr() >= 0) state->sites.insert_or_assign(call.seqNr(), Site{frame->name, frame->layer});
  }
  top() = frame.get();
  return frame;
}

void OpTracer::State::see_input(Frame& frame, const at::Tensor& tensor) {
  const unsigned faults = faults_of(tensor);
  if (faults == kNone) return;
  const Bad* known = badness(tensor);
  if (!known && is_unwritten(tensor)) {  // whatever was in that memory, as long as nothing comes of it
    if (!frame.unwritten_input.defined()) frame.unwritten_input = tensor;
    return;
  }
  Frame* around = frame.parent;
  while (around && around->is_view) around = around->parent;
  if (!known && around) {
    // The call around this one has made it by means that are not recorded.
    see_values(*around, tensor, std::nullopt);
    known = badness(tensor);
  }
  frame.input_faults |= faults;
  int64_t producer = kGiven;
  if (known) {
    producer = known->producer;
  } else if (faults != kMinusInf || named(tensor) != nullptr) {
    // From outside; only -Inf is what masks are made of.
    producer = outside_producer(frame, tensor);
    blame(tensor, producer);
  }
  if (!frame.input_producer || *frame.input_producer == kGiven) frame.input_producer = producer;
}

int64_t OpTracer::State::outside_producer(const Frame& frame, const at::Tensor& input) {
  CulpritRecord culprit{.op = "input", .direction = direction_of(frame), .output = faults_text(input)};
  if (const std::string* layer = named(input)) {
    culprit.op = "weight";
    culprit.layer = *layer;
    culprit.verdict =
        "The weight was not finite before this step: check the steps before, or the file that it came from.";
  } else if (frame.in_backward) {
    culprit.op = "gradient";
    culprit.inside = frame.name;
    culprit.layer = frame.layer;
    culprit.verdict = detail::concat("The gradient that reached ", frame.name,
                                     " was made by code that does not call LibTorch's operations.");
  } else if (input.grad_fn()) {
    culprit.op = without_namespace(input.grad_fn()->name());
    culprit.layer = frame.layer.empty() ? place() : frame.layer;
    culprit.verdict = detail::concat(
        "Code that calls no LibTorch operation made it, or an operation that ran before the tracer; ",
        frame.name, " was the first to read it.");
  } else {
    culprit.inside = frame.name;
    culprit.layer = frame.layer.empty() ? place() : frame.layer;
    culprit.verdict = detail::concat("It came from outside the model, with the batch or as a constant, and ",
                                     frame.name, " was the first to read it. Precision is not the cause.");
  }
  producers.push_back(std::move(culprit));
  return std::ssize(producers) - 1;
}

void OpTracer::State::end(const at::RecordFunction& call, at::ObserverContext* context) {
  auto* const frame = static_cast<Frame*>(context);
  if (!frame) return;
  top() = frame->below;
  State& state = *frame->state;
  const Aside aside;
  const std::lock_guard lock(state.mutex);
  std::size_t next = 0;
  for (const c10::IValue& output : call.outputs())
    for_each_tensor(output, [&](const at::Tensor& tensor) {
      const std::size_t index = next++;
      if (!tensor.has_storage()) return;
      const auto* const memory = tensor.storage().unsafeGetStorageImpl();
      if (only_allocates(frame->name)) {
        state.unwritten.insert_or_assign(memory, tensor.storage().getWeakStorageImpl());
        return;
      }
      const bool is_new = !frame->is_given(memory);
      if (is_new) state.unwritten.erase(memory);
      const bool reads_nothing = frame->is_view && !is_new;
      // Memory that the program has allocated by itself is written to by an operation in place. Inside an
      // operation it is that one's result which counts, unless it has filled what is there.
      const bool fills = !is_new && memory == frame->written &&
                         (frame->is_outermost() || frame->fills_from_finite()) && is_looked_at(tensor) &&
                         state.is_unwritten(tensor);
      const bool knows_values =
          fills && (frame->is_overwritten || (frame->before.defined() && faults_of(frame->before) == kNone));
      if (fills && is_whole(tensor) && (knows_values || faults_of(tensor) == kNone))
        state.unwritten.erase(memory);
      if (frame->is_view && is_new)
        for (const c10::IValue& input : frame->inputs)
          for_each_tensor(input, [&](const at::Tensor& each) { state.see_input(*frame, each); });
      if (!reads_nothing &&
          (is_new || knows_values || !state.is_unwritten(tensor) || frame->input_faults != kNone))
        state.see_values(*frame, tensor, index);
      state.name_derived(*frame, tensor);
    });
  if (frame->producer_inside && frame->parent && !frame->parent->producer_inside)
    frame->parent->producer_inside = frame->producer_inside;
}

/// A weight that was cast, transposed or copied is still that layer's.
void OpTracer::State::name_derived(const Frame& frame, const at::Tensor& output) {
  if (frame.in_backward || named(output) != nullptr) return;
  at::Tensor only;
  int count = 0;
  for (const c10::IValue& input : frame.inputs)
    for_each_tensor(input, [&](const at::Tensor& each) {
      only = each;
      ++count;
    });
  if (count != 1) return;
  if (const std::string* layer = named(only)) layers.add_storage(output, *layer);
}

void OpTracer::State::see_values(Frame& frame, const at::Tensor& tensor, std::optional<std::size_t> index) {
  if (!is_looked_at(tensor)) return;
  const unsigned faults = faults_of(tensor);
  if (faults == kNone) return forgive(tensor);
  const Bad* known = badness(tensor);
  if (known && known->producer != kGiven) return;  // a view, or the result of a call inside
  if (frame.producer_inside) return blame(tensor, *frame.producer_inside);
  if (frame.input_producer && *frame.input_producer != kGiven) {
    ++producers[static_cast<std::size_t>(*frame.input_producer)].propagated;
    if (frame.in_backward) used.insert({frame.backward, *frame.input_producer});
    return blame(tensor, *frame.input_producer);
  }
  // Something has come of it, so it was written, by means that are not recorded: as oneDNN's convolutions do.
  if (frame.unwritten_input.defined()) {
    const at::Tensor input = std::exchange(frame.unwritten_input, {});
    unwritten.erase(input.storage().unsafeGetStorageImpl());
    see_input(frame, input);
    return see_values(frame, tensor, index);
  }
  const bool is_given = frame.has_infinite_scalar || frame.input_producer;
  if (is_given && (faults & kNan) == 0 && (frame.has_infinite_scalar || (faults & ~frame.input_faults) == 0))
    return blame(tensor, kGiven);
  frame.producer_inside = new_producer(frame, tensor, index);
  blame(tensor, *frame.producer_inside);
}

int64_t OpTracer::State::new_producer(const Frame& frame, const at::Tensor& output,
                                      std::optional<std::size_t> index) {
  CulpritRecord culprit{.op = frame.name,
                        .layer = frame.layer,
                        .direction = direction_of(frame),
                        .output = faults_text(output)};
  const int64_t number = std::ssize(producers);
  if (frame.in_backward) used.insert({frame.backward, number});
  for (const Frame* outer = frame.parent; outer; outer = outer->parent) {
    culprit.inside = outer->name;
    if (outer->name == kLeaf) in_leaves.insert({frame.backward, number});
    if (outer->is_node) break;
  }
  if (culprit.layer.empty()) culprit.layer = place();
  const auto* arguments = frame.handle ? &frame.handle->schema().arguments() : nullptr;
  for (std::size_t i = 0; i < frame.inputs.size(); ++i) {
    if (std::ranges::find(frame.only_written, i) != frame.only_written.end()) continue;
    for_each_tensor(frame.inputs[i], [&](const at::Tensor& tensor) {
      const std::string name = arguments && i < arguments->size() ? (*arguments)[i].name() : "input";
      culprit.inputs.push_back(name + ": " + range_text(tensor));
    });
  }
  replay(frame, output, index, culprit);
  producers.push_back(std::move(culprit));
  return number;
}

/// The same operation in FP64: is the result a number there?
void OpTracer::State::replay(const Frame& frame, const at::Tensor& output, std::optional<std::size_t> index,
                             CulpritRecord& culprit) const {
  const at::ScalarType type = output.scalar_type();
  if (!frame.handle) return;
  const auto& schema = frame.handle->schema();
  const bool is_cast = frame.name == "_to_copy" || frame.name == "to" || frame.name == "copy_";
  bool is_random = schema.argumentIndexWithName("generator").has_value() ||
                   frame.name.find("dropout") != std::string::npos;
  // Attention and recurrent layers drop by themselves.
  for (std::size_t i = 0; i < std::min(frame.inputs.size(), schema.arguments().size()); ++i)
    is_random |= schema.arguments()[i].name().starts_with("dropout") && frame.inputs[i].isDouble() &&
                 frame.inputs[i].toDouble() > 0;
  if (is_random) {
    culprit.verdict = "It draws random numbers, so it was not repeated in FP64.";
    return;
  }
  std::optional<double> found;
  const auto take = [&](const at::Tensor& tensor) {
    const double largest = at::amax(at::abs(tensor)).item<double>();
    if (!found || std::isnan(largest) || largest > *found) found = largest;
  };
  const RandomNumbersKept kept;
  try {
    if (is_cast) {
      for (const c10::IValue& input : frame.inputs)
        for_each_tensor(input, [&](const at::Tensor& tensor) {
          // Not what copy_ writes to.
          if (is_looked_at(tensor) && tensor.scalar_type() != type) take(wide_copy(tensor));
        });
    } else {
      torch::jit::Stack stack;
      for (std::size_t i = 0; i < frame.inputs.size(); ++i) {
        c10::IValue value = frame.inputs[i];
        const bool is_type = i < schema.arguments().size() && schema.arguments()[i].name().ends_with("dtype");
        if (value.isTensor() && is_looked_at(value.toTensor())) {
          value = wide_copy(value.toTensor());
        } else if (value.isTensorList()) {
          std::vector<at::Tensor> wide = value.toTensorVector();
          for (at::Tensor& tensor : wide)
            if (is_looked_at(tensor)) tensor = wide_copy(tensor);
          value = wide;
        } else if (is_type && value.isInt()) {
          value = static_cast<int64_t>(c10::isComplexType(static_cast<at::ScalarType>(value.toInt()))
                                           ? at::kComplexDouble
                                           : at::kDouble);
        }
        stack.push_back(std::move(value));
      }
      frame.handle->callBoxed(stack);
      std::size_t next = 0;
      for (const c10::IValue& value : stack)
        for_each_tensor(value, [&](const at::Tensor& tensor) {
          // Other results of the same size may be finite where this one is not.
          const bool is_it = index.value_or(next) == next;
          ++next;
          if (is_it && is_looked_at(tensor) && tensor.sizes() == output.sizes()) take(tensor);
        });
    }
  } catch (const std::exception&) {
    culprit.verdict = "LibTorch has no such operation in FP64, so it was not repeated there.";
    return;
  }
  if (!found) {
    culprit.verdict = "It has no result of this size in FP64 to compare with.";
    return;
  }
  const double largest = *found;
  if (!std::isfinite(largest)) {
    culprit.verdict =
        "FP64 gives no finite number from these inputs either: they are the cause, not the precision of this "
        "operation.";
    if (type == at::kHalf || type == at::kBFloat16)
      culprit.verdict +=
          detail::concat(" Where one of them is 0 because ", type_text(type),
                         " rounded it there, an operation before this one needs more precision.");
    return;
  }
  if (type != at::kDouble && largest > largest_of(at::kFloat)) {
    culprit.verdict =
        detail::concat("In FP64 the largest result is ", short_digits(largest),
                       ", which FP32 does not hold either: its inputs are the cause, not precision.");
    return;
  }
  culprit.precision_is_cause = true;
  culprit.verdict =
      largest > largest_of(type)
          ? detail::concat("In FP64 the largest result is ", short_digits(largest), ", and ", type_text(type),
                           " ends at ", largest_text(type), ": precision is the cause.")
          : detail::concat("In FP64 the largest result is ", short_digits(largest), ", which ",
                           type_text(type), " holds: something inside overflows. Precision is the cause.");
}

void OpTracer::State::see_node(const torch::autograd::Node& node,
                               const torch::autograd::variable_list& outputs,
                               const torch::autograd::variable_list& inputs) {
  const Aside aside;
  const std::lock_guard lock(mutex);
  for (const at::Tensor& output : outputs) {
    if (!is_looked_at(output) || badness(output) != nullptr) continue;
    if (const unsigned faults = faults_of(output); faults == kNone) continue;
    std::optional<int64_t> producer;
    for (const at::Tensor& input : inputs)
      if (is_looked_at(input) && faults_of(input) != kNone)
        if (const Bad* known = badness(input)) producer = known->producer;
    if (!producer || *producer == kGiven) {
      Frame frame;
      frame.name = without_namespace(node.name());
      frame.in_backward = true;
      frame.backward = torch::autograd::get_current_graph_task_id();
      const auto site = sites.find(static_cast<int64_t>(node.sequence_nr()));
      if (site != sites.end()) frame.layer = site->second.layer;
      for (const at::Tensor& input : inputs) frame.inputs.emplace_back(input);
      producer = new_producer(frame, output, std::nullopt);
      if (site != sites.end()) producers.back().inside = "backward of " + site->second.op;
      producers.back().verdict = "It is not a LibTorch operation, so it was not repeated in FP64.";
    } else {
      ++producers[static_cast<std::size_t>(*producer)].propagated;
      used.insert({torch::autograd::get_current_graph_task_id(), *producer});
    }
    blame(output, *producer);
  }
}

namespace {

/// Before a leaf's gradient is put into it.
class LeafHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit LeafHook(std::function<void()> see) : see_(std::move(see)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    see_();
    return grads;
  }

 private:
  std::function<void()> see_;
};

/// What a node of autograd's puts out, of whatever it is made.
class NodeHook final : public torch::autograd::FunctionPostHook {
 public:
  using See =
      std::function<void(const torch::autograd::variable_list&, const torch::autograd::variable_list&)>;
  explicit NodeHook(See see) : see_(std::move(see)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    see_(outputs, inputs);
    return outputs;
  }

 private:
  See see_;
};

}  // namespace

void OpTracer::State::watch_graph(const at::Tensor& loss) {
  std::unordered_set<const torch::autograd::Node*> hooked;
  std::vector<torch::autograd::Node*> open;
  if (auto* root = loss.grad_fn().get()) open.push_back(root);
  while (!open.empty()) {
    torch::autograd::Node* const node = open.back();
    open.pop_back();
    if (!hooked.insert(node).second) continue;
    node->add_post_hook(
        std::make_unique<NodeHook>([state = weak_from_this(), node](const auto& outputs, const auto& inputs) {
          const auto still = state.lock();
          if (still && State::active() == still) still->see_node(*node, outputs, inputs);
        }));
    if (const auto* const leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node))
      node->add_pre_hook(std::make_unique<LeafHook>([state = weak_from_this(), leaf] {
        const auto still = state.lock();
        if (!still || State::active() != still) return;
        const std::lock_guard lock(still->mutex);
        const std::string* const layer = still->named(leaf->variable);
        still->next_leaf_layer = layer ? *layer : "";
      }));
    for (const auto& edge : node->next_edges())
      if (edge.function) open.push_back(edge.function.get());
  }
  const std::lock_guard lock(mutex);
  is_before_nodes = !hooked.empty();
}

void diagnose::watch_backward(const at::Tensor& loss) {
  if (const auto state = OpTracer::State::active()) state->watch_graph(loss);
}

OpTracer::OpTracer(const std::vector<Param>& params) : state_(std::make_shared<State>()) {
  for (const Param& param : params) {
    state_->parameters.emplace(param.working.unsafeGetTensorImpl(), layer_of(param.name));
    state_->layers.add_param(param, layer_of(param.name));
  }
  state_->join();
}

OpTracer::~OpTracer() { state_->leave(); }

void OpTracer::State::join() {
  if (auto* const present = static_cast<Tracers*>(c10::ThreadLocalDebugInfo::get(tracer_kind()))) {
    tracers = present->shared_from_this();
  } else {
    tracers = std::make_shared<Tracers>();
    c10::ThreadLocalDebugInfo::_push(tracer_kind(), tracers);
  }
  const std::lock_guard lock(tracers->mutex);
  // One callback for all of them, or an operation would be seen several times.
  if (tracers->all.empty())
    tracers->callback = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&State::begin, &State::end)
            .needsInputs(true)
            .needsOutputs(true)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  tracers->all.push_back(weak_from_this());
}

void OpTracer::State::leave() {
  const std::lock_guard lock(tracers->mutex);
  std::erase_if(tracers->all, [this](const std::weak_ptr<State>& each) { return each.lock().get() == this; });
  if (!tracers->all.empty()) return;
  at::removeCallback(tracers->callback);
  try {
    if (c10::ThreadLocalDebugInfo::get(tracer_kind()) == tracers.get())
      c10::ThreadLocalDebugInfo::_pop(tracer_kind());
  } catch (const c10::Error&) {
    // Below that of a profiler, which is in use. Without a tracer it does nothing, and the next one takes it.
  }
}

void OpTracer::watch_backward(const at::Tensor& loss) { state_->watch_graph(loss); }

std::optional<CulpritRecord> OpTracer::culprit(const at::Tensor& loss) const {
  const std::lock_guard lock(state_->mutex);
  const auto& producers = state_->producers;
  if (faults_of(loss) != kNone) {
    if (const auto* known = state_->badness(loss); known && known->producer != kGiven)
      return producers[static_cast<std::size_t>(known->producer)];
  }
  // What was made is harmless as long as neither the loss nor a leaf's gradient has it. Of other losses'
  // backwards there may be some, too.
  std::set<int64_t> of_this_loss;
  if (const auto node = loss.defined() ? loss.grad_fn() : nullptr)
    if (const auto found = state_->backwards_of.find(static_cast<int64_t>(node->sequence_nr()));
        found != state_->backwards_of.end())
      of_this_loss = found->second;
  std::optional<int64_t> first;
  const auto look = [&](const std::set<State::Use>& uses, auto&& counts) {
    for (const State::Use& use : uses)
      if ((of_this_loss.empty() || of_this_loss.contains(use.backward)) && counts(use.backward))
        first = std::min(first.value_or(use.producer), use.producer);
  };
  look(state_->in_leaves, [](int64_t) { return true; });
  look(state_->used, [&](int64_t backward) { return !state_->filled.contains(backward); });
  if (!first) return std::nullopt;
  return producers[static_cast<std::size_t>(*first)];
}

std::vector<CulpritRecord> OpTracer::producers() const {
  const std::lock_guard lock(state_->mutex);
  return state_->producers;
}

std::string sentence(const CulpritRecord& culprit) {
  std::string text = detail::concat("In ", culprit.direction, ", ", culprit.layer, ": ", culprit.op);
  if (!culprit.inside.empty()) text += detail::concat(" (in ", culprit.inside, ")");
  text += detail::concat(" gave ", culprit.output, ".");
  for (const std::string& input : culprit.inputs) text += detail::concat(" ", input, ".");
  text += " " + culprit.verdict;
  if (culprit.propagated > 0)
    text += detail::concat(" ", counted(culprit.propagated, "later operation"), " propagated it.");
  return text;
}

}  // namespace halfstep
