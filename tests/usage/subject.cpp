#include "usage/subject.h"

#include <halfstep/activations.h>
#include <halfstep/autocast.h>
#include <halfstep/checkpoint.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/optim.h>

#include <cmath>
#include <optional>
#include <variant>

namespace usage {

namespace hs = halfstep;

namespace {

constexpr hs::AutocastOptions kAnyMachine{.allow_emulated = true};

at::ScalarType type_of(Compute compute) {
  return compute == Compute::Fp32 ? at::kFloat : compute == Compute::Bf16 ? at::kBFloat16 : at::kHalf;
}

hs::Recipe recipe_of(Recipe recipe) {
  switch (recipe) {
    case Recipe::Fp8Delayed:
      return hs::Recipe::fp8_delayed();
    case Recipe::Fp8Current:
      return hs::Recipe::fp8_current();
    case Recipe::Fp8Rowwise:
      return hs::Recipe::fp8_rowwise();
    case Recipe::Fp8Block:
      return hs::Recipe::fp8_block();
    case Recipe::Mxfp8:
      return hs::Recipe::mxfp8();
    default:
      return hs::Recipe::nvfp4();
  }
}

hs::Precision precision_of(const Program& p) {
  const auto weights = static_cast<hs::WeightStorage>(p.weights);
  if (p.compute == Compute::Fp32) return hs::Precision::fp32();
  if (p.recipe != Recipe::None) {
    auto precision = hs::Precision::with_recipe(recipe_of(p.recipe), weights);
    for (size_t i = 0; i < p.layers.size(); ++i)
      if (p.layers[i].kind == LayerKind::Linear)
        precision.quantise("layer" + std::to_string(i) + ".m.weight");
    precision.keep_high("*");
    return precision;
  }
  if (p.compute == Compute::Bf16) return hs::Precision::bf16(weights);
  auto precision = hs::Precision::fp16(weights);
  precision.loss_scaling->initial = p.loss_scale;
  precision.loss_scaling->growth_interval = p.growth_interval;
  return precision;
}

hs::Format format_of(RegionKind kind) {
  return kind == RegionKind::CompressBf16   ? hs::Format::BF16
         : kind == RegionKind::CompressE4M3 ? hs::Format::E4M3
                                            : hs::Format::E5M2;
}

/// As a tensor of no dimension that shares its memory, whatever the strides.
at::Tensor first_element(at::Tensor tensor) {
  while (tensor.dim() > 0) tensor = tensor.select(0, 0);
  return tensor;
}

using AnyOptimizer = std::variant<hs::AdamW, hs::SGD>;

template <typename Options>
std::vector<hs::ParamGroup<Options>> groups_of(const Program& p, const std::vector<hs::Param>& params,
                                               Options options) {
  std::vector<hs::ParamGroup<Options>> groups;
  for (size_t i = 0; i < params.size(); ++i) {
    options.lr = learning_rate(p, i, params.size());
    if (groups.empty() || groups.back().options.lr != options.lr) groups.push_back({{}, options});
    groups.back().params.push_back(params[i]);
  }
  return groups;
}

AnyOptimizer optimizer_of(const Program& p, const std::vector<hs::Param>& params) {
  const auto moments = static_cast<hs::MomentStorage>(p.moments);
  if (p.optimizer == Optimizer::AdamW)
    return hs::AdamW(groups_of(
        p, params,
        hs::AdamWOptions{.betas = {0.9, 0.99}, .weight_decay = weight_decay(p), .moments = moments}));
  return hs::SGD(groups_of(p, params,
                           hs::SgdOptions{.momentum = p.optimizer == Optimizer::Sgd ? 0.0 : 0.9,
                                          .weight_decay = weight_decay(p),
                                          .nesterov = p.optimizer == Optimizer::SgdNesterov,
                                          .moments = moments}));
}

}  // namespace

struct Subject::Impl {
  explicit Impl(const Program& given)
      : program(given),
        device(given.on_device ? at::Device(at::kPrivateUse1, 0) : at::Device(at::kCPU)),
        model(make_model()),
        mp(make_mp()),
        optimizer(optimizer_of(given, mp.params())) {}

  std::shared_ptr<Model> make_model() const {
    auto made = std::make_shared<Model>(program);
    made->to(device);
    return made;
  }

  Batch there(Batch batch) const {
    batch.input = batch.input.to(device);
    batch.target = batch.target.to(device);
    return batch;
  }

  hs::MixedPrecision make_mp() {
    return {precision_of(program),
            *model,
            {.autocast = kAnyMachine, .accumulation = static_cast<hs::Accumulation>(program.sum)}};
  }

  /// A scope of the program's own type, where it has a low one.
  std::unique_ptr<hs::AutocastScope> scope() const {
    if (program.compute == Compute::Fp32) return nullptr;
    return std::make_unique<hs::AutocastScope>(type_of(program.compute), hs::OpPolicy::standard(),
                                               kAnyMachine);
  }
  bool own_scopes() const {
    return program.placement == Placement::PerLayer || program.placement == Placement::Nested;
  }

  at::Tensor run_layer(int index, const at::Tensor& x) {
    if (throw_at == index && !throw_in_backward) throw IntendedError("inside a layer");
    const bool has_own = own_scopes() && has_parameters(program.layers[static_cast<size_t>(index)].kind);
    const auto opened = has_own ? scope() : nullptr;
    at::Tensor y = model->layer(index, x);
    if (throw_at == index && throw_in_backward && !y.requires_grad())
      throw IntendedError("inside a layer that has no backward");
    if (throw_at == index && throw_in_backward)
      y.register_hook([](const at::Tensor&) -> at::Tensor { throw IntendedError("inside backward"); });
    return y;
  }

  /// Layers first..last, whose regions from `next` on are still to be entered.
  at::Tensor run_layers(int first, int last, size_t next, at::Tensor x) {
    for (int i = first; i <= last;) {
      while (next < program.regions.size() && program.regions[next].first < i) ++next;
      if (next < program.regions.size() && program.regions[next].first == i &&
          program.regions[next].last <= last) {
        const Region region = program.regions[next];
        ++next;
        x = run_region(region, next, x);
        i = region.last + 1;
      } else {
        x = run_layer(i, x);
        ++i;
      }
    }
    return x;
  }

  at::Tensor run_region(const Region& region, size_t next, const at::Tensor& x) {
    const auto body = [this, region, next](const at::Tensor& input) {
      return run_layers(region.first, region.last, next, input);
    };
    switch (region.kind) {
      case RegionKind::Checkpoint:
        return hs::checkpoint_activations(body, x);
      case RegionKind::CheckpointWithScope:
        return hs::checkpoint_activations(
            [this, body](const at::Tensor& input) {
              const auto opened = scope();
              return body(input);
            },
            x);
      case RegionKind::CompressBf16:
      case RegionKind::CompressE4M3:
      case RegionKind::CompressE5M2: {
        const hs::CompressedActivations compressed(format_of(region.kind));
        return body(x);
      }
      case RegionKind::DisabledScope: {
        const auto disabled = hs::AutocastScope::disabled();
        return body(x.to(at::kFloat));  // what came out of the scope may be low
      }
    }
    return x;
  }

  at::Tensor logits_of(const Batch& given) {
    const Batch batch = there(given);
    model->begin(batch);
    at::Tensor x = model->embed(batch);
    x = run_layers(0, static_cast<int>(program.layers.size()) - 1, 0, x);
    const auto opened = own_scopes() ? scope() : nullptr;
    return model->head(x);
  }

  at::Tensor loss_of(const MicroBatch& micro) {
    const at::Tensor logits = logits_of(micro.batch);
    const at::Tensor loss = model->loss(logits, there(micro.batch), program.placement == Placement::PerLayer);
    return loss.to(at::kFloat) * (micro.loss_factor / program.micro_batches);
  }

  Program program;
  at::Device device;
  std::shared_ptr<Model> model;
  hs::MixedPrecision mp;
  AnyOptimizer optimizer;
  at::Tensor loss;
  std::optional<MicroBatch> pending;
  hs::StateDict saved_module;
  int throw_at = -1;
  bool throw_in_backward = false;
};

Subject::Subject(const Program& program) : impl_(std::make_unique<Impl>(program)) {}
Subject::~Subject() = default;

std::vector<std::string> Subject::parameter_names() const {
  std::vector<std::string> names;
  for (const auto& param : impl_->mp.params()) names.push_back(param.name);
  return names;
}

Snapshot Subject::snapshot() const {
  Snapshot snapshot;
  for (const hs::Param& param : impl_->mp.params()) {
    snapshot.full.push_back(hs::full_precision(param).cpu());
    snapshot.working.push_back(param.working.detach().to(at::kFloat, false, true).cpu());
    snapshot.trained.push_back(param.working.requires_grad());
  }
  for (const auto& [name, buffer] : unique_buffers(*impl_->model))
    snapshot.buffers.push_back(buffer.clone().cpu());
  return snapshot;
}

std::map<std::string, at::Tensor> Subject::state() const {
  std::map<std::string, at::Tensor> found;
  const auto take = [&](const std::string& prefix, const hs::StateDict& saved) {
    for (const auto& [name, value] : saved)
      if (const auto* tensor = std::get_if<at::Tensor>(&value)) found[prefix + name] = tensor->cpu();
  };
  take("precision.", impl_->mp.state_dict());
  std::visit([&](const auto& optimizer) { take("optimizer.", optimizer.state_dict()); }, impl_->optimizer);
  for (const auto& [name, buffer] : unique_buffers(*impl_->model))
    found["buffer." + name] = buffer.clone().cpu();
  return found;
}

Subject::Edited Subject::edit(const Event& event, const std::string& scratch_file) {
  torch::NoGradGuard no_grad;
  const auto& params = impl_->mp.params();
  const size_t index = static_cast<size_t>(event.target) % params.size();
  at::Tensor weight = params[index].working;
  // Half of the rows: the model keeps enough of its own to stay well conditioned.
  at::Tensor rows = weight.narrow(0, 0, (weight.size(0) + 1) / 2);
  Edited edited;
  edited.parameters = {index};
  edited.given.resize(1);
  switch (event.action) {
    case Action::Zero:
      rows.zero_();
      break;
    case Action::Copy:
      rows.copy_(rows.flip({0}) * 0.75);
      break;
    case Action::Fill:
      rows.fill_(0.3);
      break;
    case Action::Mul:
      weight.mul_(0.9);
      break;
    case Action::Clamp:
      weight.clamp_(-0.2, 0.9);
      break;
    case Action::DataZero:
      weight.data().narrow(0, 0, (weight.size(0) + 1) / 2).zero_();
      break;
    case Action::SetData:
      weight.set_data((weight.detach() * 0.8).contiguous());
      break;
    case Action::NotFinite: {
      const at::Tensor before = rows.clone();
      for (const double written : {HUGE_VAL, -HUGE_VAL, std::nan("")}) {
        rows.fill_(written);
        const at::Tensor full = hs::full_precision(params[index]).narrow(0, 0, rows.size(0)).cpu();
        edited.kept = edited.kept && at::allclose(full, at::full_like(full, written), 0, 0, true);
      }
      rows.copy_(before);
      break;
    }
    case Action::SetFullPrecision: {
      const at::Tensor values = hs::full_precision(params[index]) * 0.9;
      hs::set_full_precision(params[index], values);
      edited.given[0] = values.cpu();
      break;
    }
    case Action::LoadFp32File: {
      Program other = impl_->program;
      other.seed += 1;
      const auto plain = std::make_shared<Model>(other);
      torch::save(plain, scratch_file);
      torch::load(impl_->model, scratch_file, impl_->device);
      edited = {};
      for (const auto& [name, parameter] : unique_parameters(*plain)) {
        edited.parameters.push_back(edited.parameters.size());
        edited.given.push_back(parameter.detach().clone());
      }
      break;
    }
    default:
      TORCH_CHECK(false, "not an edit");
  }
  return edited;
}

void Subject::save_for_later(Action action, const std::string& scratch_file) {
  if (action == Action::SaveLoadFile)
    torch::save(impl_->model, scratch_file);
  else
    impl_->saved_module = hs::module_state(*impl_->model);
}

Subject::Edited Subject::load_saved(Action action, const std::string& scratch_file) {
  if (action == Action::SaveLoadFile)
    torch::load(impl_->model, scratch_file, impl_->device);
  else
    hs::load_module_state(*impl_->model, impl_->saved_module);
  Edited edited;
  for (size_t i = 0; i < impl_->mp.params().size(); ++i) edited.parameters.push_back(i);
  edited.given.resize(edited.parameters.size());
  return edited;
}

void Subject::set_trained(size_t parameter, bool trained) {
  at::Tensor working = impl_->mp.params()[parameter].working;
  working.requires_grad_(trained);
}

void Subject::resume(bool module_state_last) {
  const auto precision = impl_->mp.state_dict();
  const auto module = hs::module_state(*impl_->model);
  const auto optimizer = std::visit([](const auto& o) { return o.state_dict(); }, impl_->optimizer);
  std::vector<bool> trained;
  for (const auto& param : impl_->mp.params()) trained.push_back(param.working.requires_grad());

  Program other = impl_->program;
  other.seed += 2;  // other weights, which must all be replaced
  auto fresh = std::make_unique<Impl>(other);
  fresh->program = impl_->program;
  if (!module_state_last) hs::load_module_state(*fresh->model, module);
  fresh->mp.load_state_dict(precision);
  std::visit([&](auto& o) { o.load_state_dict(optimizer); }, fresh->optimizer);
  if (module_state_last) hs::load_module_state(*fresh->model, module);
  fresh->saved_module = impl_->saved_module;
  impl_ = std::move(fresh);
  for (size_t i = 0; i < trained.size(); ++i) set_trained(i, trained[i]);
}

at::Tensor Subject::evaluate(const Batch& batch) {
  torch::NoGradGuard no_grad;
  impl_->model->eval();
  const auto run = [&] { return impl_->logits_of(batch); };
  const at::Tensor logits = impl_->program.placement == Placement::PerLayer ? run() : impl_->mp.forward(run);
  impl_->model->train();
  return logits.cpu().to(at::kDouble);
}

void Subject::forward(const MicroBatch& micro_batch) {
  const auto run = [&] { return impl_->loss_of(micro_batch); };
  switch (impl_->program.placement) {
    case Placement::Around:
    case Placement::Nested:
      impl_->loss = impl_->mp.forward(run);
      break;
    case Placement::PerLayer:
      impl_->loss = run();
      break;
    case Placement::BackwardInside:
      impl_->pending = micro_batch;  // runs with backward, in one scope
      break;
  }
}

std::map<int, at::Tensor> Subject::masks() const { return impl_->model->masks(); }

void Subject::backward(int bad_parameter) {
  at::Tensor hooked;
  unsigned hook = 0;
  if (bad_parameter >= 0) {
    hooked = impl_->mp.params()[static_cast<size_t>(bad_parameter)].working;
    hook = hooked.register_hook([](const at::Tensor& grad) {
      at::Tensor bad = grad.clone();
      first_element(bad).fill_(std::numeric_limits<double>::quiet_NaN());
      return bad;
    });
  }
  if (impl_->pending) {
    impl_->mp.forward([&] {
      impl_->mp.backward(impl_->loss_of(*impl_->pending));
      return 0;
    });
    impl_->pending.reset();
  } else {
    impl_->mp.backward(impl_->loss);
    impl_->loss = at::Tensor();
  }
  if (hooked.defined()) hooked.remove_hook(hook);
}

void Subject::throw_inside(const MicroBatch& micro_batch, int layer, bool in_backward) {
  impl_->throw_at = layer % static_cast<int>(impl_->program.layers.size());
  impl_->throw_in_backward = in_backward;
  try {
    forward(micro_batch);
    backward();
  } catch (const IntendedError&) {
  }
  impl_->throw_at = -1;
  impl_->pending.reset();
  impl_->loss = at::Tensor();
  std::visit([](auto& optimizer) { optimizer.zero_grad(); }, impl_->optimizer);
}

void Subject::write_grad(size_t parameter, double value) {
  first_element(impl_->mp.params()[parameter].working.grad()).fill_(value);
}

StepResult Subject::finish_step() {
  StepResult result;
  impl_->mp.close_sum();
  const hs::GradSummary grads = impl_->mp.inspect_grads();
  result.any = grads.any();
  result.finite = grads.finite();
  result.first_bad = grads.first_bad();
  result.micro_batch = grads.micro_batch();
  result.norm = grads.norm();
  result.loss_scale = grads.loss_scale();
  for (const auto& param : impl_->mp.params()) {
    const at::Tensor& grad = param.working.grad();
    result.grads.push_back(grad.defined() ? grad.cpu().to(at::kDouble, false, true) : at::Tensor());
  }
  const auto multiplier = impl_->program.clip ? grads.clipped_to(kClip) : grads.unclipped();
  std::visit(
      [&](auto& optimizer) {
        const hs::StepReport report = optimizer.step(multiplier);
        result.stepped = report.stepped();
        result.reported_parameter = report.parameter();
        impl_->mp.advance(grads);
        optimizer.zero_grad();
      },
      impl_->optimizer);
  result.next_loss_scale = impl_->mp.loss_scale();
  return result;
}

}  // namespace usage
