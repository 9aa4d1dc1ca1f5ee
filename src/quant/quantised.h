// Matrices as codes, and the products of two of them. Exported for tests and benchmarks.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/recipe.h>

#include <optional>

#include "kernels/quantise.h"

namespace halfstep {

/// A matrix as codes of 8 or 4 bits, one to a byte. Its value is code * scale of its block * outer_scale.
struct Quantised {
  at::Tensor codes;  // Byte on the CPU, Float8 elsewhere; [rows, columns]
  at::Tensor
      scales;  // Float or Byte, [bands of blocks, blocks of a band]; undefined where outer_scale is all
  OperandRule rule;
  bool sums_over_rows;  // the product sums over rows rather than over columns
  float outer_scale;
};

inline bool has_one_scale(const OperandRule& rule) { return rule.block_along == 0 && rule.block_across == 0; }

/// Which random bits a stochastic cast takes.
struct CastKey {
  std::uint64_t seed;
  std::uint32_t tensor;
  std::uint32_t cast;
};

struct QuantiseRequest {
  OperandRule rule;
  bool sums_over_rows = false;
  /// The largest magnitude to make the scale from, where it is known from earlier steps; the tensor's own
  /// otherwise. For a rule with one scale only.
  std::optional<float> known_amax{};
  int margin = 0;    // the scale is divided by 2^margin
  CastKey random{};  // for stochastic rounding, and for the signs of the Hadamard transform
};

/// `matrix` is FP32, BF16 or FP16, of two dimensions. `counts` gets its largest magnitude, too.
HALFSTEP_API Quantised quantised(const at::Tensor& matrix, const QuantiseRequest& request,
                                 QuantiseCounts& counts);

/// Groups of 16 along the sum, multiplied by an orthogonal matrix with random signs: FP32. What is left of
/// the last group stays as it is.
HALFSTEP_API at::Tensor hadamard(const at::Tensor& matrix, bool over_rows, std::uint64_t seed);

/// left x right, the sums in FP32. `left` is [n, sum], or [sum, n] where it sums over rows; `right` alike.
/// Each decoded value is exact, and each element of the result is multiplied by the scales that vary across
/// the sum, has its `bias` added in FP32, and is rounded once, to `output`.
HALFSTEP_API at::Tensor product(const Quantised& left, const Quantised& right, const at::Tensor& bias,
                                at::ScalarType output);

/// The FP32 values of a matrix that was quantised, each rounded once at most: for reading and for tests.
HALFSTEP_API at::Tensor decoded(const Quantised& matrix);

}  // namespace halfstep
