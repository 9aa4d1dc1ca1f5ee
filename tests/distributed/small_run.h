// One small training run, the same in every process, for comparing numbers of ranks.
#pragma once

#include <halfstep/train_step.h>
#include <torch/torch.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/small_models.h"

namespace halfstep::testing {

inline constexpr int64_t kBatches = 24;  // of a step, on all ranks together
inline constexpr int64_t kVocabulary = 64, kLength = 16;

inline std::string hash_of(const std::vector<const StateDict*>& states) {
  uint64_t hash = 1469598103934665603u;
  const auto take = [&](const void* bytes, size_t count) {
    for (size_t i = 0; i < count; ++i)
      hash = (hash ^ static_cast<const unsigned char*>(bytes)[i]) * 1099511628211u;
  };
  for (const StateDict* state : states)
    for (const auto& [name, value] : *state) {
      take(name.data(), name.size());
      if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
        const at::Tensor dense = tensor->contiguous();
        take(dense.const_data_ptr(), dense.nbytes());
      } else if (const auto* number = std::get_if<int64_t>(&value)) {
        take(number, sizeof *number);
      } else if (const auto* real = std::get_if<double>(&value)) {
        take(real, sizeof *real);
      }
    }
  std::ostringstream text;
  text << std::hex << hash;
  return text.str();
}

inline Precision precision_called(const std::string& name) {
  if (name == "fp32") return Precision::fp32();
  if (name == "bf16") return Precision::bf16();
  if (name == "fp16") {
    Precision precision = Precision::fp16();
    precision.loss_scaling->initial = 0x1p24;  // overflows at first
    precision.loss_scaling->growth_interval = 7;
    return precision;
  }
  if (name == "fp8-delayed") return Precision::fp8_delayed();
  if (name == "mxfp8") return Precision::mxfp8();
  throw Error("no precision " + name);
}

inline Transformer made(int64_t seed) {
  torch::manual_seed(seed);
  return Transformer(kVocabulary, 32, 2, 3);
}

/// The same on every rank, whoever asks for it.
inline std::pair<at::Tensor, at::Tensor> batch(int64_t step, int64_t number) {
  torch::manual_seed(1'000'000 + step * 1000 + number);
  const at::Tensor ids = torch::randint(kVocabulary, {2, kLength});
  return {ids, ids.roll(-1, 1)};
}

inline MixedPrecisionOptions options_for(const Ranks& ranks) {
  return {.autocast = {.allow_emulated = true}, .ranks = ranks};
}

/// The full form takes 50 steps and all numbers of ranks: HALFSTEP_STEPS=50 ranks_test.
inline const char* full_steps() { return std::getenv("HALFSTEP_STEPS"); }

inline Sharding sharding_called(const std::string& name) {
  if (name == "none") return Sharding::None;
  if (name == "states") return Sharding::States;
  if (name == "gradients") return Sharding::Gradients;
  if (name == "weights") return Sharding::Weights;
  throw Error("no sharding " + name);
}

}  // namespace halfstep::testing
