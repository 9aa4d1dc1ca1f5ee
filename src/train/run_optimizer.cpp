#include "train/run_optimizer.h"

#include "train/choices.h"

namespace halfstep::train {
namespace {

template <typename Options>
std::vector<ParamGroup<Options>> groups_of(const std::vector<Param>& params, const Options& options) {
  Options without_decay = options;
  without_decay.weight_decay = 0;
  ParamGroup<Options> matrices{.params = {}, .options = options};
  ParamGroup<Options> vectors{.params = {}, .options = without_decay};
  for (const Param& param : params) (param.working.dim() >= 2 ? matrices : vectors).params.push_back(param);
  std::vector<ParamGroup<Options>> groups;
  for (auto* group : {&matrices, &vectors})
    if (!group->params.empty()) groups.push_back(std::move(*group));
  return groups;
}

std::variant<AdamW, SGD> make(const std::vector<Param>& params, const RunConfig& config) {
  const auto seed = static_cast<uint64_t>(config.train.seed);
  if (config.optimizer.kind == "adamw") return AdamW(groups_of(params, adamw_of(config)), seed);
  return SGD(groups_of(params, sgd_of(config)), seed);
}

}  // namespace

RunOptimizer::RunOptimizer(const std::vector<Param>& params, const RunConfig& config)
    : optimizer_(make(params, config)) {}

StepReport RunOptimizer::step(const GradMultiplier& multiplier) {
  return std::visit([&](auto& optimizer) { return optimizer.step(multiplier); }, optimizer_);
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
  std::visit([&](auto& optimizer) { optimizer.load_state_dict(saved); }, optimizer_);
}

}  // namespace halfstep::train
