// Linear layers of a recipe in FP64: operands are rounded to the recipe's codes, decoded and multiplied. Its
// tables of formats and blocks are its own.
#pragma once

#include <torch/torch.h>

#include <map>
#include <optional>
#include <utility>

#include "usage/program.h"

namespace usage {

class QuantOracle {
 public:
  QuantOracle(Recipe recipe, at::Generator random) : recipe_(recipe), random_(std::move(random)) {}

  /// One layer, forward and, by autograd, backward. `noted`: what is seen counts for the scales of later
  /// steps. `amax_off` is how far those of earlier steps may be off, relative to them.
  at::Tensor linear(int layer, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                    bool noted, double amax_off);
  /// What was noted since the last one belongs to the past now, unless the step was skipped.
  void end_step(bool skipped);

  enum Role { Input, Weight, Grad };
  /// The decoded values of an operand whose rows lie along the sum.
  at::Tensor rounded(int layer, Role role, const at::Tensor& values, bool noted, double amax_off);
  /// Both operands of the weight gradient, turned by one orthogonal matrix where the recipe asks for it.
  void turn(at::Tensor& left, at::Tensor& right);

 private:
  Recipe recipe_;
  at::Generator random_;
  std::map<std::pair<int, Role>, double> past_, this_step_;  // largest magnitudes
};

}  // namespace usage
