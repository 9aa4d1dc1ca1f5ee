// The precision of a training run: one plain value.
#pragma once

#include <c10/core/ScalarType.h>
#include <halfstep/config.h>
#include <halfstep/op_policy.h>
#include <halfstep/recipe.h>
#include <halfstep/scaling.h>
#include <halfstep/storage.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep {

/// What may happen inside a matrix product of FP32 tensors.
enum class Float32Products {
  Full,  ///< FP32
  Tf32,  ///< inputs rounded to TF32 where the hardware has it; elsewhere FP32 (`halfstep env` says which)
  Bf16,  ///< inputs rounded to BF16, sums in FP32: 1.7 to 2.2 times as fast with AMX, error about 2^-9
};

/// How the weights of some parameters are kept, by their names.
struct WeightRule {
  std::string pattern;  ///< the parameter's whole name; * stands for any characters, ? for one
  WeightStorage storage;
};

/// In which precision a model is trained. Take one and change what you must:
///
///     auto precision = halfstep::Precision::bf16();
///     precision.ops.set("softmax", halfstep::OpRule::Low);
///     precision.keep("*norm*", halfstep::WeightStorage::Fp32);
///
/// With a recipe, linear layers compute from FP8 or FP4 operands, and everything else in BF16:
///
///     auto precision = halfstep::Precision::mxfp8();
///     precision.keep_high("*.mlp.down.weight");
///
/// A plain value; MixedPrecision carries it out.
struct HALFSTEP_API Precision {
  /// What matrix products take in: at::kFloat, at::kBFloat16 or at::kHalf.
  c10::ScalarType compute = at::kFloat;

  /// How weights are kept; bytes per parameter with gradients and FP32 moments, measured in docs/memory.md:
  /// SplitMaster 14, Fp32Master 16, Fp32 16. Fp32 with a low `compute` is torch.amp's way: the model keeps
  /// its FP32 parameters and every use of one casts it.
  WeightStorage weights = WeightStorage::Fp32;

  std::optional<LossScaling> loss_scaling{};  ///< only FP16 needs it
  OpPolicy ops = OpPolicy::standard();        ///< used when `compute` is low

  /// Used when `compute` is FP32. LibTorch has one such setting a process: it is set while a MixedPrecision
  /// with this value exists, for every thread and model, and put back afterwards.
  Float32Products float32_products = Float32Products::Full;

  /// Exceptions from `weights`; the last one that matches a parameter counts. With WeightStorage::Fp32 a
  /// parameter stays FP32, and operations in low precision cast it at each use. MixedPrecision refuses a rule
  /// that matches no parameter.
  std::vector<WeightRule> weight_rules{};

  /// How the products of linear layers are quantised; nothing: in `compute`.
  std::optional<Recipe> recipe{};

  /// Which layers follow the recipe; the first one that matches counts. Without a match the default keepers
  /// stay in `compute`: embeddings, the first and the last linear layer, and weights with a dimension that 16
  /// does not divide. MixedPrecision refuses a rule that matches no weight.
  std::vector<LayerRule> layer_rules{};

  /// Adds a layer rule: these stay in `compute`, or these follow the recipe whatever the default keepers say.
  Precision& keep_high(std::string pattern);
  Precision& quantise(std::string pattern);

  /// What the recipe does with each of a model's weights, in their order.
  std::vector<LayerPlan> plan_layers(const std::vector<PlannedWeight>& weights) const;

  /// Adds a rule.
  Precision& keep(std::string pattern, WeightStorage storage);

  /// How the parameter of this name is kept.
  WeightStorage storage_of(std::string_view parameter) const;

  /// Weights and products in FP32, or in FP32 with products in TF32; in BF16; in FP16, with a loss scale.
  static Precision fp32();
  static Precision tf32();
  static Precision bf16(WeightStorage weights = WeightStorage::SplitMaster);
  static Precision fp16(WeightStorage weights = WeightStorage::Fp32Master);
  /// BF16 with a recipe for linear layers; Recipe says what each is.
  static Precision fp8_delayed(WeightStorage weights = WeightStorage::SplitMaster);
  static Precision fp8_current(WeightStorage weights = WeightStorage::SplitMaster);
  static Precision fp8_rowwise(WeightStorage weights = WeightStorage::SplitMaster);
  static Precision fp8_block(WeightStorage weights = WeightStorage::SplitMaster);
  static Precision mxfp8(WeightStorage weights = WeightStorage::SplitMaster);
  static Precision nvfp4(WeightStorage weights = WeightStorage::SplitMaster);
  static Precision with_recipe(Recipe recipe, WeightStorage weights = WeightStorage::SplitMaster);

  /// Throws an Error that names what does not go together: a split master below FP16, for instance.
  void check() const;

  /// "FP32", "TF32", "BF16", "FP16", "FP32 with BF16 products", or the recipe's: "fp8-delayed".
  std::string name() const;
};

}  // namespace halfstep
