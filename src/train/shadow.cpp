#include <halfstep/shadow.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/max.h>
#include <ATen/ops/mm.h>
#include <ATen/record_function.h>
#include <halfstep/autocast.h>
#include <halfstep/error.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <unordered_map>

#include "diagnose/aside.h"
#include "diagnose/step_observer.h"
#include "quant/session.h"

namespace halfstep {
namespace {

/// Sums over the calls of a step.
struct Sums {
  double output_error = 0, output = 0, input_grad_error = 0, input_grad = 0, weight_grad_error = 0,
         weight_grad = 0;  // of squares
  double forward_noise = 0, backward_noise = 0;
};

/// One of the precisions, with what it remembers of each layer.
struct Candidate {
  std::string name;
  Precision precision;
  std::shared_ptr<QuantSession> session{};  // with a recipe
  std::unordered_map<std::string, at::Tensor>
      leaves{};  // of the layers it computes: a leaf in the weight's memory
  double grad_scale = 1;
  std::map<std::string, Sums> sums{};  // of this step
};

/// A layer's product in forward.
struct Call {
  at::Tensor input;  // of two dimensions, detached
  std::string layer;
  bool is_in_by_out = false;  // how the weight lies
  bool wants_input_grad = false;
};

double norm_of(const at::Tensor& tensor) {
  return at::linalg_vector_norm(tensor, 2, at::OptionalIntArrayRef(), false, at::kDouble).item<double>();
}

struct Products {
  at::Tensor output{}, input_grad{}, weight_grad{};

  bool are_finite() const {
    return std::isfinite(norm_of(output) + norm_of(weight_grad) +
                         (input_grad.defined() ? norm_of(input_grad) : 0.0));
  }
};

/// The three products of one call, in the types that the scope around it gives them.
Products products_of(const Call& call, const at::Tensor& weight, const at::Tensor& output_grad,
                     double grad_scale) {
  const at::AutoGradMode with_gradients(true);
  const at::Tensor input = call.input.detach();
  input.requires_grad_(call.wants_input_grad);
  Products made{.output = call.is_in_by_out ? at::mm(input, weight) : at::linear(input, weight)};
  std::vector<at::Tensor> of = {weight};
  if (call.wants_input_grad) of.push_back(input);
  const at::Tensor root = grad_scale == 1 ? output_grad : output_grad * grad_scale;
  const auto grads = torch::autograd::grad({made.output}, of, {root.to(made.output.scalar_type())});
  made.output = made.output.detach();
  made.weight_grad = grads[0];
  if (call.wants_input_grad) made.input_grad = grads[1];
  return made;
}

double squared(double value) { return value * value; }

double share(double part, double whole) { return part == 0 ? 0 : std::sqrt(part / whole); }

std::int32_t amax_bits(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? 0 : std::bit_cast<std::int32_t>(tensor.abs().max().item<float>());
}

}  // namespace

struct Shadow::State final : StepObserver, std::enable_shared_from_this<State> {
  int64_t every = 1, step = 1;
  std::vector<Candidate> candidates;
  std::vector<ShadowRecord> records;
  std::unordered_map<const void*, const Param*> weights;  // by their storage
  std::vector<Param> params;
  double grad_norm = 0;

  bool samples() const { return step == 1 || step % every == 0; }
  bool notes_amax() const {
    return std::ranges::any_of(candidates, [](const Candidate& each) {
      return each.precision.recipe && each.precision.recipe->delayed;
    });
  }

  /// Sees the operations of this thread's forward until it ends.
  class Watching {
   public:
    explicit Watching(std::shared_ptr<State> state)
        : state_(std::move(state)), outer_(std::exchange(current(), state_.get())) {
      handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&begin, &end)
                                               .needsInputs(true)
                                               .needsOutputs(true)
                                               .scopes({at::RecordScope::FUNCTION}));
    }
    ~Watching() {
      at::removeCallback(handle_);
      current() = outer_;
    }
    Watching(const Watching&) = delete;
    Watching& operator=(const Watching&) = delete;

   private:
    /// What a product consists of is its own business.
    struct Frame final : at::ObserverContext {
      Call call;
    };
    static State*& current() {
      static thread_local State* state = nullptr;
      return state;
    }
    static bool& inside() {
      static thread_local bool is_inside = false;
      return is_inside;
    }
    static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
      if (!current() || inside()) return nullptr;
      auto call = current()->call_of(function.name(), function.inputs());
      if (!call) return nullptr;
      auto frame = std::make_unique<Frame>();
      frame->call = *std::move(call);
      inside() = true;
      return frame;
    }
    static void end(const at::RecordFunction& function, at::ObserverContext* context) {
      if (!context) return;
      inside() = false;
      const auto outputs = function.outputs();
      if (current() && !outputs.empty() && outputs[0].isTensor())
        current()->follow(std::move(static_cast<Frame*>(context)->call), outputs[0].toTensor());
    }

    std::shared_ptr<State> state_;  // the Shadow may go first
    State* outer_;
    at::CallbackHandle handle_{};
  };

  /// A product of a layer's input with its weight as it lies, or its transpose.
  std::optional<Call> call_of(std::string_view op, c10::ArrayRef<const c10::IValue> inputs) const {
    const std::size_t first = op == "aten::addmm"                                                ? 1
                              : op == "aten::linear" || op == "aten::matmul" || op == "aten::mm" ? 0
                                                                                                 : 2;
    if (first == 2 || inputs.size() < first + 2 || !inputs[first].isTensor() || !inputs[first + 1].isTensor())
      return std::nullopt;
    const at::Tensor &input = inputs[first].toTensor(), &given = inputs[first + 1].toTensor();
    if (!input.defined() || !given.defined() || input.scalar_type() != at::kFloat || given.dim() != 2 ||
        input.dim() < 1 || !given.has_storage())
      return std::nullopt;
    const auto found = weights.find(given.storage().unsafeGetStorageImpl());
    if (found == weights.end()) return std::nullopt;
    const at::Tensor& weight = found->second->working;
    if (given.numel() != weight.numel()) return std::nullopt;
    const bool as_it_lies = given.sizes() == weight.sizes() && given.strides() == weight.strides();
    const at::Tensor transpose = weight.t();
    if (!as_it_lies && !(given.sizes() == transpose.sizes() && given.strides() == transpose.strides()))
      return std::nullopt;
    return Call{.input = input.detach().reshape({-1, input.size(-1)}),
                .layer = found->second->name,
                .is_in_by_out = as_it_lies != (op == "aten::linear"),
                .wants_input_grad = input.requires_grad()};
  }

  /// Its gradient comes in backward.
  void follow(Call call, const at::Tensor& output) {
    if (!output.requires_grad() || call.input.numel() == 0) return;
    output.register_hook([state = weak_from_this(), call = std::move(call)](const at::Tensor& grad) {
      if (const auto alive = state.lock()) alive->see(call, grad);
    });
  }

  void see(const Call& call, const at::Tensor& given_grad) {
    if (!given_grad.defined()) return;
    const at::RecordFunctionGuard not_recorded(false);
    const at::Tensor output_grad = given_grad.detach().reshape({-1, given_grad.size(-1)});
    if (!samples()) return note_amax(call, output_grad);
    std::optional<Products> reference;
    for (Candidate& candidate : candidates) {
      const auto leaf = candidate.leaves.find(call.layer);
      if (leaf == candidate.leaves.end()) continue;
      if (!reference) {
        reference = products_of(call, leaf->second, output_grad, 1);
        // With what FP32 itself cannot hold, no precision is to be compared.
        if (!reference->are_finite()) return;
      }
      add(candidate.sums[call.layer], *reference, low_products(candidate, call, leaf->second, output_grad),
          call.input, output_grad);
    }
  }

  static Products low_products(Candidate& candidate, const Call& call, const at::Tensor& weight,
                               const at::Tensor& output_grad) {
    const Precision& precision = candidate.precision;
    for (;;) {
      const AutocastScope scope(precision.compute, precision.ops, {.allow_emulated = true},
                                candidate.session);
      Products made = products_of(call, weight, output_grad, candidate.grad_scale);
      if (candidate.grad_scale == 1) return made;
      made.weight_grad = made.weight_grad / candidate.grad_scale;
      if (made.input_grad.defined()) made.input_grad = made.input_grad / candidate.grad_scale;
      // As a run would, which then skips the step and halves its loss scale.
      const bool overflows = !std::isfinite(norm_of(made.weight_grad)) ||
                             (made.input_grad.defined() && !std::isfinite(norm_of(made.input_grad)));
      if (!overflows) return made;
      candidate.grad_scale = std::max(1.0, candidate.grad_scale / 2);
    }
  }

  static void add(Sums& sums, const Products& reference, const Products& low, const at::Tensor& input,
                  const at::Tensor& output_grad) {
    const at::NoGradGuard no_grad;
    const auto errors = [](const at::Tensor& exact, const at::Tensor& other, double& error, double& whole) {
      const at::Tensor difference = other.to(at::kFloat) - exact;
      error += squared(norm_of(difference));
      whole += squared(norm_of(exact));
      return difference;
    };
    const at::Tensor difference = errors(reference.output, low.output, sums.output_error, sums.output);
    sums.forward_noise += squared(norm_of(difference * output_grad));
    errors(reference.weight_grad, low.weight_grad, sums.weight_grad_error, sums.weight_grad);
    if (reference.input_grad.defined()) {
      const at::Tensor of_input =
          errors(reference.input_grad, low.input_grad, sums.input_grad_error, sums.input_grad);
      sums.backward_noise += squared(norm_of(of_input * input));
    }
  }

  /// Of a step that is not looked at: its largest magnitudes make the scales of later ones.
  void note_amax(const Call& call, const at::Tensor& output_grad) {
    std::optional<std::array<std::int32_t, kRoles>> found;
    for (Candidate& candidate : candidates) {
      const auto leaf = candidate.leaves.find(call.layer);
      if (leaf == candidate.leaves.end() || !candidate.session || !candidate.precision.recipe->delayed)
        continue;
      if (!found) {
        const at::NoGradGuard no_grad;
        found = {amax_bits(call.input), amax_bits(leaf->second), amax_bits(output_grad)};
      }
      const auto layer = candidate.session->find(leaf->second);
      std::int32_t bits[kRoles];
      layer->get_of_step(bits);
      for (std::size_t role = 0; role < kRoles; ++role) bits[role] = std::max(bits[role], (*found)[role]);
      layer->set_of_step(bits);
    }
  }

  std::shared_ptr<void> begin_forward(const std::vector<Param>& now) override {
    if (!at::GradMode::is_enabled() || (!samples() && !notes_amax())) return nullptr;
    params = now;
    weights.clear();
    for (const Param& param : params) {
      if (param.working.dim() != 2 || !param.working.has_storage()) continue;
      weights.emplace(param.working.storage().unsafeGetStorageImpl(), &param);
      for (Candidate& candidate : candidates)
        // Somebody may have given the parameter other memory.
        if (const auto leaf = candidate.leaves.find(param.name); leaf != candidate.leaves.end())
          leaf->second.set_data(param.working.detach());
    }
    return std::make_shared<Watching>(shared_from_this());
  }

  void see_gradients(const std::vector<Param>& now) override {
    double sum = 0;
    for (const Param& param : now)
      if (const at::Tensor& grad = param.working.grad(); grad.defined()) sum += squared(norm_of(grad));
    grad_norm = std::sqrt(sum);
  }

  void end_step(const std::vector<Param>&) override {
    for (Candidate& candidate : candidates) {
      if (candidate.session) candidate.session->end_step(/*skipped=*/!std::isfinite(grad_norm));
      for (const auto& [layer, sums] : std::exchange(candidate.sums, {}))
        records.push_back({.step = step,
                           .precision = candidate.name,
                           .layer = layer,
                           .output_error = share(sums.output_error, sums.output),
                           .input_grad_error = share(sums.input_grad_error, sums.input_grad),
                           .weight_grad_error = share(sums.weight_grad_error, sums.weight_grad),
                           .forward_noise = std::sqrt(sums.forward_noise),
                           .backward_noise = std::sqrt(sums.backward_noise),
                           .gradient_share = share(sums.weight_grad_error, squared(grad_norm))});
    }
    ++step;
  }

  void drop_step() override {
    for (Candidate& candidate : candidates) {
      candidate.sums.clear();
      if (candidate.session) candidate.session->drop_step();
    }
  }
};

Shadow::Shadow(MixedPrecision& mp, ShadowOptions options) : state_(std::make_shared<State>()) {
  HALFSTEP_CHECK(options.every >= 1, "Shadow: every is ", options.every, ", expected 1 or more.");
  HALFSTEP_CHECK(mp.precision().compute == at::kFloat, "Shadow: the run computes in ", mp.precision().name(),
                 ", and others are compared with FP32. Train with Precision::fp32().");
  HALFSTEP_CHECK(mp.ranks().size() == 1 && mp.sharding() == Sharding::None, "Shadow: a run of ",
                 mp.ranks().size(), " ranks. It supports one process only.");
  state_->every = options.every;
  for (ShadowedPrecision& given : options.precisions) {
    given.precision.check();
    HALFSTEP_CHECK(given.precision.compute != at::kFloat, "Shadow: ", given.name,
                   " computes in FP32 as the run does: there is nothing to compare.");
    Candidate candidate{.name = std::move(given.name), .precision = std::move(given.precision)};
    const Precision& precision = candidate.precision;
    if (precision.recipe) candidate.session = std::make_shared<QuantSession>();
    if (precision.loss_scaling) candidate.grad_scale = precision.loss_scaling->initial;
    const auto plan = mp.layers_under(precision);
    for (const Param& param : mp.params()) {
      HALFSTEP_CHECK(param.working.is_cpu(), "Shadow: '", param.name, "' is on ", param.working.device(),
                     ". It supports models on the CPU only.");
      const auto layer = std::ranges::find(plan, param.name, &LayerPlan::name);
      if (layer == plan.end() || (precision.recipe && !layer->quantised)) continue;
      const at::Tensor leaf = param.working.detach().requires_grad_();
      if (candidate.session) candidate.session->add(leaf, param.name, *precision.recipe);
      candidate.leaves.emplace(param.name, leaf);
    }
    HALFSTEP_CHECK(!candidate.leaves.empty(), "Shadow: ", candidate.name,
                   " covers none of the model's weights of two dimensions.");
    state_->candidates.push_back(std::move(candidate));
  }
  mp.set_observer(state_);
}

Shadow::~Shadow() = default;

void Shadow::set_step(int64_t number) {
  state_->step = number;
  state_->drop_step();
}

std::vector<ShadowRecord> Shadow::take() { return std::exchange(state_->records, {}); }

}  // namespace halfstep
