// Small runs that have one thing wrong with their precision each, and the same runs with the remedy.
#pragma once

#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

struct Patient : torch::nn::Module {
  Patient();
  torch::Tensor query(const torch::Tensor& x) { return projections[0]->as<torch::nn::Linear>()->forward(x); }
  torch::Tensor key(const torch::Tensor& x) { return projections[1]->as<torch::nn::Linear>()->forward(x); }
  torch::Tensor hidden(const torch::Tensor& x) { return torch::relu(second(torch::relu(first(x)))); }
  torch::Tensor answer(const torch::Tensor& h) { return last(torch::relu(third(h))); }
  torch::Tensor loss(const torch::Tensor& answered) { return (answered - 0.5).square().mean(); }
  torch::Tensor loss_of(const torch::Tensor& x) { return loss(answer(hidden(x))); }

  static constexpr int64_t kWidth = 64;
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr}, last{nullptr};
  torch::nn::ModuleList projections{nullptr};  // "attention.0", "attention.1"
};

struct Illness {
  std::string name;     // "underflow"
  std::string planted;  // what is wrong, in some words

  /// What `halfstep doctor` finds first. Empty: it has none to name.
  std::string code, layer, op;

  /// Trains some steps, and writes a log into the folder, which need not be there.
  std::function<void(const std::filesystem::path& folder, bool with_remedy)> train;
};

const std::vector<Illness>& illnesses();

/// The batches of BF16 sums: 1,024 make a step.
inline constexpr int64_t kMicroBatches = 1024;
torch::Tensor micro_batch(int64_t step, int64_t number);
