// Cross-entropy of BF16 logits inside a scope, forward and backward: Halfstep's, which keeps no FP32 logits,
// beside LibTorch's own on FP32 copies. Interleaved, medians.
//
//   cross_entropy_bench [--rows N] [--classes N] [--rounds N] [--threads N]
#include <halfstep/autocast.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iostream>

#include "support/live_bytes.h"

namespace {

using halfstep::AutocastScope;
using halfstep::OpPolicy;
using halfstep::OpRule;

struct Sample {
  double ms;
  int64_t peak_bytes;  // beyond the logits
};

Sample run(const at::Tensor& weightless, const at::Tensor& target, const OpPolicy& policy) {
  // Made by an operation, as a head makes them, and held by nobody else.
  at::Tensor logits = weightless.clone();
  const halfstep::testing::LiveBytes bytes;
  const auto start = std::chrono::steady_clock::now();
  at::Tensor loss;
  {
    const AutocastScope scope(at::kBFloat16, policy, {.allow_emulated = true});
    loss = at::cross_entropy_loss(logits, target);
  }
  logits.reset();
  loss.backward();
  const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - start;
  return {ms.count(), bytes.peak()};
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  int64_t rows = 2048, classes = 50257, rounds = 15, threads = 2;
  for (int i = 1; i + 1 < argc; i += 2) {
    int64_t* const value = std::strcmp(argv[i], "--rows") == 0      ? &rows
                           : std::strcmp(argv[i], "--classes") == 0 ? &classes
                           : std::strcmp(argv[i], "--rounds") == 0  ? &rounds
                           : std::strcmp(argv[i], "--threads") == 0 ? &threads
                                                                    : nullptr;
    if (!value) {
      std::cerr << "usage: cross_entropy_bench [--rows N] [--classes N] [--rounds N] [--threads N]\n";
      return 2;
    }
    *value = std::atoll(argv[i + 1]);
  }
  at::set_num_threads(static_cast<int>(threads));
  const at::Tensor leaf = at::randn({rows, classes}).to(at::kBFloat16).requires_grad_();
  const at::Tensor target = at::randint(classes, {rows});
  const OpPolicy ours = OpPolicy::standard();
  OpPolicy stock = ours;
  stock.set("cross_entropy_loss", OpRule::Stock);
  std::vector<double> ours_ms, stock_ms, ratios;
  Sample ours_last{}, stock_last{};
  for (int64_t round = 0; round < rounds; ++round) {
    leaf.mutable_grad().reset();
    stock_last = run(leaf, target, stock);
    leaf.mutable_grad().reset();
    ours_last = run(leaf, target, ours);
    stock_ms.push_back(stock_last.ms);
    ours_ms.push_back(ours_last.ms);
    ratios.push_back(ours_last.ms / stock_last.ms);
  }
  std::cout << rows << " x " << classes << ": stock " << median(stock_ms) << " ms, peak "
            << static_cast<double>(stock_last.peak_bytes) / 1e6 << " MB; ours " << median(ours_ms)
            << " ms, peak " << static_cast<double>(ours_last.peak_bytes) / 1e6 << " MB; ratio "
            << median(ratios) << "\n";
}
