#include "scaling/schedule.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>

namespace halfstep::testing {
namespace {

using Random = std::mt19937_64;

template <typename T>
T one_of(Random& random, std::initializer_list<T> choices) {
  return choices.begin()[random() % choices.size()];
}

bool chance(Random& random, int percent) { return static_cast<int>(random() % 100) < percent; }

// A number that every type of the schedules can be rounded from: 24 random bits, an exponent from -20 to 20.
double finite_value(Random& random) {
  if (chance(random, 5)) return 0.0;
  const double mantissa = static_cast<double>(random() % (1 << 24)) / (1 << 24) - 0.5;
  return std::ldexp(mantissa, static_cast<int>(random() % 41) - 20);
}

std::vector<double> finite_values(Random& random, size_t count) {
  std::vector<double> values(count);
  for (auto& value : values) value = finite_value(random);
  return values;
}

void spoil(Random& random, std::vector<double>& values) {
  constexpr double inf = std::numeric_limits<double>::infinity();
  if (!values.empty())
    values[random() % values.size()] = one_of(random, {inf, -inf, std::numeric_limits<double>::quiet_NaN()});
}

GradSpec random_grad(Random& random, size_t elements, bool sparse, int spoil_percent) {
  GradSpec grad;
  if (sparse) {
    grad.rows.emplace(1 + random() % 3);
    for (auto& row : *grad.rows) row = static_cast<int64_t>(random() % elements);
    grad.values = finite_values(random, grad.rows->size());
  } else {
    grad.values = finite_values(random, elements);
  }
  if (chance(random, spoil_percent)) spoil(random, grad.values);
  return grad;
}

OptimizerStep random_work(Random& random, const OptimizerSpec& optimizer, int spoil_percent) {
  OptimizerStep work;
  work.unscale = chance(random, 30);
  work.step = work.unscale ? chance(random, 85) : chance(random, 90);
  for (const auto& param : optimizer.params) {
    const bool may_be_sparse = param.dtype == "float" && !param.values.empty() && optimizer.momentum == 0 &&
                               optimizer.weight_decay == 0;  // SGD takes a sparse gradient only without them
    work.grads.emplace_back();
    if (chance(random, 80))
      work.grads.back() =
          random_grad(random, param.values.size(), may_be_sparse && chance(random, 40), spoil_percent);
  }
  const bool has_grad =
      std::any_of(work.grads.begin(), work.grads.end(), [](const auto& g) { return g.has_value(); });
  if (!has_grad) work.grads[0] = random_grad(random, optimizer.params[0].values.size(), false, spoil_percent);
  return work;
}

OptimizerSpec random_optimizer(Random& random) {
  OptimizerSpec optimizer{one_of(random, {1.0, 0.1, 0.003}),
                          one_of(random, {0.0, 0.0, 0.9}),
                          one_of(random, {0.0, 0.0, 0.01}),
                          {}};
  const size_t param_count = 1 + random() % 3;
  for (size_t i = 0; i < param_count; ++i)
    optimizer.params.push_back({one_of<std::string>(random, {"float", "float", "bfloat16", "double"}),
                                finite_values(random, random() % 6)});  // zero elements included
  // LibTorch's C++ SGD multiplies its buffer through mul_.Scalar, which rounds 0.9 to BF16 first; Python's
  // goes through mul_.Tensor, which does not (2.13). That is a difference of the optimizers, not of the
  // scalers.
  const bool any_bf16 = std::any_of(optimizer.params.begin(), optimizer.params.end(),
                                    [](const auto& param) { return param.dtype == "bfloat16"; });
  if (any_bf16) optimizer.momentum = 0;
  return optimizer;
}

nlohmann::json bits_of_all(const std::vector<double>& values) {
  auto bits = nlohmann::json::array();
  for (const double value : values) bits.push_back(bits_of(value));
  return bits;
}

nlohmann::json to_json(const std::optional<GradSpec>& grad) {
  if (!grad) return nullptr;
  nlohmann::json json = {{"values", bits_of_all(grad->values)}};
  if (grad->rows) json["rows"] = *grad->rows;
  return json;
}

}  // namespace

uint64_t bits_of(double value) { return std::bit_cast<uint64_t>(value); }

Schedule random_schedule(uint64_t number) {
  Random random(number);
  Schedule schedule{one_of(random, {0x1p16, 0x1p8, 1000.1, 1.0, 0x1p-2, 0x1p30}),
                    one_of(random, {2.0, 1.5, 1.1, 4.0}),
                    one_of(random, {0.5, 0.25, 0.9, 0.1}),
                    one_of<int64_t>(random, {1, 2, 3, 5}),
                    {},
                    {}};
  const size_t optimizer_count = 1 + random() % 3, step_count = 6 + random() % 11;
  const int spoil_percent = one_of(random, {0, 5, 20, 60});
  for (size_t i = 0; i < optimizer_count; ++i) schedule.optimizers.push_back(random_optimizer(random));
  for (size_t s = 0; s < step_count; ++s) {
    ScheduleStep step{chance(random, 15), {}};
    for (const auto& optimizer : schedule.optimizers)
      step.optimizers.push_back(random_work(random, optimizer, spoil_percent));
    const bool any = std::any_of(step.optimizers.begin(), step.optimizers.end(),
                                 [](const auto& work) { return work.unscale || work.step; });
    if (!any) step.optimizers[0].step = true;
    schedule.steps.push_back(std::move(step));
  }
  return schedule;
}

nlohmann::json to_json(const Schedule& schedule) {
  nlohmann::json json;
  json["options"] = {{"initial", schedule.initial},
                     {"growth_factor", schedule.growth_factor},
                     {"backoff_factor", schedule.backoff_factor},
                     {"growth_interval", schedule.growth_interval}};
  for (const auto& optimizer : schedule.optimizers) {
    auto params = nlohmann::json::array();
    for (const auto& param : optimizer.params)
      params.push_back({{"dtype", param.dtype}, {"values", bits_of_all(param.values)}});
    json["optimizers"].push_back({{"lr", optimizer.lr},
                                  {"momentum", optimizer.momentum},
                                  {"weight_decay", optimizer.weight_decay},
                                  {"params", params}});
  }
  for (const auto& step : schedule.steps) {
    auto optimizers = nlohmann::json::array();
    for (const auto& work : step.optimizers) {
      auto grads = nlohmann::json::array();
      for (const auto& grad : work.grads) grads.push_back(to_json(grad));
      optimizers.push_back({{"unscale", work.unscale}, {"step", work.step}, {"grads", grads}});
    }
    json["steps"].push_back({{"restart", step.restart}, {"optimizers", optimizers}});
  }
  return json;
}

}  // namespace halfstep::testing
