#include "train/choices.h"

#include <halfstep/error.h>

#include <array>
#include <utility>

namespace halfstep::train {
namespace {

template <typename Value, size_t count>
using Words = std::array<std::pair<std::string_view, Value>, count>;

constexpr Words<WeightStorage, 5> kWeights = {{{"split_master", WeightStorage::SplitMaster},
                                               {"fp32_master", WeightStorage::Fp32Master},
                                               {"fp32", WeightStorage::Fp32},
                                               {"kahan", WeightStorage::Kahan},
                                               {"stochastic", WeightStorage::Stochastic}}};
constexpr Words<MomentStorage, 3> kMoments = {
    {{"fp32", MomentStorage::Fp32}, {"bf16", MomentStorage::Bf16}, {"8bit", MomentStorage::Blockwise8}}};
constexpr Words<OpRule, 5> kRules = {{{"low", OpRule::Low},
                                      {"fp32", OpRule::Fp32},
                                      {"promote", OpRule::Promote},
                                      {"as_is", OpRule::AsIs},
                                      {"stock", OpRule::Stock}}};

constexpr Words<Recipe (*)(), 6> kRecipes = {{{"fp8-delayed", Recipe::fp8_delayed},
                                              {"fp8-current", Recipe::fp8_current},
                                              {"fp8-rowwise", Recipe::fp8_rowwise},
                                              {"fp8-block", Recipe::fp8_block},
                                              {"mxfp8", [] { return Recipe::mxfp8(); }},
                                              {"nvfp4", Recipe::nvfp4}}};

/// resolve_config() lets no other word through.
template <typename Value, size_t count>
Value value_of(const Words<Value, count>& words, std::string_view word) {
  for (const auto& [name, value] : words)
    if (name == word) return value;
  HALFSTEP_BUG("no such word in the configuration: ", word);
}

template <typename Value>
void take(Value& field, const std::optional<Value>& given) {
  if (given) field = *given;
}

LossScaling loss_scaling_of(const RunConfig::LossScale& given) {
  LossScaling scaling;
  take(scaling.initial, given.initial);
  take(scaling.growth_factor, given.growth_factor);
  take(scaling.backoff_factor, given.backoff_factor);
  take(scaling.growth_interval, given.growth_interval);
  take(scaling.hysteresis, given.hysteresis);
  take(scaling.floor, given.floor);
  take(scaling.cap, given.cap);
  take(scaling.max_consecutive_skips, given.max_consecutive_skips);
  return scaling;
}

/// What every optimizer has.
template <typename Options>
Options shared_options(const RunConfig& config) {
  Options options{.lr = config.optimizer.lr, .schedule = schedule_of(config)};
  take(options.weight_decay, config.optimizer.weight_decay);
  options.moments = value_of(kMoments, config.precision.moments);
  return options;
}

}  // namespace

Precision precision_of(const RunConfig& config) {
  const RunConfig::Precision& given = config.precision;
  if (given.compute == "fp32") return Precision::fp32();
  if (given.compute == "tf32") return Precision::tf32();
  Precision precision = given.compute == "bf16" ? Precision::bf16()
                        : given.compute == "fp16"
                            ? Precision::fp16()
                            : Precision::with_recipe(value_of(kRecipes, given.compute)());
  for (const std::string& pattern : given.keep_high) precision.keep_high(pattern);
  if (precision.recipe) precision.recipe->seed = static_cast<uint64_t>(config.train.seed);
  if (given.weights) precision.weights = value_of(kWeights, *given.weights);
  if (given.compute == "fp16") precision.loss_scaling = loss_scaling_of(given.loss_scale);
  for (const auto& [op, rule] : given.ops) precision.ops.set(op, value_of(kRules, rule));
  precision.check();
  return precision;
}

Schedule schedule_of(const RunConfig& config) {
  const RunConfig::Optimizer& given = config.optimizer;
  const auto shape = schedule_shape(given.schedule);
  if (!shape) HALFSTEP_BUG("no such schedule: ", given.schedule);
  return {.shape = *shape,
          .spans = {.warmup_steps = given.warmup_steps,
                    .total_steps = config.train.steps,
                    .decay_steps = given.decay_steps.value_or(0),
                    .final_fraction = given.final_lr.value_or(0) / given.lr}};
}

AdamWOptions adamw_of(const RunConfig& config) {
  auto options = shared_options<AdamWOptions>(config);
  take(options.betas[0], config.optimizer.beta1);
  take(options.betas[1], config.optimizer.beta2);
  take(options.eps, config.optimizer.eps);
  return options;
}

SgdOptions sgd_of(const RunConfig& config) {
  auto options = shared_options<SgdOptions>(config);
  take(options.momentum, config.optimizer.momentum);
  take(options.dampening, config.optimizer.dampening);
  take(options.nesterov, config.optimizer.nesterov);
  return options;
}

namespace {

template <typename Options>
Options options_of(const RunConfig& config) {
  if constexpr (std::is_same_v<Options, AdamWOptions>)
    return adamw_of(config);
  else
    return sgd_of(config);
}

/// As the model has it: a rank's part of one is a run of numbers.
bool is_matrix(const Param& param) {
  return param.is_part() ? param.whole_sizes.size() >= 2 : param.working.dim() >= 2;
}

template <typename Options>
std::vector<ParamGroup<Options>> groups_of(const std::vector<Param>& params, const RunConfig& config) {
  std::vector<ParamGroup<Options>> groups;
  for (const bool matrices : {true, false}) {
    ParamGroup<Options> group{.params = {}, .options = options_of<Options>(config)};
    if (!matrices) group.options.weight_decay = 0;
    for (const Param& param : params)
      if (is_matrix(param) == matrices) group.params.push_back(param);
    if (!group.params.empty()) groups.push_back(std::move(group));
  }
  return groups;
}

std::variant<AdamW, SGD> make(const std::vector<Param>& params, const RunConfig& config) {
  const auto seed = static_cast<uint64_t>(config.train.seed);
  if (config.optimizer.kind == "adamw") return AdamW(groups_of<AdamWOptions>(params, config), seed);
  return SGD(groups_of<SgdOptions>(params, config), seed);
}

}  // namespace

RunOptimizer::RunOptimizer(const std::vector<Param>& params, const RunConfig& config)
    : params_(params), config_(config), optimizer_(make(params, config)) {}

StepReport RunOptimizer::step(const GradMultiplier& multiplier, StepOptions options) {
  return std::visit([&](auto& optimizer) { return optimizer.step(multiplier, options); }, optimizer_);
}

void RunOptimizer::zero_grad() {
  std::visit([](auto& optimizer) { optimizer.zero_grad(); }, optimizer_);
}

double RunOptimizer::lr_at(int64_t steps) const {
  return std::visit(
      [&](const auto& optimizer) {
        return optimizer.options().lr * optimizer.options().schedule.factor(steps);
      },
      optimizer_);
}

int64_t RunOptimizer::steps() const {
  return std::visit([](const auto& optimizer) { return optimizer.steps(); }, optimizer_);
}

StateDict RunOptimizer::state_dict() const {
  return std::visit([](const auto& optimizer) { return optimizer.state_dict(); }, optimizer_);
}

void RunOptimizer::load_state_dict(const StateDict& saved) {
  std::visit(
      [&](auto& optimizer) {
        optimizer.load_state_dict(saved);
        using Options = std::decay_t<decltype(optimizer.options())>;
        const auto groups = groups_of<Options>(params_, config_);
        for (size_t i = 0; i < groups.size(); ++i) optimizer.set_options(groups[i].options, i);
      },
      optimizer_);
}

}  // namespace halfstep::train
