// Training on several ranks, in real processes, against one process that does all of it.
#include <gtest/gtest.h>
#include <halfstep/activations.h>
#include <halfstep/train_step.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <iomanip>
#include <map>
#include <random>
#include <sstream>

#include "distributed/rank_processes.h"
#include "distributed/small_run.h"

namespace halfstep {
namespace {

using testing::batch;
using testing::full_steps;
using testing::hash_of;
using testing::kBatches;
using testing::made;
using testing::options_for;
using testing::precision_called;
using testing::RankOutcome;
using testing::RankProcesses;
using testing::sharding_called;
using testing::texts_of_ranks;

// arguments: precision, steps
HALFSTEP_RANK_CASE(canonical) {
  testing::Transformer model = made(/*seed=*/ranks.rank() + 1);  // rank 0's weights count
  auto options = options_for(ranks);
  options.reduction.canonical_batches = kBatches;
  TrainStep step(precision_called(arguments[0]), model, AdamWOptions{.lr = 3e-3, .weight_decay = 0.1},
                 {.max_grad_norm = 0.5, .micro_batches = kBatches, .precision = options});
  int skipped = 0;
  for (int64_t number = 0; number < std::atoi(arguments[1].c_str()); ++number) {
    int64_t next = ranks.share(kBatches).first;
    skipped += !step([&] {
                  const auto [ids, targets] = batch(number, next++);
                  return model.loss(ids, targets);
                }).stepped();
  }
  const StateDict precision = step.mixed_precision().state_dict(), optimizer = step.optimizer().state_dict();
  return hash_of({&precision, &optimizer}) + " skipped " + std::to_string(skipped);
}

class Canonical : public ::testing::TestWithParam<const char*> {};

TEST_P(Canonical, HasTheBitsOfOneProcessOnAnyNumberOfRanks) {
  const std::vector<std::string> arguments{GetParam(), full_steps() ? full_steps() : "12"};
  const std::string expected = texts_of_ranks(1, "canonical", arguments)[0];
  EXPECT_EQ(expected.find("skipped 0") == std::string::npos, std::string(GetParam()) == "fp16") << expected;
  for (const int size : full_steps() ? std::vector{2, 3, 4, 8} : std::vector{3, 4})
    for (const std::string& text : texts_of_ranks(size, "canonical", arguments))
      EXPECT_EQ(text, expected) << size;
}

INSTANTIATE_TEST_SUITE_P(Of, Canonical, ::testing::Values("fp32", "bf16", "fp16", "fp8-delayed", "mxfp8"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::erase(name, '-');
                           return name;
                         });

/// Each step's gradients beside those of one process that computes all batches by itself, added up in FP64.
///
/// The sum of n numbers in floating point, in any order, is within (n - 1) u of the sum of their magnitudes,
/// to first order; u is 2^-24 for FP32, 2^-8 for BF16 and 2^-11 for FP16: half of what the last of 24, 8 and
/// 11 digits is worth. A low type rounds each rank's part once more before it travels.
double worst_against_one_process(const Ranks& ranks, c10::ScalarType type, int64_t steps,
                                 Accumulation accumulation, Sharding sharding) {
  testing::Transformer model = made(1), twin = made(2);
  auto options = options_for(ranks);
  options.sharding = sharding;
  options.accumulation = accumulation;
  options.reduction.type = type;
  MixedPrecision mp(Precision::fp32(), model, options);
  AdamW optimizer(mp.params(), {.lr = 3e-3});
  const bool several = accumulation == Accumulation::Fp32;
  const int64_t per_rank = several ? kBatches / ranks.size() : 1;
  double worst = 0;
  for (int64_t step = 0; step < steps; ++step) {
    {
      const torch::NoGradGuard no_grad;
      mp.forward([&] {
        for (const auto& item : model.named_parameters())
          twin.named_parameters()[item.key()].copy_(item.value());
        return 0;
      });
    }
    for (int64_t i = 0; i < per_rank; ++i) {
      const auto [ids, targets] = batch(step, ranks.rank() * per_rank + i);
      const at::Tensor loss =
          mp.forward([&, ids = ids, targets = targets] { return model.loss(ids, targets); });
      mp.backward(loss / per_rank, {.last = i + 1 == per_rank});
    }
    mp.close_sum();
    const GradSummary grads = mp.inspect_grads();
    std::map<std::string, at::Tensor> sums, magnitudes, of_rank, rank_magnitudes;
    for (int64_t number = 0; number < per_rank * ranks.size(); ++number) {
      const auto [ids, targets] = batch(step, number);
      twin.zero_grad();
      (twin.loss(ids, targets) / per_rank / ranks.size()).backward();
      for (const auto& item : twin.named_parameters()) {
        const at::Tensor grad = item.value().grad().to(at::kDouble);
        at::Tensor &sum = sums[item.key()], &magnitude = magnitudes[item.key()];
        sum = sum.defined() ? sum + grad : grad;
        magnitude = magnitude.defined() ? magnitude + grad.abs() : grad.abs();
      }
    }
    const double n = static_cast<double>(per_rank * ranks.size()), u = std::ldexp(1.0, -24);
    const double low = type == at::kFloat      ? 0.0
                       : type == at::kBFloat16 ? std::ldexp(1.0, -8)
                                               : std::ldexp(1.0, -11);
    const double factor = 1.01 * ((n - 1) * u + low * ranks.size());
    const double smallest =
        type == at::kHalf ? std::ldexp(1.0, -25) * ranks.size() : 0.0;  // FP16's subnormals
    for (const Param& param : mp.params()) {
      if (param.working.numel() == 0) continue;  // no part of it is this rank's
      const auto here = [&](const at::Tensor& whole) {
        return whole.flatten().narrow(0, param.first_element, param.working.numel());
      };
      const at::Tensor error =
          (param.working.grad().to(at::kDouble).flatten() - here(sums[param.name])).abs();
      const at::Tensor bound = here(magnitudes[param.name]) * factor + smallest + 1e-300;
      worst = std::max(worst, (error / bound).max().item<double>());
    }
    const auto report = optimizer.step(grads.clipped_to(1.0));
    mp.advance(grads);
    optimizer.zero_grad();
    if (!report.stepped()) throw Error(report.sentence());
  }
  return worst;
}

// arguments: type, accumulation, steps, sharding
HALFSTEP_RANK_CASE(fast) {
  const c10::ScalarType type = arguments[0] == "fp32"   ? at::kFloat
                               : arguments[0] == "bf16" ? at::kBFloat16
                                                        : at::kHalf;
  const auto accumulation = arguments[1] == "sum" ? Accumulation::Fp32 : Accumulation::None;
  std::ostringstream text;
  text << worst_against_one_process(ranks, type, std::atoi(arguments[2].c_str()), accumulation,
                                    testing::sharding_called(arguments[3]));
  return text.str();
}

TEST(DataParallel, GradientsAreThoseOfOneProcessWithinRoundings) {
  for (const char* type : {"fp32", "bf16", "fp16"})
    for (const char* accumulation : {"sum", "none"})
      for (const int size : full_steps() ? std::vector{2, 3, 4, 8} : std::vector{type[0] == 'b' ? 2 : 3}) {
        for (const std::string& text :
             texts_of_ranks(size, "fast", {type, accumulation, full_steps() ? full_steps() : "4", "none"})) {
          EXPECT_LE(std::stod(text), 1.0) << type << ", " << accumulation << ", " << size << " ranks";
          EXPECT_GT(std::stod(text), 0.0);
        }
      }
}

// arguments: precision, steps
HALFSTEP_RANK_CASE(stays_together) {
  testing::Transformer model = made(ranks.rank() + 1);
  auto options = options_for(ranks);
  options.reduction.type = arguments[0] == "fp16" ? at::kFloat : at::kBFloat16;
  TrainStep step(precision_called(arguments[0]), model, AdamWOptions{.lr = 3e-3},
                 {.max_grad_norm = 0.5, .micro_batches = 2, .precision = options});
  for (int64_t number = 0; number < std::atoi(arguments[1].c_str()); ++number) {
    int64_t next = ranks.rank() * 2;
    (void)step([&] {
      const auto [ids, targets] = batch(number, next++);
      return model.loss(ids, targets);
    });
  }
  const StateDict precision = step.mixed_precision().state_dict(), optimizer = step.optimizer().state_dict();
  return hash_of({&precision, &optimizer});
}

TEST(DataParallel, RanksStayEqualToTheBit) {
  for (const char* precision : {"bf16", "fp16", "fp8-delayed"})
    for (const int size : full_steps() ? std::vector{2, 3, 8} : std::vector{3}) {
      const auto texts =
          texts_of_ranks(size, "stays_together", {precision, full_steps() ? full_steps() : "8"});
      for (const std::string& text : texts)
        EXPECT_EQ(text, texts[0]) << precision << ", " << size << " ranks";
    }
}

/// Three weights whose gradients are what the batch says.
struct Weights : torch::nn::Module {
  Weights() {
    for (const char* name : {"a", "b", "c"}) register_parameter(name, torch::ones({50}));
  }
  at::Tensor loss(const at::Tensor& grads) {
    at::Tensor sum;
    int64_t row = 0;
    for (const at::Tensor& weight : parameters()) {
      const at::Tensor part = (weight * grads[row++]).sum();
      sum = sum.defined() ? sum + part : part;
    }
    return sum;
  }
};

// arguments: placements, seed, sharding
HALFSTEP_RANK_CASE(agrees) {
  const int placements = std::atoi(arguments[0].c_str());
  Weights model;
  auto options = options_for(ranks);
  options.accumulation = Accumulation::Fp32;
  options.sharding = testing::sharding_called(arguments[2]);
  MixedPrecision mp(Precision::bf16(), model, options);
  SGD optimizer(mp.params(), {.lr = 1e-3});
  std::mt19937_64 random(static_cast<uint64_t>(std::atoll(arguments[1].c_str())));
  const auto below = [&](uint64_t most) { return static_cast<int64_t>(random() % most); };
  int64_t bad_steps = 0;
  for (int placement = 0; placement < placements; ++placement) {
    const int64_t batches = 1 + below(3);
    struct Bad {
      int64_t rank, batch, row, element, kind;
    };
    std::vector<Bad> planted;
    for (int64_t i = below(3); i > 0; --i)
      planted.push_back({below(static_cast<uint64_t>(ranks.size())), below(static_cast<uint64_t>(batches)),
                         below(3), below(50), below(3)});
    for (int64_t i = 0; i < batches; ++i) {
      at::Tensor grads = torch::full({3, 50}, 0.5f);
      for (const Bad& bad : planted)
        if (bad.rank == ranks.rank() && bad.batch == i)
          grads[bad.row][bad.element] = bad.kind == 0 ? NAN : bad.kind == 1 ? INFINITY : -INFINITY;
      mp.backward(mp.forward([&] { return model.loss(grads); }),
                  {.last = placement % 2 == 0 && i + 1 == batches});
    }
    mp.close_sum();
    const GradSummary found = mp.inspect_grads();
    const auto report = optimizer.step(found.clipped_to(1.0));
    mp.advance(found);
    optimizer.zero_grad();
    // The lowest rank, and of its first bad micro-batch: known to all.
    int64_t rank = -1, batch = -1;
    for (const Bad& bad : planted)
      if (rank < 0 || bad.rank < rank) rank = bad.rank;
    for (const Bad& bad : planted)
      if (bad.rank == rank && (batch < 0 || bad.batch < batch)) batch = bad.batch;
    HALFSTEP_CHECK(report.stepped() == planted.empty() && found.finite() == planted.empty() &&
                       found.rank() == rank && found.micro_batch() == batch,
                   "placement ", placement, ": ", report.sentence(), ", expected rank ", rank,
                   ", micro-batch ", batch);
    bool named = planted.empty();
    for (const Bad& bad : planted)
      named |= bad.rank == rank && bad.batch == batch &&
               found.first_bad() == std::string(1, static_cast<char>('a' + bad.row));
    HALFSTEP_CHECK(named, "placement ", placement, ": ", report.sentence());
    bad_steps += !planted.empty();
  }
  StateDict weights;
  const torch::NoGradGuard no_grad;
  mp.forward([&] {
    for (const auto& item : model.named_parameters()) weights.set(item.key(), item.value().clone());
    return 0;
  });
  return std::to_string(bad_steps) + " bad " + hash_of({&weights});
}

TEST(DataParallel, AllRanksDecideAlike) {
  const char* full = std::getenv("HALFSTEP_PLACEMENTS");
  for (const int size : {2, 4, 8}) {
    std::string first;
    for (const std::string sharding : {"none", "states", "gradients", "weights"}) {
      // To start processes takes the time: all ways on two ranks, and on more those that differ most.
      if (!full && size > 2 && sharding != "weights" && !(size == 4 && sharding == "none")) continue;
      const auto texts = texts_of_ranks(size, "agrees", {full ? full : "60", std::to_string(size), sharding});
      for (const std::string& text : texts) EXPECT_EQ(text, texts[0]) << sharding;
      std::printf("%d ranks, %s: %s\n", size, sharding.c_str(), texts[0].c_str());
      std::fflush(stdout);
      // All gradients here are halves, whose sums are exact in any order.
      if (first.empty()) first = texts[0];
      EXPECT_EQ(texts[0], first) << sharding;
    }
  }
}

struct TwoLayers : torch::nn::Module {
  TwoLayers() {
    torch::manual_seed(3);
    first = register_module("first", torch::nn::Linear(32, 32));
    second = register_module("second", torch::nn::Linear(32, 32));
  }
  at::Tensor loss(const at::Tensor& x) { return second(at::gelu(first(x))).square().mean(); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

/// Activations that are not finite, under a recipe whose scales come from the largest magnitudes of earlier
/// steps. Some spoil the gradients too; some are of a use of the layer that has none: then the step is taken,
/// and what was noted in it must make no scale, on any rank.
// arguments: placements, seed, sharding
HALFSTEP_RANK_CASE(agrees_on_magnitudes) {
  const int placements = std::atoi(arguments[0].c_str());
  TwoLayers model;
  auto options = options_for(ranks);
  options.accumulation = Accumulation::Fp32;
  options.sharding = testing::sharding_called(arguments[2]);
  Precision precision = Precision::fp8_delayed();
  precision.quantise("first.weight").quantise("second.weight");
  MixedPrecision mp(precision, model, options);
  SGD optimizer(mp.params(), {.lr = 1e-3});
  std::mt19937_64 random(static_cast<uint64_t>(std::atoll(arguments[1].c_str())));
  const auto below = [&](uint64_t most) { return static_cast<int64_t>(random() % most); };
  const auto noted = [&] {  // how many steps have left a magnitude of the first layer's inputs
    const StateDict state = mp.state_dict();
    for (const auto& [name, value] : state)
      if (name.find("amax.input.first") != std::string::npos) {
        const at::Tensor past = std::get<at::Tensor>(value);
        HALFSTEP_CHECK(at::isfinite(past).all().item<bool>(), name, " is not finite");
        return past.numel();
      }
    throw Error("nothing is noted of the first layer's inputs");
  };
  int64_t bad_steps = 0, bad_magnitudes = 0, expected_noted = noted();
  for (int placement = 0; placement < placements; ++placement) {
    const int64_t batches = 1 + below(3);
    struct Bad {
      int64_t rank, batch, element, kind;
      bool is_used;
    };
    std::vector<Bad> planted;
    for (int64_t i = below(3); i > 0; --i)
      planted.push_back({below(static_cast<uint64_t>(ranks.size())), below(static_cast<uint64_t>(batches)),
                         below(16 * 32), below(3), below(2) == 0});
    for (int64_t i = 0; i < batches; ++i) {
      torch::manual_seed(1000 * placement + 10 * i + ranks.rank());
      at::Tensor x = torch::randn({16, 32}), unused;
      for (const Bad& bad : planted) {
        if (bad.rank != ranks.rank() || bad.batch != i) continue;
        if (!bad.is_used && !unused.defined()) unused = torch::randn({16, 32});
        (bad.is_used ? x : unused).flatten()[bad.element] = bad.kind == 0   ? NAN
                                                            : bad.kind == 1 ? INFINITY
                                                                            : -INFINITY;
      }
      mp.backward(mp.forward([&] {
        if (unused.defined()) (void)model.first(unused);
        return model.loss(x);
      }),
                  {.last = placement % 2 == 0 && i + 1 == batches});
    }
    mp.close_sum();
    const GradSummary found = mp.inspect_grads();
    const auto report = optimizer.step(found.clipped_to(1.0));
    mp.advance(found);
    optimizer.zero_grad();
    int64_t rank = -1, batch = -1;
    for (const Bad& bad : planted)
      if (bad.is_used && (rank < 0 || bad.rank < rank)) rank = bad.rank;
    for (const Bad& bad : planted)
      if (bad.is_used && bad.rank == rank && (batch < 0 || bad.batch < batch)) batch = bad.batch;
    HALFSTEP_CHECK(report.stepped() == (rank < 0) && found.rank() == rank && found.micro_batch() == batch,
                   "placement ", placement, ": ", report.sentence(), ", expected rank ", rank,
                   ", micro-batch ", batch);
    expected_noted += planted.empty();
    constexpr int64_t kHistory = 1024;  // what comes before is forgotten
    HALFSTEP_CHECK(expected_noted > kHistory || noted() == expected_noted, "placement ", placement,
                   ": magnitudes of ", noted(), " steps, expected ", expected_noted);
    bad_steps += rank >= 0;
    bad_magnitudes += rank < 0 && !planted.empty();
  }
  StateDict state = mp.state_dict();
  return detail::concat(bad_steps, " skipped, ", bad_magnitudes, " with a magnitude alone ",
                        arguments[2] == "none" ? hash_of({&state}) : "");
}

TEST(DataParallel, AllRanksDecideAlikeAboutMagnitudes) {
  const char* full = std::getenv("HALFSTEP_PLACEMENTS");
  for (const int size : full ? std::vector{2, 4, 8} : std::vector{2, 3})
    for (const char* sharding : {"none", "states", "gradients", "weights"}) {
      if (!full && (std::string(sharding) == "none") != (size == 2)) continue;
      const auto texts =
          texts_of_ranks(size, "agrees_on_magnitudes", {full ? full : "40", std::to_string(size), sharding});
      for (const std::string& text : texts) EXPECT_EQ(text, texts[0]) << sharding;
      std::printf("%d ranks, %s: %s\n", size, sharding, texts[0].c_str());
      std::fflush(stdout);
    }
}

HALFSTEP_RANK_CASE(unused_weights) {
  Weights model;
  MixedPrecision mp(Precision::bf16(), model, options_for(ranks));
  SGD optimizer(mp.params(), {.lr = 0.5});
  // 'a' on rank 0 alone, 'b' on none, 'c' on all.
  const auto all = model.named_parameters();
  at::Tensor loss =
      mp.forward([&] { return all["c"].sum() + (ranks.rank() == 0 ? all["a"].sum() : torch::zeros({})); });
  mp.backward(loss);
  const GradSummary grads = mp.inspect_grads();
  (void)optimizer.step(grads.unclipped());
  mp.advance(grads);
  std::ostringstream text;
  for (const std::string& name : grads.without_grad()) text << name << " ";
  text << all["a"][0].item<float>() << " " << all["b"][0].item<float>() << " " << all["c"][0].item<float>();
  return text.str();
}

TEST(DataParallel, AWeightThatSomeRanksDoNotUseGetsTheOthersMean) {
  for (const std::string& text : texts_of_ranks(4, "unused_weights")) EXPECT_EQ(text, "b 0.875 1 0.5");
}

/// One weight in two regions that are computed again in backward: autograd adds to its gradient twice.
HALFSTEP_RANK_CASE(regions) {
  torch::manual_seed(1);
  torch::nn::Linear shared(64, 64), last(64, 64);
  torch::nn::Module model;
  model.register_module("shared", shared);
  model.register_module("last", last);
  MixedPrecision mp(Precision::fp32(), model, options_for(ranks));
  SGD optimizer(mp.params(), {.lr = 0.1});
  double worst = 0;
  for (int step = 0; step < 3; ++step) {
    const auto run = [&](int rank, bool again) {
      torch::manual_seed(100 * step + rank);
      at::Tensor x = torch::randn({8, 64}).requires_grad_();
      const auto region = [&](const at::Tensor& in) { return at::tanh(shared(in)); };
      for (int i = 0; i < 2; ++i) x = again ? checkpoint_activations(region, x) : region(x);
      return last(x).square().mean();
    };
    mp.backward(mp.forward([&] { return run(ranks.rank(), true); }));
    const GradSummary grads = mp.inspect_grads();
    std::vector<at::Tensor> found;
    for (const Param& param : mp.params())
      found.push_back(std::exchange(param.working.mutable_grad(), at::Tensor()));
    at::Tensor all;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      const at::Tensor one = run(rank, false) / ranks.size();
      all = all.defined() ? all + one : one;
    }
    all.backward();
    for (size_t i = 0; i < found.size(); ++i) {
      const at::Tensor expected = std::exchange(mp.params()[i].working.mutable_grad(), found[i]);
      worst = std::max(worst, ((found[i] - expected).abs().max() / expected.abs().max()).item<double>());
    }
    (void)optimizer.step(grads.unclipped());
    mp.advance(grads);
    optimizer.zero_grad();
  }
  std::ostringstream text;
  text << worst;
  return text.str();
}

TEST(DataParallel, RegionsThatShareAWeightAreAddedWhole) {
  // Two orders of the same FP32 additions through two layers: far below a part that is missing, which is a
  // half.
  for (const std::string& text : texts_of_ranks(3, "regions")) EXPECT_LT(std::stod(text), 1e-5) << text;
}

HALFSTEP_RANK_CASE(running_statistics) {
  torch::manual_seed(5);
  testing::ConvNet model;
  TrainStep step(Precision::bf16(), model, SgdOptions{.lr = 0.1}, {.precision = options_for(ranks)});
  for (int number = 0; number < 3; ++number) {
    torch::manual_seed(10 * number + ranks.rank());
    const at::Tensor images = torch::randn({4, 1, 8, 8}), labels = torch::randint(10, {4});
    (void)step([&] { return model.loss(images, labels); });
  }
  const StateDict state = step.mixed_precision().state_dict();
  return hash_of({&state});
}

TEST(DataParallel, RunningStatisticsAreTheFirstRanks) {
  const auto texts = texts_of_ranks(3, "running_statistics");
  EXPECT_EQ(texts[1], texts[0]);
  EXPECT_EQ(texts[2], texts[0]);
}

HALFSTEP_RANK_CASE(other_model) {
  torch::nn::Linear model(8, ranks.rank() == 1 ? 9 : 8);
  MixedPrecision mp(Precision::bf16(), model, options_for(ranks));
  return "made";
}

TEST(DataParallel, DifferentModelsAreRefusedOnAllRanks) {
  RankProcesses processes(3, "other_model");
  for (const RankOutcome& outcome : processes.outcomes()) {
    EXPECT_EQ(outcome.exit_code, 3);
    EXPECT_NE(outcome.text.find("rank 1's model differs from rank 0's"), std::string::npos) << outcome.text;
  }
}

HALFSTEP_RANK_CASE(leaves_a_step) {
  Weights model;
  MixedPrecision mp(Precision::bf16(), model, options_for(ranks));
  const at::Tensor grads = torch::ones({3, 50});
  mp.backward(mp.forward([&] { return model.loss(grads); }));
  if (ranks.rank() == 1) {
    mp.zero_grad();
    mp.backward(mp.forward([&] { return model.loss(grads); }));
    return "went on";
  }
  (void)mp.inspect_grads();
  return "done";
}

TEST(DataParallel, ARankThatLeavesAStepCannotGoOn) {
  RankProcesses processes(2, "leaves_a_step", {}, /*timeout_ms=*/3000);
  const auto outcomes = processes.outcomes();
  EXPECT_NE(outcomes[1].text.find("left a step"), std::string::npos) << outcomes[1].text;
  EXPECT_EQ(outcomes[0].exit_code, 3) << outcomes[0].text;
}

TEST(DataParallel, RefusesWhatItCannotSum) {
  torch::nn::Linear model(8, 8);
  const auto refusal = [&](MixedPrecisionOptions options) {
    try {
      MixedPrecision mp(Precision::bf16(), model, options);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  MixedPrecisionOptions options = options_for({});
  options.reduction.canonical_batches = 4;
  options.accumulation = Accumulation::Bf16Kahan;
  EXPECT_NE(refusal(options).find("not Bf16Kahan"), std::string::npos);
  options.accumulation = Accumulation::None;
  options.reduction.type = at::kBFloat16;
  EXPECT_NE(refusal(options).find("travels in FP32"), std::string::npos);
}

/// Parts of one size, of which ranks leave out different ones.
struct Halves : torch::nn::Module {
  explicit Halves(int64_t seed) {
    torch::manual_seed(seed);
    first = register_module("first", torch::nn::Linear(8, 8));
    second = register_module("second", torch::nn::Linear(8, 8));
  }
  at::Tensor loss(const at::Tensor& x, bool uses_second) {
    const at::Tensor y = first(x);
    return (uses_second ? second(y) : y).square().mean();
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

// arguments: sharding
HALFSTEP_RANK_CASE(exchanges_between) {
  Halves a(1), b(2), twin_a(1), twin_b(2);
  auto options = options_for(ranks);
  options.sharding = sharding_called(arguments[0]);
  MixedPrecision ma(Precision::fp32(), a, options), mb(Precision::fp32(), b, options);
  SGD sa(ma.params(), {.lr = 0.1}), sb(mb.params(), {.lr = 0.1});
  double worst = 0;
  for (int step = 0; step < 4; ++step) {
    const auto input = [&](int rank) {
      torch::manual_seed(100 * step + rank);
      return torch::randn({4, 8});
    };
    const auto uses = [&](int rank) { return rank == step % 2; };
    const at::Tensor mine = input(ranks.rank());
    ma.backward(ma.forward([&] { return a.loss(mine, uses(ranks.rank())); }));
    at::Tensor told = torch::full({80}, 1.0f);
    ranks.sum(told);  // what a loop logs
    mb.backward(mb.forward([&] { return b.loss(mine, !uses(ranks.rank())); }));
    const GradSummary ga = ma.inspect_grads();
    const GradSummary gb = mb.inspect_grads();
    if (told[79].item<float>() != static_cast<float>(ranks.size())) return "a sum of something else";
    const auto expect = [&](Halves& twin, const GradSummary& grads, bool inverted, double lr) {
      twin.zero_grad();
      for (int rank = 0; rank < ranks.size(); ++rank)
        (twin.loss(input(rank), uses(rank) != inverted) / ranks.size()).backward();
      double squares = 0;
      const torch::NoGradGuard no_grad;
      for (const at::Tensor& parameter : twin.parameters()) {
        squares += parameter.grad().to(at::kDouble).square().sum().item<double>();
        parameter.sub_(parameter.grad(), lr);
      }
      worst = std::max(worst, std::abs(grads.norm() / std::sqrt(squares) - 1));
    };
    expect(twin_a, ga, false, 0.1);
    expect(twin_b, gb, true, 0.1);
    (void)sa.step(ga.unclipped());
    (void)sb.step(gb.unclipped());
    ma.advance(ga);
    mb.advance(gb);
    sa.zero_grad();
    sb.zero_grad();
  }
  std::ostringstream text;
  text << worst;
  return text.str();
}

TEST(DataParallel, OtherExchangesDoNotMeetThePiecesOfASum) {
  // Norms of FP32 gradients that are added in another order.
  for (const char* sharding : {"none", "states", "gradients", "weights"})
    for (const std::string& text : texts_of_ranks(2, "exchanges_between", {sharding}))
      EXPECT_LT(std::stod(text), 1e-6) << sharding << ": " << text;
}

// arguments: what one rank does
HALFSTEP_RANK_CASE(goes_its_own_way) {
  Halves model(1);
  auto options = options_for(ranks);
  TrainStep step(Precision::fp32(), model, AdamWOptions{.lr = 0.1}, {.precision = options});
  const at::Tensor input = torch::ones({4, 8});
  const std::string& what = arguments[0];
  for (int64_t number = 0; number < 6; ++number) {
    const bool now = ranks.rank() == 1 && number == 2;
    if (now && what == "lr") step.optimizer().set_options({.lr = 0.2});
    if (now && what == "row") {
      const torch::NoGradGuard no_grad;
      model.second->weight[3].fill_(0.5);
    }
    if (now && what == "freezes") model.first->weight.set_requires_grad(false);
    if (ranks.rank() == 0 && number == 2 && what == "freezes") model.second->weight.set_requires_grad(false);
    try {
      (void)step([&] { return model.loss(input, true); });
    } catch (const RankError&) {
      throw;
    } catch (const Error& error) {
      return detail::concat(number, ": ", error.what());
    }
  }
  return "unnoticed";
}

TEST(DataParallel, RanksThatGoDifferentWaysAreFoundOut) {
  for (const auto& [what, begin] :
       std::map<std::string, std::string>{{"lr", "3: "}, {"row", "2: "}, {"freezes", "2: "}})
    for (const std::string& text : texts_of_ranks(2, "goes_its_own_way", {what})) {
      EXPECT_TRUE(text.starts_with(begin)) << what << ": " << text;
      EXPECT_NE(text.find("ranks no longer have the same weights"), std::string::npos) << text;
      if (what == "row") {
        EXPECT_NE(text.find("'second.weight' of rank 1"), std::string::npos) << text;
      }
    }
}

HALFSTEP_RANK_CASE(differs_in_rules) {
  Halves model(1);
  Precision precision = Precision::fp16();
  if (ranks.rank() == 1) precision.loss_scaling->initial = 1024;
  try {
    const MixedPrecision mp(precision, model, options_for(ranks));
  } catch (const Error& error) {
    return error.what();
  }
  return "unnoticed";
}

TEST(DataParallel, RulesOfAPrecisionAreThoseOfAllRanks) {
  for (const std::string& text : texts_of_ranks(2, "differs_in_rules"))
    EXPECT_NE(text.find("rules and loss scaling included"), std::string::npos) << text;
}

HALFSTEP_RANK_CASE(with_torch_optim) {
  Halves model(1);
  MixedPrecision mp(Precision::fp32(), model, options_for(ranks));
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  for (int number = 0; number < 3; ++number) {
    mp.backward(mp.forward([&] { return model.loss(torch::ones({4, 8}), true); }));
    const GradSummary grads = mp.inspect_grads();
    optimizer.step();
    mp.advance(grads);
    optimizer.zero_grad(/*set_to_none=*/number == 1);
    if (number != 1) mp.zero_grad();
  }
  return "trained";
}

TEST(DataParallel, LibTorchsOptimizersUpdateWholeWeights) {
  for (const std::string& text : texts_of_ranks(2, "with_torch_optim")) EXPECT_EQ(text, "trained");
}

}  // namespace
}  // namespace halfstep
