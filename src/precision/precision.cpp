#include <halfstep/error.h>
#include <halfstep/precision.h>

#include "precision/name_pattern.h"

namespace halfstep {
namespace {

void check_storage(c10::ScalarType compute, WeightStorage storage, const std::string& where) {
  HALFSTEP_CHECK(
      compute != at::kFloat || storage == WeightStorage::Fp32, "Precision: compute is Float, but ", where,
      " asks for WeightStorage '", to_string(storage),
      "'; expected Fp32. Low-precision weights belong to Precision::bf16() and Precision::fp16().");
  HALFSTEP_CHECK(compute != at::kHalf || storage != WeightStorage::SplitMaster, "Precision: ", where,
                 " asks for a split master, which is the 16 bits below a BF16 weight; FP16 is not the upper "
                 "half of FP32. Use WeightStorage::Fp32Master.");
}

}  // namespace

Precision Precision::fp32() { return {}; }

Precision Precision::tf32() { return {.float32_products = Float32Products::Tf32}; }

Precision Precision::bf16(WeightStorage weights) { return {.compute = at::kBFloat16, .weights = weights}; }

Precision Precision::fp16(WeightStorage weights) {
  return {.compute = at::kHalf, .weights = weights, .loss_scaling = LossScaling{}};
}

Precision& Precision::keep(std::string pattern, WeightStorage storage) {
  weight_rules.push_back({std::move(pattern), storage});
  return *this;
}

WeightStorage Precision::storage_of(std::string_view parameter) const {
  for (auto rule = weight_rules.rbegin(); rule != weight_rules.rend(); ++rule)
    if (matches(rule->pattern, parameter)) return rule->storage;
  return weights;
}

void Precision::check() const {
  HALFSTEP_CHECK(compute == at::kFloat || compute == at::kBFloat16 || compute == at::kHalf,
                 "Precision: compute is ", compute, ", expected Float, BFloat16 or Half.");
  check_storage(compute, weights, "weights");
  for (const WeightRule& rule : weight_rules)
    check_storage(compute, rule.storage, detail::concat("the rule for '", rule.pattern, "'"));
  HALFSTEP_CHECK(compute == at::kFloat || float32_products == Float32Products::Full,
                 "Precision: float32_products is for FP32 training; with compute ", compute,
                 " set single operations through `ops`.");
  if (loss_scaling) loss_scaling->check();
  HALFSTEP_CHECK(!recipe || compute != at::kFloat,
                 "Precision: a recipe quantises the products of a low `compute`, which is Float. Use "
                 "Precision::with_recipe(), whose compute is BF16.");
  HALFSTEP_CHECK(recipe || layer_rules.empty(), "Precision: there are layer rules ('",
                 layer_rules.empty() ? "" : layer_rules.front().pattern,
                 "') but no recipe that they are for.");
  if (recipe) recipe->check();
}

std::string Precision::name() const {
  if (recipe) return recipe->name;
  if (compute == at::kBFloat16) return "BF16";
  if (compute == at::kHalf) return "FP16";
  return float32_products == Float32Products::Full   ? "FP32"
         : float32_products == Float32Products::Tf32 ? "TF32"
                                                     : "FP32 with BF16 products";
}

}  // namespace halfstep
