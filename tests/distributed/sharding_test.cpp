// States, gradients and weights in parts: the bits of one process, and what a part must not change.
#include <gtest/gtest.h>
#include <halfstep/activations.h>
#include <halfstep/checkpoint.h>
#include <halfstep/memory.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <sstream>

#include "distributed/rank_processes.h"
#include "distributed/small_run.h"
#include "support/scratch.h"

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

using Step = TrainStep<AdamWOptions>;

CheckpointFolder folder_of(const Ranks& ranks, const std::string& folder) {
  if (ranks.rank() == 0) std::filesystem::create_directories(folder);
  ranks.barrier();
  return CheckpointFolder(folder, {.keep_last = 2},
                          {.rank = ranks.rank(),
                           .size = ranks.size(),
                           .decided = [ranks](const auto&... what) { return ranks.decided(what...); }});
}

Checkpoint checkpoint_of(const Step& step, int64_t number = 1) {
  return {.step = number,
          .parts = {{"precision", step.mixed_precision().state_dict()},
                    {"optimizer", step.optimizer().state_dict()}}};
}

/// Into one checkpoint, by all ranks.
void save(const Ranks& ranks, const Step& step, const std::string& folder) {
  folder_of(ranks, folder).save(checkpoint_of(step));
}

/// The states of all ranks, through files, as those of one process.
std::string hash_of_one_process(const Ranks& ranks, const Step& step, const std::string& folder) {
  save(ranks, step, folder);
  HALFSTEP_CHECK(verify_checkpoint(folder, 1).empty(), "damaged");
  const Checkpoint saved = load_checkpoint(folder, 1);
  return hash_of({&saved.part("precision"), &saved.part("optimizer")});
}

/// A forward of the weights that this rank sees.
std::string forward_hash(Step& step, testing::Transformer& model) {
  const torch::NoGradGuard no_grad;
  StateDict found;
  const auto [ids, targets] = batch(999, 0);
  found.set(
      "loss",
      step.forward([&, ids = ids, targets = targets] { return model.loss(ids, targets); }).to(at::kFloat));
  return hash_of({&found});
}

// arguments: precision, steps, sharding, folder, moments, what travels
HALFSTEP_RANK_CASE(canonical_in_parts) {
  testing::Transformer model = made(/*seed=*/ranks.rank() + 1);  // rank 0's weights count
  auto options = options_for(ranks);
  options.reduction.canonical_batches = kBatches;
  options.sharding = sharding_called(arguments[2]);
  options.gather = arguments[5] == "fp8" ? Gather::Fp8 : Gather::Own;
  const auto moments = arguments[4] == "8bit" ? MomentStorage::Blockwise8 : MomentStorage::Fp32;
  Step step(precision_called(arguments[0]), model,
            AdamWOptions{.lr = 3e-3, .weight_decay = 0.1, .moments = moments},
            {.max_grad_norm = 0.5, .micro_batches = kBatches, .precision = options});
  int skipped = 0;
  for (int64_t number = 0; number < std::atoi(arguments[1].c_str()); ++number) {
    int64_t next = ranks.share(kBatches).first;
    skipped += !step([&] {
                  const auto [ids, targets] = batch(number, next++);
                  return model.loss(ids, targets);
                }).stepped();
    if (number == 3) {  // what a user does between steps: a look, and a frozen weight
      (void)forward_hash(step, model);
      model.head->bias.set_requires_grad(false);
    }
    if (number == 5) model.head->bias.set_requires_grad(true);
  }
  return hash_of_one_process(ranks, step, arguments[3]) + " " + forward_hash(step, model) + " skipped " +
         std::to_string(skipped);
}

// arguments: folder
HALFSTEP_RANK_CASE(saved_while_training) {
  testing::Transformer model = made(/*seed=*/3);
  auto options = options_for(ranks);
  options.sharding = Sharding::Weights;
  Step step(Precision::bf16(), model, AdamWOptions{.lr = 3e-3}, {.precision = options});
  const auto hash_of_saved = [](const std::string& folder, int64_t number) {
    HALFSTEP_CHECK(verify_checkpoint(folder, number).empty(), "damaged");
    const Checkpoint saved = load_checkpoint(folder, number);
    return hash_of({&saved.part("precision"), &saved.part("optimizer")});
  };
  std::string text, expected;
  {
    CheckpointFolder checkpoints = folder_of(ranks, arguments[0]);
    for (int64_t number = 1; number <= 24; ++number) {
      (void)step([&] {
        const auto [ids, targets] = batch(number, ranks.rank());
        return model.loss(ids, targets);
      });
      if (number % 3 != 0) continue;  // what is being written meanwhile
      const std::string aside = arguments[0] + std::to_string(number);
      if (number >= 21) {
        save(ranks, step, aside);
        expected += hash_of_saved(aside, 1) + " ";
      }
      checkpoints.save_async(checkpoint_of(step, number));
    }
    checkpoints.wait();
    for (const int64_t number : checkpoints.steps()) text += hash_of_saved(arguments[0], number) + " ";
  }
  ranks.barrier();
  return text == expected ? "equal" : text + "expected " + expected;
}

TEST(InParts, AreSavedWhileTrainingGoesOn) {
  for (const int size : {1, 3}) {
    const testing::ScratchFolder folder;
    for (const std::string& text :
         texts_of_ranks(size, "saved_while_training", {(folder.path() / "run").string()}))
      EXPECT_EQ(text, "equal") << size << " ranks";
  }
}

// arguments: folder, rank
HALFSTEP_RANK_CASE(refused_while_training) {
  testing::Transformer model = made(/*seed=*/3);
  auto options = options_for(ranks);
  options.sharding = Sharding::States;
  Step step(Precision::bf16(), model, AdamWOptions{.lr = 3e-3}, {.precision = options});
  CheckpointFolder checkpoints = folder_of(ranks, arguments[0]);
  const auto train = [&] {
    (void)step([&] {
      const auto [ids, targets] = batch(1, ranks.rank());
      return model.loss(ids, targets);
    });
  };
  std::string text;
  for (int64_t number = 1; number <= 4; ++number) {
    Checkpoint checkpoint = checkpoint_of(step, number);
    // One rank's part that no manifest can have: an Error on all of them, by its number.
    if (number == 2 && std::to_string(ranks.rank()) == arguments[1])
      checkpoint.parts["a/b"] = checkpoint.parts["optimizer"];
    try {
      checkpoints.save_async(std::move(checkpoint));
    } catch (const Error& error) {
      text += detail::concat("at ", number, ": ", error.what(), "; ");
    }
    train();
  }
  checkpoints.wait();
  ranks.barrier();
  for (const int64_t number : checkpoints.steps()) text += std::to_string(number) + " ";
  return text;
}

TEST(InParts, WhatOneRankCannotSaveAllHearOf) {
  for (const char* rank : {"0", "2"}) {
    const testing::ScratchFolder folder;
    for (const std::string& text :
         texts_of_ranks(3, "refused_while_training", {(folder.path() / "run").string(), rank})) {
      EXPECT_NE(text.find(std::string("at 3: rank ") + rank + ": "), std::string::npos) << text;
      EXPECT_TRUE(text.ends_with("; 1 4 ")) << text;  // the third was not begun
    }
  }
}

// arguments: folder
HALFSTEP_RANK_CASE(saves_of_each_kind) {
  testing::Transformer model = made(/*seed=*/3);
  auto options = options_for(ranks);
  options.sharding = Sharding::Weights;
  Step step(Precision::bf16(), model, AdamWOptions{.lr = 3e-3}, {.precision = options});
  const auto train = [&] {
    (void)step([&] {
      const auto [ids, targets] = batch(1, ranks.rank());
      return model.loss(ids, targets);
    });
  };
  train();
  std::string text;
  const auto note = [&](auto body) {
    try {
      body();
    } catch (const RankError&) {
      throw;
    } catch (const Error& error) {
      text += error.what() + std::string("; ");
    }
  };
  // One rank's state that cannot be copied; two folders at a time.
  {
    CheckpointFolder one = folder_of(ranks, arguments[0] + "/one"),
                     two = folder_of(ranks, arguments[0] + "/two");
    for (int64_t number = 1; number <= 3; ++number) {
      Checkpoint checkpoint = checkpoint_of(step, number);
      StateDict own;
      own.set("cursor", int64_t{1000 + ranks.rank()});
      if (number == 2 && ranks.rank() == 1) own.set("sparse", torch::eye(3).to_sparse());
      checkpoint.parts["data"] = own;
      note([&] { one.save_async(checkpoint); });
      note([&] { two.save_async(checkpoint_of(step, number)); });
      train();
    }
    note([&] { one.wait(); });
    two.wait();
    for (const int64_t number : one.steps()) text += std::to_string(number) + " ";
    text += "and ";
    for (const int64_t number : two.steps()) text += std::to_string(number) + " ";
    const Checkpoint back = one.load(1, {{"precision", step.mixed_precision().state_dict()},
                                         {"optimizer", step.optimizer().state_dict()}});
    text += "cursor " + std::to_string(back.part("data").integer("cursor") - ranks.rank());
  }
  ranks.barrier();
  // By one rank, as if it had all.
  if (ranks.rank() == 0)
    note([&] { CheckpointFolder(arguments[0] + "/alone").save(checkpoint_of(step)); });
  else
    text += "give CheckpointFolder its CheckpointRanks";
  ranks.barrier();
  return text;
}

TEST(InParts, AreSavedByAllOrByNone) {
  const testing::ScratchFolder folder;
  for (const std::string& text : texts_of_ranks(2, "saves_of_each_kind", {folder.path().string()})) {
    EXPECT_TRUE(text.starts_with("rank 1: checkpoint: ")) << text;
    EXPECT_NE(text.find("'sparse' of part 'data'"), std::string::npos) << text;
    EXPECT_NE(text.find("; 1 and 2 3 cursor 1000"), std::string::npos) << text;
    EXPECT_NE(text.find("give CheckpointFolder its CheckpointRanks"), std::string::npos) << text;
  }
}

/// With parameters of no element, in a block and beside.
struct WithNothing : torch::nn::Module {
  WithNothing() {
    torch::manual_seed(5);
    for (int i = 0; i < 2; ++i) layers->push_back(torch::nn::Linear(16, 16));
    register_module("layers", layers);
    layers[0]->register_parameter("none", torch::zeros({0, 7}));
    register_parameter("nothing", torch::zeros({3, 0}));
  }
  at::Tensor loss(at::Tensor x) {
    for (const auto& layer : *layers) x = at::tanh(layer->as<torch::nn::Linear>()->forward(x));
    return x.square().mean();
  }
  torch::nn::ModuleList layers;
};

// arguments: sharding, folder
HALFSTEP_RANK_CASE(parameters_without_elements) {
  WithNothing model;
  auto options = options_for(ranks);
  options.sharding = sharding_called(arguments[0]);
  Step step(Precision::fp32(), model, AdamWOptions{.lr = 3e-3}, {.precision = options});
  for (int number = 0; number < 3; ++number) (void)step([&] { return model.loss(torch::ones({4, 16})); });
  return hash_of_one_process(ranks, step, arguments[1]);
}

TEST(InParts, ParametersWithoutElementsAreSaved) {
  const auto texts = [](int size, const char* sharding) {
    const testing::ScratchFolder folder;
    return texts_of_ranks(size, "parameters_without_elements", {sharding, folder.path().string()});
  };
  const std::string expected = texts(1, "none")[0];
  for (const char* sharding : {"states", "gradients", "weights"})
    for (const std::string& text : texts(2, sharding)) EXPECT_EQ(text, expected) << sharding;
}

class CanonicalInParts : public ::testing::TestWithParam<const char*> {};

TEST_P(CanonicalInParts, HaveTheBitsOfOneProcess) {
  const std::string precision = GetParam();
  const std::string steps = full_steps() ? full_steps() : "8";
  const auto texts = [&](int size, const char* sharding, const char* moments, const char* gather = "own") {
    const testing::ScratchFolder folder;
    return texts_of_ranks(size, "canonical_in_parts",
                          {precision, steps, sharding, folder.path().string(), moments, gather});
  };
  const std::string expected = texts(1, "none", "fp32")[0];
  EXPECT_EQ(expected.find("skipped 0") == std::string::npos, precision == "fp16") << expected;
  for (const char* sharding : {"states", "gradients", "weights"})
    for (const int size : full_steps() ? std::vector{2, 3, 4, 8} : std::vector{3})
      for (const std::string& text : texts(size, sharding, "fp32"))
        EXPECT_EQ(text, expected) << sharding << ", " << size << " ranks";
  if (precision != "bf16") return;
  const std::string eight_bit = texts(1, "none", "8bit")[0];
  EXPECT_NE(eight_bit, expected);
  for (const std::string& text : texts(3, "weights", "8bit")) EXPECT_EQ(text, eight_bit);
  const std::string in_fp8 = texts(2, "weights", "fp32", "fp8")[0];
  EXPECT_NE(in_fp8, expected);
  for (const std::string& text : texts(3, "weights", "fp32", "fp8")) EXPECT_EQ(text, in_fp8);
}

/// E4M3 with the smallest power of two per 32 elements for which nothing saturates, by arithmetic in FP64.
at::Tensor rounded_for_travel(const at::Tensor& weight) {
  const at::Tensor rounded = weight.detach().contiguous().clone();
  for (float *block = rounded.data_ptr<float>(), *end = block + rounded.numel(); block < end; block += 32) {
    double amax = 0;
    for (int i = 0; i < 32; ++i) amax = std::max(amax, std::abs(double{block[i]}));
    const double scale = std::exp2(std::ceil(std::log2(amax / 448)));
    for (int i = 0; i < 32; ++i) {
      const double value = block[i] / scale;
      // Steps of 2^-3 in a binade, and of 2^-9 below 2^-6.
      const double step = std::exp2(std::max(std::floor(std::log2(std::abs(value))), -6.0) - 3);
      block[i] = static_cast<float>(value == 0 ? 0 : std::nearbyint(value / step) * step * scale);
    }
  }
  return rounded;
}

// arguments: "" for the ranks' own way, "rounded" or "plain" for one process with such weights
HALFSTEP_RANK_CASE(gathered_in_fp8) {
  testing::Transformer model = made(/*seed=*/7);
  if (arguments[0] == "rounded") {
    const torch::NoGradGuard no_grad;
    for (const auto& item : model.blocks->named_parameters())
      if (item.value().dim() >= 2) item.value().copy_(rounded_for_travel(item.value()));
  }
  auto options = options_for(ranks);
  options.sharding = Sharding::Weights;
  options.gather = Gather::Fp8;
  MixedPrecision mp(Precision::fp32(), model, options);
  SGD optimizer(mp.params(), {.lr = 0.5});
  const auto [ids, targets] = batch(1, 1);
  const auto loss_of = [&, ids = ids, targets = targets] {
    return mp.forward([&] { return model.loss(ids, targets); });
  };
  const at::Tensor loss = loss_of();
  mp.backward(loss);
  std::ostringstream text;
  text << std::hexfloat << loss.item<double>() << " ";
  {
    const torch::NoGradGuard no_grad;
    text << loss_of().item<double>() << " ";
  }
  const GradSummary grads = mp.inspect_grads();
  text << grads.norm() << " ";
  (void)optimizer.step(grads.unclipped());
  mp.advance(grads);
  optimizer.zero_grad();
  const auto weight = model.blocks[1]->as<testing::TransformerBlock>()->up->weight;
  const auto sum_and_first = [&] {
    const torch::NoGradGuard no_grad;
    return mp.forward([&] {
      return std::pair(weight.to(at::kDouble).sum().item<double>(), weight.flatten()[0].item<double>());
    });
  };
  const auto [sum, first] = sum_and_first();
  // A write inside a forward without gradients changes that element, and rounds no other.
  {
    const torch::NoGradGuard no_grad;
    mp.forward([&] { return weight.select(0, 0).select(0, 0).fill_(3.0f); });
  }
  const auto [sum_after, first_after] = sum_and_first();
  const bool kept = first_after == 3 && std::abs(sum_after - (sum - first + 3)) < 1e-9;
  text << (kept ? "kept" : detail::concat("sum ", sum, " became ", sum_after));
  // A look at the weights in the middle of a forward that trains leaves the rest of it as it was.
  double inner = 0;
  const at::Tensor outer = mp.forward([&] {
    {
      const torch::NoGradGuard no_grad;
      inner = loss_of().item<double>();
    }
    return model.loss(ids, targets);
  });
  text << (inner != outer.item<double>() && outer.item<double>() == loss_of().item<double>() ? " same"
                                                                                             : " changed");
  if (ranks.size() == 1) return text.str() + " refused";
  // In one that trains it cannot be told what was written.
  try {
    mp.backward(mp.forward([&] {
      {
        const torch::NoGradGuard no_grad;
        weight.fill_(1.0f);
      }
      return model.loss(ids, targets);
    }));
  } catch (const std::exception& error) {
    const bool says =
        std::string(error.what()).find("was written in a forward that trains") != std::string::npos;
    return text.str() + (says ? " refused" : detail::concat(" ", error.what()));
  }
  return text.str() + " silent";
}

TEST(InParts, WeightsMayTravelInFp8) {
  const auto words = [](const std::string& text) {
    std::istringstream in(text);
    std::vector<std::string> found;
    for (std::string word; in >> word;) found.push_back(word);
    return found;
  };
  const auto rounded = words(texts_of_ranks(1, "gathered_in_fp8", {"rounded"})[0]);
  const auto plain = words(texts_of_ranks(1, "gathered_in_fp8", {"plain"})[0]);
  EXPECT_NE(rounded[0], plain[0]);
  const auto two = texts_of_ranks(2, "gathered_in_fp8", {""});
  for (const std::string& text : two) {
    const auto found = words(text);
    EXPECT_EQ(found[0], rounded[0]) << "a step's forward uses rounded weights";
    EXPECT_EQ(found[1], plain[1]) << "a forward without gradients uses the weights themselves";
    // Both ranks have the same batch: their mean is exact, and the norm is added in another order.
    EXPECT_NEAR(std::strtod(found[2].c_str(), nullptr), std::strtod(rounded[2].c_str(), nullptr), 1e-6);
    EXPECT_TRUE(text.ends_with("kept same refused")) << text;
  }
}

INSTANTIATE_TEST_SUITE_P(Of, CanonicalInParts,
                         ::testing::Values("fp32", "bf16", "fp16", "fp8-delayed", "mxfp8"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::erase(name, '-');
                           return name;
                         });

TEST(InParts, GradientsAreThoseOfOneProcessWithinRoundings) {
  for (const char* sharding : {"states", "gradients", "weights"})
    for (const char* accumulation : {"sum", "none"})
      for (const char* type : {"fp32", "bf16"}) {
        // Each way of accumulating and each type with each sharding, and all four with weights in parts.
        const bool is_thin =
            *sharding == 'w' || (*accumulation == 's') == ((*type == 'b') == (*sharding == 's'));
        if (!full_steps() && !is_thin) continue;
        for (const int size : full_steps() ? std::vector{2, 3, 4, 8} : std::vector{type[0] == 'b' ? 2 : 3})
          for (const std::string& text : texts_of_ranks(
                   size, "fast", {type, accumulation, full_steps() ? full_steps() : "3", sharding})) {
            EXPECT_LE(std::stod(text), 1.0) << sharding << ", " << accumulation << ", " << size << " ranks";
            EXPECT_GT(std::stod(text), 0.0);
          }
      }
}

// arguments: precision, steps, sharding
HALFSTEP_RANK_CASE(parts_stay_together) {
  testing::Transformer model = made(ranks.rank() + 1);
  auto options = options_for(ranks);
  options.sharding = sharding_called(arguments[2]);
  Step step(precision_called(arguments[0]), model, AdamWOptions{.lr = 3e-3},
            {.max_grad_norm = 0.5, .micro_batches = 2, .precision = options});
  std::string text;
  for (int64_t number = 0; number < std::atoi(arguments[1].c_str()); ++number) {
    int64_t next = ranks.rank() * 2;
    const StepReport report = step([&] {
      const auto [ids, targets] = batch(number, next++);
      return model.loss(ids, targets);
    });
    std::ostringstream norm;
    norm << std::hexfloat << report.grad_norm();
    text += norm.str() + " " + forward_hash(step, model) + " ";
  }
  return text;
}

TEST(InParts, RanksSeeTheSameWeightsAndNorms) {
  for (const char* precision : {"bf16", "fp8-delayed"})
    for (const char* sharding : {"states", "gradients", "weights"})
      for (const int size : full_steps() ? std::vector{2, 3, 8} : std::vector{3}) {
        const auto texts = texts_of_ranks(size, "parts_stay_together",
                                          {precision, full_steps() ? full_steps() : "5", sharding});
        for (const std::string& text : texts) EXPECT_EQ(text, texts[0]) << precision << ", " << sharding;
      }
}

/// Blocks that share a weight and are computed again in backward, which adds to its gradient twice.
struct Regions : torch::nn::Module {
  Regions() {
    torch::manual_seed(1);
    for (int i = 0; i < 3; ++i) layers->push_back(torch::nn::Linear(64, 64));
    register_module("layers", layers);
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})));
  }
  at::Tensor loss(at::Tensor x, bool again) {
    for (const int64_t layer : {0, 1, 0, 2}) {
      const auto region = [this, layer](const at::Tensor& in) {
        return at::tanh(norm(layers[layer]->as<torch::nn::Linear>()->forward(in)));
      };
      x = again ? checkpoint_activations(region, x) : region(x);
    }
    return x.square().mean();
  }
  torch::nn::ModuleList layers;
  torch::nn::LayerNorm norm{nullptr};
};

HALFSTEP_RANK_CASE(regions_in_parts) {
  Regions model, twin;
  auto options = options_for(ranks);
  options.sharding = sharding_called(arguments[0]);
  MixedPrecision mp(Precision::fp32(), model, options);
  SGD optimizer(mp.params(), {.lr = 0.1});
  double worst = 0;
  for (int step = 0; step < 4; ++step) {
    const auto input = [&](int rank) {
      torch::manual_seed(100 * step + rank);
      return torch::randn({8, 64}).requires_grad_();
    };
    {
      const torch::NoGradGuard no_grad;
      mp.forward([&] {
        for (const auto& item : model.named_parameters())
          twin.named_parameters()[item.key()].copy_(item.value());
        return 0;
      });
    }
    // Two forwards before one backward, of which one is for nothing.
    (void)mp.forward([&] { return model.loss(input(ranks.rank()), false); });
    mp.backward(mp.forward([&] { return model.loss(input(ranks.rank()), /*again=*/step % 2 == 0); }));
    const GradSummary grads = mp.inspect_grads();
    twin.zero_grad();
    for (int rank = 0; rank < ranks.size(); ++rank) (twin.loss(input(rank), false) / ranks.size()).backward();
    for (const Param& param : mp.params()) {
      if (param.working.numel() == 0) continue;
      const at::Tensor expected = twin.named_parameters()[param.name].grad();
      const at::Tensor here = expected.flatten().narrow(0, param.first_element, param.working.numel());
      worst =
          std::max(worst, ((param.working.grad() - here).abs().max() / expected.abs().max()).item<double>());
    }
    (void)optimizer.step(grads.unclipped());
    mp.advance(grads);
    optimizer.zero_grad();
  }
  std::ostringstream text;
  text << worst;
  return text.str();
}

TEST(InParts, RegionsThatAreComputedAgainAreAddedWhole) {
  // Two orders of the same FP32 additions: far below a part that is missing, which is a half.
  for (const char* sharding : {"states", "gradients", "weights"})
    for (const std::string& text : texts_of_ranks(3, "regions_in_parts", {sharding}))
      EXPECT_LT(std::stod(text), 1e-5) << sharding << ": " << text;
}

HALFSTEP_RANK_CASE(weights_are_away) {
  testing::Transformer model = made(1);
  auto options = options_for(ranks);
  options.sharding = Sharding::Weights;
  Step step(Precision::bf16(), model, AdamWOptions{.lr = 1e-3}, {.precision = options});
  std::string text;
  try {
    const torch::NoGradGuard no_grad;
    model.blocks[1]->as<testing::TransformerBlock>()->qkv->weight.zero_();
  } catch (const std::exception& error) {
    text = std::string(error.what()).substr(0, 200);
  }
  // No harm is done: training goes on.
  const auto [ids, targets] = batch(0, ranks.rank());
  const StepReport report = step([&, ids = ids, targets = targets] { return model.loss(ids, targets); });
  return text + " | " + report.sentence();
}

TEST(InParts, WeightsThatAreAwaySaySo) {
  for (const std::string& text : texts_of_ranks(2, "weights_are_away")) {
    EXPECT_NE(text.find("weights of 'blocks.1' are read or written while each rank has its part"),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("| stepped"), std::string::npos) << text;
  }
}

// arguments: sharding
HALFSTEP_RANK_CASE(edits_in_parts) {
  testing::Transformer model = made(1);
  auto options = options_for(ranks);
  options.sharding = sharding_called(arguments[0]);
  Step step(Precision::bf16(), model, AdamWOptions{.lr = 1e-3}, {.precision = options});
  const auto one_step = [&](int64_t number) {
    const auto [ids, targets] = batch(number, 0);  // the same batch on all ranks
    (void)step([&, ids = ids, targets = targets] { return model.loss(ids, targets); });
  };
  one_step(0);
  {
    const torch::NoGradGuard no_grad;
    model.head->weight.mul_(0.5);
    model.tokens->weight.data()[3].zero_();
  }
  one_step(1);
  std::string text = forward_hash(step, model);
  model.head->weight.set_data(torch::ones_like(model.head->weight));
  try {
    one_step(2);
    text += " went on";
  } catch (const Error& error) {
    text += std::string(" ") + error.what();
  }
  return text;
}

TEST(InParts, EditsBetweenStepsCountAsInOneProcess) {
  // The mean of one gradient with itself is exact for two ranks.
  const std::string alone = texts_of_ranks(1, "edits_in_parts", {"none"})[0];
  const std::string hash = alone.substr(0, alone.find(' '));
  for (const char* sharding : {"states", "gradients"})
    for (const std::string& text : texts_of_ranks(2, "edits_in_parts", {sharding})) {
      EXPECT_EQ(text.substr(0, text.find(' ')), hash) << sharding;
      EXPECT_NE(text.find("other memory was put under 'head.weight'"), std::string::npos) << text;
    }
}

/// Ranks whose forwards take different ways through the model.
HALFSTEP_RANK_CASE(other_order) {
  Regions model;
  auto options = options_for(ranks);
  options.sharding = Sharding::Weights;
  MixedPrecision mp(Precision::fp32(), model, options);
  SGD optimizer(mp.params(), {.lr = 0.1});
  mp.backward(mp.forward([&] {
    at::Tensor x = torch::ones({2, 64});
    for (int i = 0; i < 2; ++i)
      x = at::tanh(model.layers[(i + ranks.rank()) % 2]->as<torch::nn::Linear>()->forward(x));
    return x.mean();
  }));
  (void)mp.inspect_grads();
  return "went on";
}

TEST(InParts, OtherWaysThroughTheModelAreFoundOut) {
  RankProcesses processes(2, "other_order", {}, /*timeout_ms=*/5000);
  for (const RankOutcome& outcome : processes.outcomes()) {
    EXPECT_EQ(outcome.exit_code, 3) << outcome.text;
    EXPECT_NE(outcome.text.find("in different orders"), std::string::npos) << outcome.text;
  }
}

// arguments: folder, precision, sharding of the one that saves and of the one that loads, "save" or "load"
HALFSTEP_RANK_CASE(saves_or_loads) {
  const std::string& folder = arguments[0];
  const bool saves = arguments[4] == "save";
  testing::Transformer model = made(saves ? 1 : 2);
  model.tokens->weight.set_requires_grad(false);  // when it is made: its moments and master come later
  auto options = options_for(ranks);
  options.sharding = sharding_called(arguments[saves ? 2 : 3]);
  Step step(precision_called(arguments[1]), model,
            AdamWOptions{.lr = 3e-3, .moments = MomentStorage::Blockwise8}, {.precision = options});
  if (saves) {
    for (int64_t number = 0; number < 4; ++number) {
      if (number == 1) model.tokens->weight.set_requires_grad(true);
      const auto [ids, targets] = batch(number, ranks.rank());
      (void)step([&, ids = ids, targets = targets] { return model.loss(ids, targets); });
    }
    const std::string whole = hash_of_one_process(ranks, step, folder);
    return forward_hash(step, model) + " " + whole;
  }
  const Checkpoint saved = load_checkpoint(
      folder, 1,
      {{"precision", step.mixed_precision().state_dict()}, {"optimizer", step.optimizer().state_dict()}});
  step.mixed_precision().load_state_dict(saved.part("precision"));
  step.optimizer().load_state_dict(saved.part("optimizer"));
  // All of it, put together by each rank from what all have now.
  const std::string again = folder + "/again-" + std::to_string(ranks.size()) + arguments[3];
  const std::string whole = hash_of_one_process(ranks, step, again);
  return forward_hash(step, model) + " " + whole;
}

TEST(InParts, StatesFitAnyOtherNumberOfRanks) {
  const std::vector<int> sizes = full_steps() ? std::vector{1, 2, 3, 4, 8} : std::vector{1, 3};
  const std::vector<std::string> shardings{"states", "gradients", "weights"};
  for (std::size_t from = 0; from < sizes.size(); ++from)
    for (std::size_t k = 0; k < shardings.size(); ++k) {
      const testing::ScratchFolder folder;
      const std::string& saved_as = shardings[k];
      const std::string expected = texts_of_ranks(sizes[from], "saves_or_loads",
                                                  {folder.path().string(), "bf16", saved_as, "", "save"})[0];
      for (const int to : sizes) {
        std::vector<std::string> all_loaded_as{"none", "states", "gradients", "weights"};
        // Another sharding than it was saved with, and none.
        if (!full_steps())
          all_loaded_as = {to == 3 && k == 1 ? "none" : shardings[(k + 1) % shardings.size()]};
        for (const std::string& loaded_as : all_loaded_as)
          for (const std::string& text : texts_of_ranks(
                   to, "saves_or_loads", {folder.path().string(), "bf16", saved_as, loaded_as, "load"}))
            EXPECT_EQ(text, expected) << sizes[from] << " " << saved_as << " to " << to << " " << loaded_as;
      }
      if (full_steps()) {  // a quarter of an hour
        std::printf("saved on %d ranks, %s: loaded on all\n", sizes[from], saved_as.c_str());
        std::fflush(stdout);
      }
      // In one process, from what load_checkpoint makes of it.
      testing::Transformer model = made(5);
      Step step(Precision::bf16(), model, AdamWOptions{.moments = MomentStorage::Blockwise8},
                {.precision = options_for({})});
      const Checkpoint whole = load_checkpoint(folder.path(), 1);
      step.mixed_precision().load_state_dict(whole.part("precision"));
      step.optimizer().load_state_dict(whole.part("optimizer"));
      const StateDict precision = step.mixed_precision().state_dict(),
                      optimizer = step.optimizer().state_dict();
      EXPECT_EQ(forward_hash(step, model) + " " + hash_of({&precision, &optimizer}), expected);
    }
}

// arguments: sharding
HALFSTEP_RANK_CASE(operations_on_two_blocks) {
  Regions model;
  auto options = options_for(ranks);
  options.sharding = sharding_called(arguments[0]);
  MixedPrecision mp(Precision::fp32(), model, options);
  SGD optimizer(mp.params(), {.lr = 0.1});
  const auto weight = [&](int64_t layer) { return model.layers[layer]->as<torch::nn::Linear>()->weight; };
  std::ostringstream text;
  text << std::hexfloat;
  for (int step = 0; step < 3; ++step) {
    const at::Tensor loss = mp.forward([&] {
      const at::Tensor product = at::mm(weight(0), weight(1));
      const at::Tensor chained = at::linalg_multi_dot({weight(2), weight(0), weight(1)});
      const at::Tensor summed = at::einsum("ij,jk->ik", {weight(1), weight(2)});
      return (product + chained + summed +
              at::baddbmm(weight(0).unsqueeze(0), weight(1).unsqueeze(0), weight(2).unsqueeze(0))[0])
          .square()
          .mean();
    });
    mp.backward(loss);
    const GradSummary grads = mp.inspect_grads();
    text << loss.item<double>() << " ";
    (void)optimizer.step(grads.unclipped());
    mp.advance(grads);
    optimizer.zero_grad();
  }
  {
    const torch::NoGradGuard no_grad;
    mp.forward([&] { return weight(1).mul_(0.5).sum(); });  // an edit while it is there
    text << mp.forward([&] { return weight(1).sum(); }).item<double>();
  }
  return text.str();
}

TEST(InParts, OperationsOnTwoBlocksAndEditsInForwardAreRight) {
  // The same on both ranks, whose mean is exact.
  const std::string expected = texts_of_ranks(1, "operations_on_two_blocks", {"none"})[0];
  for (const char* sharding : {"states", "gradients", "weights"})
    for (const std::string& text : texts_of_ranks(2, "operations_on_two_blocks", {sharding}))
      EXPECT_EQ(text, expected) << sharding;
}

// arguments: what does not go together
HALFSTEP_RANK_CASE(parts_refused) {
  Regions model;
  auto options = options_for(ranks);
  options.sharding = Sharding::Weights;
  const bool first = ranks.rank() == 0;
  if (arguments[0] == "blocks")
    options = {.ranks = ranks, .sharding = Sharding::States, .blocks = {"layers.*"}};
  if (arguments[0] == "gather")
    options = {.ranks = ranks, .sharding = Sharding::Gradients, .gather = Gather::Fp8};
  if (arguments[0] == "other gather" && first) options.gather = Gather::Fp8;
  if (arguments[0] == "other sharding" && first) options.sharding = Sharding::States;
  if (arguments[0] == "other blocks" && first) options.blocks = {"layers.1"};
  if (arguments[0] == "no such block") options.blocks = {"towers.*"};
  if (arguments[0] == "canonical") options.reduction.canonical_batches = 3;
  try {
    const MixedPrecision mp(Precision::fp32(), model, options);
  } catch (const Error& error) {
    return error.what();
  }
  return "taken";
}

TEST(InParts, WhatDoesNotGoTogetherIsRefusedOnEveryRank) {
  for (const auto& [what, why] :
       {std::pair{"blocks", "for Sharding::Weights"},
        {"gather", "for Sharding::Weights"},
        {"other gather", "different precisions (their rules"},
        {"other sharding", "different precisions (their rules"},
        {"other blocks", "different precisions (their rules"},
        {"no such block", "towers.*"},
        {"canonical", "a canonical sum of 3 micro-batches with Sharding::Weights on 2"}})
    for (const std::string& text : texts_of_ranks(2, "parts_refused", {what}))
      EXPECT_NE(text.find(why), std::string::npos) << what << ": " << text;
}

/// Two models under one precision: the second is updated while a graph of the first is kept.
HALFSTEP_RANK_CASE(graph_of_another_model) {
  torch::manual_seed(3);
  torch::nn::Linear maker(16, 16), critic(16, 1);
  const auto nothing = maker->register_parameter("nothing", torch::empty({0, 4}));
  auto options = options_for(ranks);
  options.sharding = sharding_called(arguments[0]);
  options.accumulation = Accumulation::Fp32;
  MixedPrecision mp(Precision::fp32(), std::vector<NamedModel>{{"maker", *maker}, {"critic", *critic}},
                    options);
  SGD critic_optimizer(mp.params("critic"), {.lr = 0.1}), maker_optimizer(mp.params("maker"), {.lr = 0.1});
  const at::Tensor made_up = mp.forward([&] { return at::tanh(maker(torch::ones({4, 16}))); });
  mp.backward(mp.forward([&] { return critic(made_up.detach()).mean(); }));
  mp.close_sum();
  GradSummary grads = mp.inspect_grads();
  (void)critic_optimizer.step(grads.unclipped());
  mp.advance(grads);
  critic_optimizer.zero_grad();
  mp.backward(mp.forward([&] { return -critic(made_up).mean(); }));
  mp.close_sum();
  grads = mp.inspect_grads();
  (void)maker_optimizer.step(grads.unclipped());
  mp.advance(grads);
  const torch::NoGradGuard no_grad;
  std::ostringstream text;
  text << std::hexfloat
       << mp.forward([&] { return maker->weight.sum() + critic->weight.sum(); }).item<double>();
  return text.str();
}

TEST(InParts, AGraphOfAModelThatWasNotUpdatedStaysGood) {
  const std::string expected = texts_of_ranks(1, "graph_of_another_model", {"none"})[0];
  for (const char* sharding : {"states", "weights"})
    for (const std::string& text : texts_of_ranks(2, "graph_of_another_model", {sharding}))
      EXPECT_EQ(text, expected) << sharding;
}

}  // namespace
}  // namespace halfstep
