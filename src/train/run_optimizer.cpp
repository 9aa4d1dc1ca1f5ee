#include "train/run_optimizer.h"

#include "train/choices.h"

namespace halfstep::train {
namespace {

template <typename Options>
Options options_of(const RunConfig& config) {
  if constexpr (std::is_same_v<Options, AdamWOptions>)
    return adamw_of(config);
  else
    return sgd_of(config);
}

bool is_matrix(const Param& param) { return param.working.dim() >= 2; }

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

double RunOptimizer::next_lr() const {
  return std::visit(
      [](const auto& optimizer) {
        return optimizer.options().lr * optimizer.options().schedule.factor(optimizer.steps());
      },
      optimizer_);
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
