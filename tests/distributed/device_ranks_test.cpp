// Ranks whose model is on an accelerator: the test accelerator, whose tensors go by way of the host.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "distributed/rank_processes.h"
#include "distributed/small_run.h"
#include "support/counting_device.h"

namespace halfstep {
namespace {

using testing::device_under_test;
using testing::hash_of;
using testing::options_for;
using testing::precision_called;
using testing::texts_of_ranks;

constexpr int64_t kRanks = 2;

/// With a batch norm: its statistics are rank 0's.
struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(16, 64));
    norm = register_module("norm", torch::nn::BatchNorm1d(64));
    second = register_module("second", torch::nn::Linear(64, 8));
    unused = register_module("unused", torch::nn::Linear(4, 4));
  }
  at::Tensor loss(const at::Tensor& x) { return second(at::relu(norm(first(x)))).square().mean(); }
  torch::nn::Linear first{nullptr}, second{nullptr}, unused{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

at::Tensor batch_of(int64_t step, int64_t rank, int64_t micro_batch) {
  torch::manual_seed(1000 + step * 100 + rank * 10 + micro_batch);
  return torch::randn({8, 16});
}

// arguments: precision, micro-batches of each rank, step and rank with an Inf
HALFSTEP_RANK_CASE(train_on_device) {
  torch::manual_seed(1 + ranks.rank());  // rank 0's weights count
  Net model;
  model.to(device_under_test());
  const int64_t micro_batches = std::atoi(arguments[1].c_str());
  const int64_t bad_step = std::atoi(arguments[2].c_str()), bad_rank = std::atoi(arguments[3].c_str());
  // One process takes the batches of all ranks, rank by rank.
  const bool alone = ranks.size() == 1;
  const int64_t count = alone ? kRanks * micro_batches : micro_batches;
  auto options = options_for(ranks);
  if (count > 1) options.accumulation = Accumulation::Fp32;
  TrainStep step(precision_called(arguments[0]), model, AdamWOptions{.lr = 1e-2},
                 {.max_grad_norm = 1.0, .micro_batches = count, .precision = options});
  std::string skipped;
  for (int64_t number = 0; number < 6; ++number) {
    int64_t next = 0;
    const auto report = step([&] {
      const int64_t rank = alone ? next / micro_batches : ranks.rank(), micro_batch = next++ % micro_batches;
      at::Tensor x = batch_of(number, rank, micro_batch);
      if (number == bad_step && rank == bad_rank)
        x.index_put_({0, 0}, std::numeric_limits<float>::infinity());
      return model.loss(x.to(device_under_test()));
    });
    skipped += report.stepped() ? "-" : "s";
  }
  StateDict found;
  for (const auto& item : model.named_parameters()) found.set(item.key(), item.value().detach().to(at::kCPU));
  const std::string weights = hash_of({&found});
  for (const auto& item : model.named_buffers()) found.set(item.key(), item.value().to(at::kCPU));
  return weights + " " + skipped + " " + hash_of({&found});
}

std::string first_words(const std::string& text) { return text.substr(0, text.rfind(' ')); }

/// Two numbers have one sum in either order: the bits of one process that takes the batches of both. Its
/// batch norm sees the batches of both, so buffers are compared between the ranks.
TEST(RanksOnADevice, HaveTheBitsOfOneProcess) {
  for (const char* precision : {"fp32", "bf16", "fp16"}) {
    const std::vector<std::string> arguments{precision, "1", "-1", "-1"};
    const std::string expected = texts_of_ranks(1, "train_on_device", arguments)[0];
    const auto texts = texts_of_ranks(kRanks, "train_on_device", arguments);
    for (const std::string& text : texts) {
      EXPECT_EQ(first_words(text), first_words(expected)) << precision;
      EXPECT_EQ(text, texts[0]) << precision << ": the ranks' buffers";
    }
  }
}

TEST(RanksOnADevice, AgreeOnWhatOneOfThemFound) {
  for (const char* micro_batches : {"1", "2"})
    for (const char* rank : {"0", "1"}) {
      const auto texts = texts_of_ranks(kRanks, "train_on_device", {"bf16", micro_batches, "3", rank});
      EXPECT_NE(texts[0].find(" ---s-- "), std::string::npos) << texts[0];
      EXPECT_EQ(texts[0], texts[1]);
    }
}

// arguments: what is asked for
HALFSTEP_RANK_CASE(refused_on_device) {
  Net model;
  model.to(device_under_test());
  auto options = options_for(ranks);
  if (arguments[0] == "parts") options.sharding = Sharding::States;
  try {
    const MixedPrecision mp(arguments[0] == "recipe" ? Precision::fp8_delayed() : Precision::bf16(), model,
                            options);
  } catch (const Error& error) {
    return error.what();
  }
  return "taken";
}

TEST(RanksOnADevice, WhatIsForTheCpuSoFarIsRefused) {
  EXPECT_NE(texts_of_ranks(kRanks, "refused_on_device", {"parts"})[1].find("parts of it on each rank"),
            std::string::npos);
  EXPECT_NE(texts_of_ranks(kRanks, "refused_on_device", {"recipe"})[1].find("with a recipe"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep
