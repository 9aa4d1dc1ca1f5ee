// What a precision means for bytes and rates.
#pragma once

#include <halfstep/storage.h>

#include <optional>
#include <string>
#include <string_view>

namespace halfstep::forecast {

/// What the operands of a matrix product are.
enum class Operands { Fp32, Tf32, Bf16, Fp16, Fp8, Fp4 };

/// One word of the configuration's precision.compute, and how weights and moments are kept.
struct PrecisionPlan {
  std::string name{};                  ///< "mxfp8"
  Operands operands = Operands::Fp32;  ///< of the linear layers of blocks
  /// Of an element of the codes that a recipe keeps of each input, its scales included; 0: no recipe.
  double code_bytes = 0;
  WeightStorage weights = WeightStorage::Fp32;
  MomentStorage moments = MomentStorage::Fp32;

  bool has_recipe() const { return code_bytes > 0; }
  /// Whether activations are FP32.
  bool is_full() const { return operands == Operands::Fp32 || operands == Operands::Tf32; }
  /// Operands of attention and of the head, which follow no recipe.
  Operands outer_operands() const { return has_recipe() ? Operands::Bf16 : operands; }
  int activation_bytes() const { return is_full() ? 4 : 2; }
  int working_bytes() const { return weights == WeightStorage::Fp32 ? 4 : 2; }
  int master_bytes() const;
  double moment_bytes() const;  ///< of both moments of AdamW
};

/// By the words of the configuration: precision.compute, and precision.weights and precision.moments where
/// they are given. An Error for words that are none, or do not go together.
PrecisionPlan precision_plan(std::string_view compute, const std::optional<std::string>& weights = {},
                             const std::optional<std::string>& moments = {});

}  // namespace halfstep::forecast
