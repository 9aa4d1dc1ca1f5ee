// What a run in shadow mode found: how far each layer's products in other precisions are from FP32's, and
// which layers to keep out of a recipe. docs/rehearse.md tells how. Knows no Torch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "report/run_report.h"

namespace halfstep {

/// One layer in one precision, over all steps that were looked at: roots of mean squares.
struct ShadowCell {
  double output_error = 0.0, input_grad_error = 0.0, weight_grad_error = 0.0;
  /// What the errors of the output and of the input gradient do to the step's loss, in its unit, if their
  /// elements err independently: what layers are ranked by.
  double effect = 0.0;
  bool keep_high = false;  ///< suggested
  std::string why{};       ///< of the suggestion, one sentence

  double worst_error() const;
};

struct ShadowLayer {
  std::string name{};  ///< of its weight
  std::vector<std::optional<ShadowCell>>
      cells{};  ///< by precision; none where the recipe keeps it high by itself
};

struct ShadowFindings {
  int64_t steps = 0, looks = 0;
  std::vector<std::string> precisions{};
  std::vector<ShadowLayer> layers{};    ///< the one that suffers most first
  std::vector<std::string> unsuited{};  ///< by precision: why it does not suit the model; empty if it may

  /// Names of the weights that are to be kept out of a recipe.
  std::vector<std::string> keep_high(size_t precision) const;
};

/// Of a run whose log has `shadow` records.
[[nodiscard]] ShadowFindings shadow_findings(const RunHistory& run);

/// One page with everything in it. `files` has the configuration written for each precision.
[[nodiscard]] std::string shadow_html(const std::string& name, const RunHistory& run,
                                      const ShadowFindings& findings, const std::vector<std::string>& files);

}  // namespace halfstep
