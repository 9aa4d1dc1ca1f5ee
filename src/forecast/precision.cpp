#include "forecast/precision.h"

#include <halfstep/error.h>

#include <array>
#include <utility>

#include "words/names.h"

namespace halfstep::forecast {
namespace {

struct Word {
  std::string_view name;
  Operands operands;
  double code_bytes;
};

// docs/recipes.md: E8M0 scales are one byte for 32 elements, E4M3 ones one for 16, those of blocks of 128 in
// FP32.
constexpr std::array<Word, 10> kWords = {{{"fp32", Operands::Fp32, 0},
                                          {"tf32", Operands::Tf32, 0},
                                          {"bf16", Operands::Bf16, 0},
                                          {"fp16", Operands::Fp16, 0},
                                          {"fp8-delayed", Operands::Fp8, 1},
                                          {"fp8-current", Operands::Fp8, 1},
                                          {"fp8-rowwise", Operands::Fp8, 1},
                                          {"fp8-block", Operands::Fp8, 1 + 4.0 / 128},
                                          {"mxfp8", Operands::Fp8, 1 + 1.0 / 32},
                                          {"nvfp4", Operands::Fp4, 0.5 + 1.0 / 16}}};

constexpr std::array<std::pair<std::string_view, WeightStorage>, 5> kWeights = {
    {{"split_master", WeightStorage::SplitMaster},
     {"fp32_master", WeightStorage::Fp32Master},
     {"fp32", WeightStorage::Fp32},
     {"kahan", WeightStorage::Kahan},
     {"stochastic", WeightStorage::Stochastic}}};
constexpr std::array<std::pair<std::string_view, MomentStorage>, 3> kMoments = {
    {{"fp32", MomentStorage::Fp32}, {"bf16", MomentStorage::Bf16}, {"8bit", MomentStorage::Blockwise8}}};

template <typename Value, size_t count>
Value value_of(const std::array<std::pair<std::string_view, Value>, count>& words, std::string_view word,
               const char* key) {
  std::string known;
  for (const auto& [name, value] : words) {
    if (name == word) return value;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  throw Error(detail::concat(key, " is ", in_quotes(word), ", expected one of ", known, "."));
}

}  // namespace

int PrecisionPlan::master_bytes() const {
  switch (weights) {
    case WeightStorage::Fp32Master:
      return 4;
    case WeightStorage::SplitMaster:
    case WeightStorage::Kahan:
      return 2;
    case WeightStorage::Fp32:
    case WeightStorage::Stochastic:
    case WeightStorage::Nearest:
      return 0;
  }
  HALFSTEP_BUG("no such storage");
}

double PrecisionPlan::moment_bytes() const {
  constexpr double kScale = 4.0 / static_cast<double>(kMomentBlockElements);
  return 2 * (moments == MomentStorage::Fp32 ? 4 : moments == MomentStorage::Bf16 ? 2 : 1 + kScale);
}

PrecisionPlan precision_plan(std::string_view compute, const std::optional<std::string>& weights,
                             const std::optional<std::string>& moments) {
  std::string known;
  for (const Word& word : kWords) {
    known += (known.empty() ? "" : ", ") + std::string(word.name);
    if (word.name != compute) continue;
    PrecisionPlan plan{
        .name = std::string(word.name), .operands = word.operands, .code_bytes = word.code_bytes};
    // As Precision::bf16() and the others have it (docs/configuration.md, precision.weights).
    if (!plan.is_full())
      plan.weights = word.operands == Operands::Fp16 ? WeightStorage::Fp32Master : WeightStorage::SplitMaster;
    if (weights) plan.weights = value_of(kWeights, *weights, "precision.weights");
    if (moments) plan.moments = value_of(kMoments, *moments, "precision.moments");
    HALFSTEP_CHECK(!plan.is_full() || plan.weights == WeightStorage::Fp32, "precision ", compute,
                   " keeps FP32 weights, not ", in_quotes(weights.value_or("")), ".");
    HALFSTEP_CHECK(word.operands != Operands::Fp16 || plan.weights != WeightStorage::SplitMaster,
                   "precision fp16 has no split master, which is the 16 bits below a BF16 weight: "
                   "fp32_master.");
    return plan;
  }
  throw Error(detail::concat("the precision is ", in_quotes(compute), ", expected one of ", known, "."));
}

}  // namespace halfstep::forecast
