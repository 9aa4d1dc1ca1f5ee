#include <halfstep/probe.h>

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <halfstep/error.h>
#include <halfstep/formats.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <unordered_map>

#include "diagnose/aside.h"
#include "diagnose/layer_memory.h"
#include "diagnose/step_observer.h"
#include "kernels/statistics.h"
#include "tensor/dense.h"

namespace halfstep {
namespace {

/// Of logits: a mask is -Inf, or a number as low as its type has, and softmax makes 0 of either. Here all are
/// -Inf, which is no magnitude.
at::Tensor without_mask(const at::Tensor& logits) {
  if (!logits.defined() || !logits.is_floating_point()) return logits;
  constexpr double kMask = -traits(Format::FP16).max / 2;
  const diagnose::Aside aside;
  // A copy of the logits of a loss may be the largest tensor of a step. An accelerator makes one rather than
  // have the program wait for the least of them.
  if (logits.is_cpu() && (logits.numel() == 0 || !(logits.detach().amin().item<double>() <= kMask)))
    return logits;
  return logits.detach().masked_fill(logits <= kMask, -std::numeric_limits<double>::infinity());
}

}  // namespace

TensorStats statistics_of(const at::Tensor& tensor) {
  HALFSTEP_CHECK(tensor.defined(), "statistics_of: the tensor is undefined.");
  const diagnose::Aside aside;
  at::Tensor values = tensor.detach();
  if (values.scalar_type() == at::kDouble) values = values.to(at::kFloat);
  const auto format = training_format(values.scalar_type());
  HALFSTEP_CHECK(format && values.layout() == at::kStrided, "statistics_of: a tensor of type ",
                 tensor.scalar_type(), ". Give a dense one of FP64, FP32, BF16 or FP16.");
  values = values.cpu().contiguous();
  constexpr int64_t kLeastPart = 1 << 16;
  const auto* const bytes = static_cast<const std::byte*>(values.const_data_ptr());
  const auto element_bytes = static_cast<int64_t>(values.element_size());
  TensorStats all;
  std::mutex mutex;
  at::parallel_for(0, values.numel(), kLeastPart, [&](int64_t begin, int64_t end) {
    TensorStats part;
    add_statistics(*format, bytes + begin * element_bytes, static_cast<std::size_t>(end - begin), part);
    const std::lock_guard lock(mutex);
    all.merge(part);
  });
  return all;
}

struct Probe::State final : StepObserver, std::enable_shared_from_this<Probe::State> {
  ProbeOptions options;
  int64_t step = 1;
  std::vector<ProbeRecord> records;
  std::size_t complete = 0;                                            // of them are of steps that are over
  std::unordered_map<const c10::TensorImpl*, std::string> parameters;  // and their layers
  diagnose::LayerMemory layers;
  std::map<std::string, TensorStats> activations;  // of this step's micro-batches
  /// The last output of a layer. A Linear of three dimensions adds its bias to the product in place: the sum
  /// takes the product's place in the statistics.
  struct LastOutput {
    std::string layer;
    c10::weak_intrusive_ptr<c10::StorageImpl> memory;
    TensorStats before;  // of the layer, without it
  };
  std::optional<LastOutput> last_output;
  std::vector<at::Tensor> before;  // the weights, for the update
  std::string last_layer;
  int64_t forwards = 0;               // of this step, with gradients
  bool is_summed_by_autograd = true;  // where gradients of several forwards are one sum

  /// From 40 looks on half as often, and again whenever their number has doubled: a run of weeks has some
  /// hundred.
  bool samples(int64_t number) const {
    if (number == 1) return true;
    if (number % options.every != 0) return false;
    int64_t stride = 1;
    while (number / options.every > 40 * stride) stride *= 2;
    return number / options.every % stride == 0;
  }
  bool samples() const { return samples(step); }

  void add(const std::string& role, const std::string& name, const TensorStats& stats) {
    records.push_back({.step = step, .seconds = 0, .role = role, .name = name, .stats = stats});
  }

  /// Sees operations of this thread until it ends. The Probe may end before.
  class Watching {
   public:
    explicit Watching(std::shared_ptr<State> state)
        : state_(std::move(state)),
          before_(state_->activations),
          exceptions_(std::uncaught_exceptions()),
          outer_(std::exchange(current(), this)) {
      // One callback for all that are inside one another, or each operation would be seen several times.
      if (outer_) return;
      handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&begin, &end)
                                               .needsInputs(true)
                                               .needsOutputs(true)
                                               .scopes({at::RecordScope::FUNCTION}));
    }
    ~Watching() {
      if (!outer_) at::removeCallback(handle_);
      current() = outer_;
      // A forward that threw, or was an evaluation, is no part of a step.
      if (!has_gradients_ || std::uncaught_exceptions() > exceptions_)
        state_->activations = std::move(before_);
      else if (!outer_)
        ++state_->forwards;
    }
    Watching(const Watching&) = delete;
    Watching& operator=(const Watching&) = delete;

   private:
    /// A call that is given a layer's weight, or a softmax or a loss with one inside, whose layer is empty;
    /// those inside it are its own business.
    struct Call final : at::ObserverContext {
      std::string layer;
    };
    static Watching*& current() {
      static thread_local Watching* watching = nullptr;
      return watching;
    }
    static bool& inside() {
      static thread_local bool is_inside = false;
      return is_inside;
    }

    static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
      if (!current() || inside()) return nullptr;
      State* const state = current()->state_.get();
      const std::string_view name = call.name();
      const bool is_softmax = name == "aten::softmax" || name == "aten::_softmax" ||
                              name == "aten::log_softmax" || name == "aten::cross_entropy_loss";
      if (is_softmax && !call.inputs().empty() && call.inputs()[0].isTensor()) {
        state->see_activation(
            (state->last_layer.empty() ? "the input" : state->last_layer).append(ProbeRecord::kLogitsAfter),
            without_mask(call.inputs()[0].toTensor()));
        inside() = true;  // what it calls has the same logits
        return std::make_unique<Call>();
      }
      for (const c10::IValue& input : call.inputs()) {
        if (!input.isTensor() || !input.toTensor().defined()) continue;
        current()->has_gradients_ |= at::GradMode::is_enabled() && input.toTensor().requires_grad();
        const std::string* const layer = state->layer_of(input.toTensor());
        if (!layer) continue;
        auto frame = std::make_unique<Call>();
        frame->layer = state->last_layer = *layer;
        inside() = true;
        return frame;
      }
      return nullptr;
    }
    static void end(const at::RecordFunction& call, at::ObserverContext* context) {
      if (!context) return;
      inside() = false;
      for (const c10::IValue& output : call.outputs())
        if (output.isTensor() && current())
          current()->state_->see_activation(static_cast<Call*>(context)->layer, output.toTensor());
    }

    std::shared_ptr<State> state_;
    std::map<std::string, TensorStats> before_;
    int exceptions_;
    bool has_gradients_ = false;
    Watching* outer_;
    at::CallbackHandle handle_{};
  };

  void see_activation(const std::string& layer, const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.numel() == 0 || !training_format(tensor.scalar_type())) return;
    if (layer.empty() || layer_of(tensor)) return;  // a weight that is transposed is no activation
    TensorStats& stats = activations[layer];
    const auto* const memory = tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
    if (last_output && last_output->layer == layer && !last_output->memory.expired() &&
        last_output->memory._unsafe_get_target() == memory)
      stats = last_output->before;
    else if (memory)
      last_output.emplace(LastOutput{layer, tensor.storage().getWeakStorageImpl(), stats});
    stats.merge(statistics_of(tensor));
  }

  const std::string* layer_of(const at::Tensor& tensor) const {
    const auto found = parameters.find(tensor.unsafeGetTensorImpl());
    return found == parameters.end() ? layers.find(tensor) : &found->second;
  }

  std::shared_ptr<void> begin_forward(const std::vector<Param>& params) override {
    if (!samples() || !options.activations || !at::GradMode::is_enabled()) return nullptr;
    last_layer.clear();
    last_output.reset();
    parameters.clear();
    layers.clear();
    for (const Param& param : params) {
      const std::size_t dot = param.name.rfind('.');
      const std::string layer = dot == param.name.npos ? param.name : param.name.substr(0, dot);
      parameters.emplace(param.working.unsafeGetTensorImpl(), layer);
      layers.add_param(param, layer);
    }
    return std::make_shared<Watching>(shared_from_this());
  }

  void see_gradients(const std::vector<Param>& params) override {
    if (!samples()) return;
    before.clear();
    for (auto& [name, stats] : activations) add("activation", name, stats);
    activations.clear();
    for (const Param& param : params) {
      const at::Tensor& grad = param.working.grad();
      if (grad.defined() && training_format(grad.scalar_type())) {
        add("gradient", param.name, statistics_of(grad));
        if (is_summed_by_autograd && forwards > 1 && grad.scalar_type() != at::kFloat) {
          records.back().summed_parts = forwards;
          records.back().sum_type = grad.scalar_type() == at::kBFloat16 ? "bf16" : "fp16";
        }
      }
      before.push_back(full_precision(param));
    }
    forwards = 0;
  }

  void end_step(const std::vector<Param>& params) override {
    if (samples() && before.size() == params.size()) {
      const diagnose::Aside aside;
      for (std::size_t i = 0; i < params.size(); ++i) {
        const at::Tensor after = full_precision(params[i]);
        add("weight", params[i].name, statistics_of(after));
        add("update", params[i].name, statistics_of(after - before[i]));
      }
    }
    before.clear();
    activations.clear();
    forwards = 0;
    complete = records.size();
    ++step;
  }

  void drop_step() override {
    before.clear();
    activations.clear();
    forwards = 0;
    records.resize(complete);
  }
};

Probe::Probe(MixedPrecision& mp, ProbeOptions options) : state_(std::make_shared<State>()) {
  HALFSTEP_CHECK(options.every >= 1, "Probe: every is ", options.every, ", expected 1 or more.");
  state_->options = options;
  state_->is_summed_by_autograd = mp.accumulation() == Accumulation::None;
  mp.set_observer(state_);
}

Probe::~Probe() = default;

void Probe::set_step(int64_t number) {
  state_->step = number;
  state_->activations.clear();  // of a forward that was no step's
  state_->forwards = 0;
}

bool Probe::looks_at(int64_t number) const { return state_->samples(number); }

std::vector<ProbeRecord> Probe::take() {
  state_->complete = 0;
  return std::exchange(state_->records, {});
}

namespace {

/// What a record is of, so that the same ones of all ranks are put together.
std::string key_of(const ProbeRecord& record) {
  return nlohmann::json({record.step, record.role, record.name})
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// Whether all ranks have records of the same, in the same order.
bool are_alike(const std::vector<ProbeRecord>& records, const Ranks& ranks) {
  std::uint64_t hash = 1469598103934665603u;
  for (const ProbeRecord& record : records)
    for (const char letter : key_of(record))
      hash = (hash ^ static_cast<unsigned char>(letter)) * 1099511628211u;
  const auto number = static_cast<int64_t>(hash >> 2);
  const at::Tensor ends = at::zeros({2}, at::kLong);
  auto* const numbers = ends.mutable_data_ptr<int64_t>();
  numbers[0] = number, numbers[1] = -number;
  ranks.largest(ends);
  return numbers[0] == -numbers[1];
}

/// Ranks whose batches took different ways through the model have records of different layers: each gets one
/// of whatever any has, in the same order. What is left in its statistics is to be added up over ranks: with
/// `parts`, and of activations, this rank's; of what all have alike, those of the first that has it.
std::vector<ProbeRecord> united(std::vector<ProbeRecord> records, const Ranks& ranks, bool parts) {
  using nlohmann::json;
  std::map<std::string, std::deque<ProbeRecord*>> own;  // several of the same, one after another
  json told = json::array();
  for (ProbeRecord& record : records) {
    const std::string key = key_of(record);
    own[key].push_back(&record);
    told.push_back({{"key", key}, {"number", own[key].size()}});
  }
  // All keys by step, each with the first rank that has it.
  const std::string verdict = ranks.decided(
      "the tensors that a probe has seen", told.dump(), [](const std::vector<std::string>& texts) {
        std::map<int64_t, std::vector<json>> by_step;
        std::set<json> known;
        for (std::size_t rank = 0; rank < texts.size(); ++rank)
          for (const json& each : json::parse(texts[rank]))
            if (known.insert(each).second)
              by_step[json::parse(each["key"].get<std::string>())[0].get<int64_t>()].push_back(
                  {{"key", each["key"]}, {"rank", rank}});
        json all = json::array();
        for (const auto& [step, keys] : by_step)
          for (const json& each : keys) all.push_back(each);
        return all.dump();
      });
  std::vector<ProbeRecord> all;
  for (const json& each : json::parse(verdict)) {
    const std::string text = each["key"];
    auto& mine = own[text];
    if (mine.empty()) {
      const json key = json::parse(text);
      all.push_back({.step = key[0], .seconds = 0, .role = key[1], .name = key[2]});
      continue;
    }
    all.push_back(std::move(*mine.front()));
    mine.pop_front();
    const bool adds_up = parts || all.back().role == "activation";
    if (!adds_up && each["rank"] != ranks.rank()) all.back().stats = TensorStats{};
  }
  return all;
}

}  // namespace

std::vector<ProbeRecord> merged_over_ranks(std::vector<ProbeRecord> records, const Ranks& ranks, bool parts) {
  if (ranks.size() == 1) return records;
  if (!are_alike(records, ranks)) {
    records = united(std::move(records), ranks, parts);
    parts = true;
  }
  // What all ranks have alike is not added up.
  std::vector<TensorStats*> summed;
  for (ProbeRecord& record : records)
    if (parts || record.role == "activation") summed.push_back(&record.stats);
  if (summed.empty()) return records;
  const auto count = static_cast<int64_t>(summed.size());
  constexpr int64_t kFractions = 6;
  constexpr int64_t kNumbers = 4 + 256 + 23 + kFractions * TensorStats::kBinades + 5;
  const at::Tensor counts = at::zeros({count, kNumbers}, at::kLong), sums = at::zeros({count}, at::kDouble),
                   largest = at::zeros({count}, at::kLong);
  const auto each_count = [](TensorStats& stats, auto&& visit) {
    for (int64_t* number : {&stats.count, &stats.zeros, &stats.nans, &stats.infinities}) visit(*number);
    for (int64_t& number : stats.exponents) visit(number);
    for (int64_t& number : stats.subnormals) visit(number);
    for (FractionCounts& part : stats.fractions)
      for (int64_t* number :
           {&part.powers_of_two, &part.ones_1, &part.ones_2, &part.ones_3, &part.ones_7, &part.ones_10})
        visit(*number);
    for (int64_t& number : stats.saturated) visit(number);
  };
  for (int64_t i = 0; i < count; ++i) {
    TensorStats& stats = *summed[static_cast<std::size_t>(i)];
    int64_t* place = counts.mutable_data_ptr<int64_t>() + i * kNumbers;
    each_count(stats, [&](int64_t number) { *place++ = number; });
    sums.mutable_data_ptr<double>()[i] = stats.sum;
    // Of numbers that are not negative, the larger one has the larger bits.
    largest.mutable_data_ptr<int64_t>()[i] = std::bit_cast<std::int32_t>(stats.amax);
  }
  ranks.sum(counts);
  ranks.sum(sums);
  ranks.largest(largest);
  for (int64_t i = 0; i < count; ++i) {
    TensorStats& stats = *summed[static_cast<std::size_t>(i)];
    const int64_t* place = counts.const_data_ptr<int64_t>() + i * kNumbers;
    each_count(stats, [&](int64_t& number) { number = *place++; });
    stats.sum = sums.const_data_ptr<double>()[i];
    stats.amax = std::bit_cast<float>(static_cast<std::int32_t>(largest.const_data_ptr<int64_t>()[i]));
  }
  return records;
}

}  // namespace halfstep
