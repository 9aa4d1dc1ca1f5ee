// FP8, MXFP8 and NVFP4 recipes: how each matrix product of a linear layer is quantised. Plain values.
#pragma once

#include <halfstep/config.h>
#include <halfstep/formats.h>

#include <cstdint>
#include <optional>
#include <string>

namespace halfstep {

/// How a scale follows from the largest magnitude (amax) of the values that share it.
enum class ScaleRule : std::uint8_t {
  Fp32,        ///< max / amax, in FP32
  PowerOfTwo,  ///< the largest power of two that is not above it
  E8m0Floor,   ///< OCP MX: the power of two that puts amax into the format's highest binade; may saturate
  E8m0Ceil,    ///< the smallest power of two for which nothing saturates (elsewhere "RCEIL")
  Unscaled,    ///< 1: what the format does by itself, for studies
  E4m3,        ///< NVFP4: amax / 6 as E4M3, in units of one FP32 scale for the tensor
};

/// How one operand of a product becomes codes.
struct OperandRule {
  Format format = Format::E4M3;
  ScaleRule scale = ScaleRule::Fp32;
  /// How many elements share a scale: along the dimension that the product sums over, and across it. 0: all.
  std::int64_t block_along = 0;
  std::int64_t block_across = 0;
  /// Round up with the probability of what is cut off. For gradients: not in `forward`, which must compute
  /// the same again.
  bool stochastic = false;
  /// Multiply groups of 16 elements along the sum by a random orthogonal matrix first. Both operands of a
  /// product have it or none: it cancels, and outliers are spread over their group.
  bool hadamard = false;

  bool operator==(const OperandRule&) const = default;
};

/// One of the three products of a linear layer. Where it is not quantised it runs in the compute type.
struct ProductRule {
  OperandRule left{};
  OperandRule right{};
  bool quantised = true;

  bool operator==(const ProductRule&) const = default;
};

/// Scales from the amax of earlier steps, so that a tensor is read once.
struct DelayedScaling {
  /// Which amax of the history makes the scale.
  enum class Take : std::uint8_t { Max, MostRecent };
  std::int64_t history = 1024;  ///< steps
  Take take = Take::Max;
  int margin = 0;  ///< the scale is divided by 2^margin

  bool operator==(const DelayedScaling&) const = default;
};

/// A whole recipe. Take one of the functions and change what you must:
///
///     auto recipe = halfstep::Recipe::fp8_rowwise();
///     recipe.weight_grad.quantised = false;
///
/// docs/recipes.md says what each costs and when to take it.
struct HALFSTEP_API Recipe {
  std::string name{};
  ProductRule forward{};      ///< input x weight
  ProductRule input_grad{};   ///< output gradient x weight
  ProductRule weight_grad{};  ///< output gradient x input
  std::optional<DelayedScaling> delayed{};
  std::uint64_t seed = 0;  ///< of stochastic rounding and of the Hadamard signs

  /// One scale for each tensor, from the amax of the last 1,024 steps; E4M3 forward, E5M2 gradients.
  static Recipe fp8_delayed();
  /// One scale for each tensor, from its own amax.
  static Recipe fp8_current();
  /// One power-of-two scale for each row that a product sums over; E4M3 everywhere.
  static Recipe fp8_rowwise();
  /// Power-of-two scales for 1 x 128 activations and gradients and 128 x 128 weights; E4M3.
  static Recipe fp8_block();
  /// OCP MX: E8M0 scales for blocks of 32; E4M3.
  static Recipe mxfp8(ScaleRule scale = ScaleRule::E8m0Ceil);
  /// E2M1 with E4M3 scales for blocks of 16 (weights 16 x 16) and one FP32 scale for each tensor; gradients
  /// are rounded stochastically, and the weight gradient's operands pass a random Hadamard transform.
  static Recipe nvfp4();

  /// An Error that names what does not go together.
  void check() const;

  bool operator==(const Recipe&) const = default;
};

/// Whether linear layers follow the recipe, by the names of their weights.
struct LayerRule {
  std::string pattern;  ///< the weight's whole name; * stands for any characters, ? for one
  bool quantised = false;
};

/// A weight of two dimensions, and what the recipe makes of the products that it is in.
struct LayerPlan {
  std::string name;
  std::int64_t rows = 0, columns = 0;
  bool quantised = false;
  std::string reason{};  ///< the rule that decided: "follows the recipe", "the first linear layer", ...
};

/// What is known of a weight before anything runs.
struct PlannedWeight {
  std::string name;
  std::int64_t rows = 0, columns = 0;
  bool is_embedding = false;
};

}  // namespace halfstep
