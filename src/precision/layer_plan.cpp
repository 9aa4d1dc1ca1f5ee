#include <halfstep/error.h>
#include <halfstep/precision.h>

#include <algorithm>

#include "precision/name_pattern.h"

namespace halfstep {
namespace {

constexpr std::int64_t kDivisor = 16;  // what the matrix units of accelerators ask of every dimension

/// A weight that no linear layer has.
const char* other_use(const PlannedWeight& weight) {
  if (weight.is_embedding) return "an embedding";
  const bool is_recurrent = matches("*weight_ih*", weight.name) || matches("*weight_hh*", weight.name) ||
                            matches("*weight_hr*", weight.name);
  return is_recurrent ? "the weight of a recurrent layer" : nullptr;
}

}  // namespace

Precision& Precision::keep_high(std::string pattern) {
  layer_rules.push_back({std::move(pattern), /*quantised=*/false});
  return *this;
}

Precision& Precision::quantise(std::string pattern) {
  layer_rules.push_back({std::move(pattern), /*quantised=*/true});
  return *this;
}

std::vector<LayerPlan> Precision::plan_layers(const std::vector<PlannedWeight>& weights) const {
  const auto is_linear = [](const PlannedWeight& weight) { return other_use(weight) == nullptr; };
  const auto first = std::find_if(weights.begin(), weights.end(), is_linear);
  const auto last = std::find_if(weights.rbegin(), weights.rend(), is_linear);
  std::vector<LayerPlan> plan;
  for (const PlannedWeight& weight : weights) {
    const auto rule = std::find_if(layer_rules.begin(), layer_rules.end(),
                                   [&](const LayerRule& each) { return matches(each.pattern, weight.name); });
    LayerPlan layer{.name = weight.name, .rows = weight.rows, .columns = weight.columns};
    if (!recipe) {
      layer.reason = "there is no recipe";
    } else if (rule != layer_rules.end()) {
      layer.quantised = rule->quantised;
      layer.reason = detail::concat("the rule '", rule->pattern, "'");
    } else if (const char* use = other_use(weight)) {
      layer.reason = use;
    } else if (weight.name == first->name) {
      layer.reason = "the first linear layer";
    } else if (weight.name == last->name) {
      layer.reason = "the last linear layer";
    } else if (weight.rows % kDivisor != 0 || weight.columns % kDivisor != 0) {
      layer.reason = detail::concat(weight.rows % kDivisor != 0 ? weight.rows : weight.columns,
                                    " is not divisible by ", kDivisor);
    } else {
      layer.quantised = true;
      layer.reason = "follows the recipe";
    }
    plan.push_back(std::move(layer));
  }
  return plan;
}

Precision Precision::with_recipe(Recipe recipe, WeightStorage weights) {
  Precision precision = bf16(weights);
  precision.recipe = std::move(recipe);
  return precision;
}

Precision Precision::fp8_delayed(WeightStorage weights) {
  return with_recipe(Recipe::fp8_delayed(), weights);
}
Precision Precision::fp8_current(WeightStorage weights) {
  return with_recipe(Recipe::fp8_current(), weights);
}
Precision Precision::fp8_rowwise(WeightStorage weights) {
  return with_recipe(Recipe::fp8_rowwise(), weights);
}
Precision Precision::fp8_block(WeightStorage weights) { return with_recipe(Recipe::fp8_block(), weights); }
Precision Precision::mxfp8(WeightStorage weights) { return with_recipe(Recipe::mxfp8(), weights); }
Precision Precision::nvfp4(WeightStorage weights) { return with_recipe(Recipe::nvfp4(), weights); }

}  // namespace halfstep
