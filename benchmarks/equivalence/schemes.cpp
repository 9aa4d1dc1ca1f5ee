#include "schemes.h"

#include <halfstep/error.h>

namespace bench {

using halfstep::MomentStorage;
using halfstep::Precision;
using halfstep::WeightStorage;

const Study& storages() {
  static const Study study{
      .schemes =
          {
              {.name = "fp32", .role = Role::Reference},
              {.name = "fp32_one_ulp", .flaw = Flaw::OneUlp},
              {.name = kDefaultScheme, .precision = Precision::bf16()},
              {.name = "bf16_fp32_master", .precision = Precision::bf16(WeightStorage::Fp32Master)},
              {.name = "bf16_autocast", .precision = Precision::bf16(WeightStorage::Fp32)},
              {.name = "fp16", .precision = Precision::fp16()},
              {.name = "bf16_kahan", .precision = Precision::bf16(WeightStorage::Kahan)},
              {.name = "bf16_stochastic", .precision = Precision::bf16(WeightStorage::Stochastic)},
              {.name = "bf16_bf16_moments", .precision = Precision::bf16(), .moments = MomentStorage::Bf16},
              {.name = "bf16_8bit_moments",
               .precision = Precision::bf16(),
               .moments = MomentStorage::Blockwise8},
              {.name = kPureBf16Scheme,
               .role = Role::Control,
               .precision = Precision::bf16(WeightStorage::Nearest)},
              {.name = "fp16_unscaled_twice",
               .role = Role::Control,
               .precision = Precision::fp16(),
               .flaw = Flaw::UnscaledTwice},
          },
      .margin_percent = 0.25};
  return study;
}

namespace {

/// Every operand in FP8 as it is.
Precision unscaled(halfstep::Format grads) {
  halfstep::Recipe recipe = halfstep::Recipe::fp8_current();
  recipe.name = "fp8-unscaled";
  for (halfstep::ProductRule* product : {&recipe.forward, &recipe.input_grad, &recipe.weight_grad})
    for (halfstep::OperandRule* operand : {&product->left, &product->right})
      operand->scale = halfstep::ScaleRule::Unscaled;
  recipe.input_grad.left.format = recipe.weight_grad.left.format = grads;
  return Precision::with_recipe(recipe);
}

}  // namespace

const Study& recipes() {
  static const Study study{
      .schemes =
          {
              {.name = kDefaultScheme, .role = Role::Reference, .precision = Precision::bf16()},
              {.name = "fp8_delayed", .precision = Precision::fp8_delayed()},
              {.name = "fp8_current", .precision = Precision::fp8_current()},
              {.name = "fp8_rowwise", .precision = Precision::fp8_rowwise()},
              {.name = "fp8_block", .precision = Precision::fp8_block()},
              {.name = "mxfp8", .precision = Precision::mxfp8()},
              {.name = "nvfp4", .role = Role::Shown, .precision = Precision::nvfp4()},
              {.name = kUnscaledScheme, .role = Role::Control, .precision = unscaled(halfstep::Format::E5M2)},
              {.name = "e4m3_grads_unscaled",
               .role = Role::Control,
               .precision = unscaled(halfstep::Format::E4M3)},
          },
      .margin_percent = 0.5};
  return study;
}

const Scheme& scheme_named(const std::string& name) {
  for (const Study* study : {&storages(), &recipes()})
    for (const Scheme& scheme : study->schemes)
      if (scheme.name == name) return scheme;
  halfstep::detail::throw_error(halfstep::detail::concat("equivalence: no scheme is called '", name, "'"));
}

}  // namespace bench
