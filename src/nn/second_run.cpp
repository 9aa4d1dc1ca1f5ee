#include "nn/second_run.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <halfstep/error.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

namespace halfstep {
namespace {

at::Tensor state_of(at::Generator& generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator& generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace

/// LibTorch's cache of cast weights is off meanwhile: nobody would empty it.
class RecomputeState::AutocastGuard {
 public:
  explicit AutocastGuard(const std::vector<Autocast>& wanted)
      : outer_(current()),
        outer_cache_enabled_(at::autocast::is_autocast_cache_enabled()),
        outer_graph_optimizer_(torch::jit::getGraphExecutorOptimize()) {
    set(wanted);
    at::autocast::set_autocast_cache_enabled(false);
    // As inside an AutocastScope (docs/decisions/0083).
    if (std::any_of(wanted.begin(), wanted.end(), [](const Autocast& each) { return each.enabled; }))
      torch::jit::setGraphExecutorOptimize(false);
  }
  ~AutocastGuard() {
    torch::jit::setGraphExecutorOptimize(outer_graph_optimizer_);
    set(outer_);
    at::autocast::set_autocast_cache_enabled(outer_cache_enabled_);
  }
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

  static std::vector<Autocast> current() {
    std::vector<Autocast> found;
    for (const c10::DeviceType device : autocast_devices()) {
      found.push_back(
          {device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)});
    }
    return found;
  }

 private:
  static void set(const std::vector<Autocast>& wanted) {
    for (const auto& [device, enabled, low] : wanted) {
      at::autocast::set_autocast_enabled(device, enabled);
      at::autocast::set_autocast_dtype(device, low);
    }
  }

  std::vector<Autocast> outer_;
  bool outer_cache_enabled_, outer_graph_optimizer_;
};

class RecomputeState::RandomGuard {
 public:
  explicit RandomGuard(const std::vector<Random>& wanted) : outer_(wanted) {
    for (auto& [generator, state] : outer_) state = state_of(generator);
    for (const auto& [generator, state] : wanted) {
      at::Generator same = generator;
      set_state(same, state);
    }
  }
  ~RandomGuard() {
    for (auto& [generator, state] : outer_) set_state(generator, state);
  }
  RandomGuard(const RandomGuard&) = delete;
  RandomGuard& operator=(const RandomGuard&) = delete;

 private:
  std::vector<Random> outer_;
};

RecomputeState::RecomputeState(const std::vector<at::Tensor>& tensors) : autocast_(AutocastGuard::current()) {
  if (const ActivePolicy* policy = active_policy()) policy_ = *policy;
  std::vector<at::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.is_cpu() || tensor.is_meta()) continue;
    if (std::find(devices.begin(), devices.end(), tensor.device()) == devices.end())
      devices.push_back(tensor.device());
  }
  for (const at::Device device : devices) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    random_.push_back({generator, state_of(generator)});
  }
}

void RecomputeState::run(const std::function<void()>& body) const {
  const at::AutoGradMode gradients_on(true);
  const AutocastGuard autocast(autocast_);
  const c10::DebugInfoGuard policy(active_policy_kind(), as_debug_info(policy_));
  const RandomGuard random(random_);
  body();
}

namespace {

// Its address is the identity; the text shows up in LibTorch's own error messages.
constexpr std::string_view kKindName = "HALFSTEP_REGION_RANDOM";

c10::DebugInfoKind streams_kind() { return c10::DebugInfoKind(&kKindName); }

/// Above autocast and autograd. LibTorch 2.13 has no kernel on it, and only its own tests use it.
constexpr c10::DispatchKey kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

at::CPUGeneratorImpl& cpu(const at::Generator& generator) {
  return *at::check_generator<at::CPUGeneratorImpl>(generator);
}

at::Generator copy_of(const at::Generator& generator) {
  const std::lock_guard lock(cpu(generator).mutex_);
  return generator.clone();
}

bool same_state(const at::Generator& a, const at::Generator& b) {
  const at::mt19937_data_pod x = cpu(a).engine().data(), y = cpu(b).engine().data();
  return x.left_ == y.left_ && x.next_ == y.next_ && x.seed_ == y.seed_ && x.state_ == y.state_ &&
         cpu(a).next_float_normal_sample() == cpu(b).next_float_normal_sample() &&
         cpu(a).next_double_normal_sample() == cpu(b).next_double_normal_sample();
}

void set_state(const at::Generator& generator, const at::Generator& wanted) {
  cpu(generator).set_engine(cpu(wanted).engine());
  cpu(generator).set_next_float_normal_sample(cpu(wanted).next_float_normal_sample());
  cpu(generator).set_next_double_normal_sample(cpu(wanted).next_double_normal_sample());
}

/// Another stream, which shares no number with the one that `generator` was in.
void leave_stream(const at::Generator& generator) {
  at::mt19937 ahead = cpu(generator).engine();
  cpu(generator).set_engine(
      at::mt19937((static_cast<uint64_t>(ahead()) << 32 | ahead()) ^ 0x9e3779b97f4a7c15));
  cpu(generator).set_next_float_normal_sample(std::nullopt);
  cpu(generator).set_next_double_normal_sample(std::nullopt);
}

}  // namespace

/// What operators of one run draw from.
class RegionRandom::Streams final : public c10::DebugInfoBase {
 public:
  static std::shared_ptr<Streams> of_first_run() {
    return std::make_shared<Streams>(at::Generator(), active(), std::vector<Given>());
  }
  static std::shared_ptr<Streams> of_second_run(const at::Generator& start, std::vector<Given> given) {
    for (Given& each : given) each.copy = copy_of(each.copy);
    auto streams = std::make_shared<Streams>(start, nullptr, std::move(given));
    streams->replays_ = true;
    return streams;
  }
  Streams(at::Generator start, Streams* outer, std::vector<Given> given)
      : start_(std::move(start)), outer_(outer), given_(std::move(given)) {}

  /// Null outside every region.
  static Streams* active() { return static_cast<Streams*>(c10::ThreadLocalDebugInfo::get(streams_kind())); }

  /// Stands for the default generator. Made when it is first asked for: most regions draw nothing.
  at::Generator stream() {
    const std::lock_guard lock(mutex_);
    if (stream_.defined()) return stream_;
    if (!start_.defined()) take_stream();
    return stream_ = copy_of(start_);
  }

  /// The state that the numbers of this run start from; undefined where it drew none.
  const at::Generator& start() const { return start_; }

  /// Gives the stream back, at its end, to the generator that it was taken from. Where others drew meanwhile,
  /// that one goes on in the stream that they drew from.
  void end_first_run() {
    if (!stream_.defined()) return;
    const std::lock_guard lock(cpu(taken_from_).mutex_);
    if (same_state(taken_from_, left_behind_)) set_state(taken_from_, stream_);
  }

  const std::vector<Given>& given() const { return given_; }

  at::Generator in_place_of(const at::Generator& asked) {
    if (asked == at::detail::getDefaultCPUGenerator()) return stream();
    const std::lock_guard lock(mutex_);
    const Given* known = nullptr;
    for (const Given& each : given_) {
      if (each.generator == asked) known = &each;
    }
    if (replays_) return known ? known->copy : asked;
    const at::Generator used = outer_ ? outer_->in_place_of(asked) : asked;
    if (!known) given_.push_back({asked, copy_of(used)});
    return used;
  }

 private:
  /// From the default generator, or from the private one of the region around. What others draw from it until
  /// the region ends comes from another stream: they must not draw the numbers of this region.
  void take_stream() {
    HALFSTEP_CHECK(!replays_,
                   "checkpoint_activations: the function draws random numbers when it is run again for "
                   "backward, and drew none in forward. It must do the same both times.");
    taken_from_ = outer_ ? outer_->stream() : at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(cpu(taken_from_).mutex_);
    start_ = taken_from_.clone();
    leave_stream(taken_from_);
    left_behind_ = taken_from_.clone();
  }

  at::Generator start_, stream_, taken_from_, left_behind_;
  Streams* outer_;  // lives as long: the debug info of this run holds that of the outer ones
  bool replays_ = false;
  std::mutex mutex_;
  std::vector<Given> given_;
};

namespace {

/// Stands before one operator that takes a generator.
class StreamKernel final : public c10::OperatorKernel {
 public:
  StreamKernel(std::size_t argument_count, std::size_t generator_index)
      : argument_count_(argument_count), generator_index_(generator_index) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    RegionRandom::Streams* const streams = RegionRandom::Streams::active();
    if (streams && works_on_cpu(*stack)) {
      c10::IValue& generator = (*stack)[stack->size() - argument_count_ + generator_index_];
      generator = streams->in_place_of(generator.isNone() ? at::detail::getDefaultCPUGenerator()
                                                          : generator.toGenerator());
    }
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
  }

 private:
  /// One without tensors, such as rand, makes a tensor and calls another operator on it.
  bool works_on_cpu(const torch::jit::Stack& stack) const {
    for (std::size_t i = stack.size() - argument_count_; i < stack.size(); ++i) {
      if (stack[i].isTensor() && stack[i].toTensor().defined()) return stack[i].toTensor().is_cpu();
    }
    return false;
  }

  std::size_t argument_count_, generator_index_;
};

/// Registers on construction, and unregisters when the library is unloaded.
class Registration {
 public:
  Registration() {
    try {
      auto& everything = libraries_.emplace_back(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
      everything.fallback(torch::CppFunction::makeFallthrough());
      auto& aten = libraries_.emplace_back(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
      for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames())
        register_op(aten, name);
    } catch (const c10::Error& error) {
      failure_ = error.what_without_backtrace();
    }
  }

  const std::string& failure() const { return failure_; }

 private:
  static void register_op(torch::Library& aten, const c10::OperatorName& name) {
    if (name.getNamespace() != "aten") return;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op) return;
    const auto& arguments = op->schema().arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const c10::Type& type = *arguments[i].type();
      const bool optional = type.kind() == c10::TypeKind::OptionalType;
      const auto kind = optional ? type.expectRef<c10::OptionalType>().getElementType()->kind() : type.kind();
      if (kind != c10::TypeKind::GeneratorType) continue;
      const std::string full_name =
          name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      aten.impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                       std::make_unique<StreamKernel>(arguments.size(), i)));
      return;
    }
  }

  std::vector<torch::Library> libraries_;
  std::string failure_;
};

// While the library loads, as autocast's kernels are. (docs/decisions/0031.)
const Registration registration;

}  // namespace

RegionRandom::RegionRandom() {
  HALFSTEP_CHECK(registration.failure().empty(),
                 "checkpoint_activations: the dispatch key of its random numbers is taken in this process: ",
                 registration.failure());
}

RegionRandom::FirstRun::FirstRun(RegionRandom& region)
    : region_(region),
      streams_(Streams::of_first_run()),
      streams_guard_(streams_kind(), streams_),
      key_guard_(kKey) {}

RegionRandom::FirstRun::~FirstRun() {
  region_.given_ = streams_->given();
  region_.start_ = streams_->start();
  streams_->end_first_run();
}

RegionRandom::SecondRun::SecondRun(const RegionRandom& region)
    : streams_guard_(streams_kind(), Streams::of_second_run(region.start_, region.given_)),
      key_guard_(kKey) {}

}  // namespace halfstep
