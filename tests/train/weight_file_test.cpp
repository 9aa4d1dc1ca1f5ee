// Files for programs without Halfstep: what torch::load makes of them in a plain module. Another process
// reads one in tests/guide.
#include <gtest/gtest.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/optim.h>
#include <torch/script.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/bits.h"
#include "support/error_of.h"
#include "support/scratch.h"
#include "support/states.h"

namespace halfstep::testing::weight_file_test {

/// Tied weights, running statistics, buffers of whole numbers, a layer without a bias, a layer that has
/// nothing, and one that LibTorch does not write.
struct Net : torch::nn::Module {
  Net()
      : tokens(register_module("tokens", torch::nn::Embedding(16, 32))),
        tied(register_parameter("tied", tokens->weight)),
        order(register_buffer("order", torch::arange(31, -1, -1))),
        scales(register_buffer("scales", torch::linspace(0.9, 1.1, 32))),
        body(register_module(
            "body",
            torch::nn::Sequential(
                torch::nn::Linear(torch::nn::LinearOptions(32, 32).bias(false)), torch::nn::BatchNorm1d(32),
                torch::nn::GELU(), torch::nn::Functional(torch::relu), torch::nn::Linear(32, 32),
                torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(32).track_running_stats(false))))) {}
  at::Tensor forward(const at::Tensor& ids) {
    const at::Tensor x = tokens(ids).index_select(1, order);
    return torch::linear(body->forward(x * scales.to(x.scalar_type())), tied);
  }
  torch::nn::Embedding tokens;
  at::Tensor tied, order, scales;
  torch::nn::Sequential body;
};

struct Training {
  explicit Training(const Precision& precision, Accumulation accumulation = Accumulation::None)
      : model((torch::manual_seed(1), std::make_shared<Net>())) {
    for (auto& item : model->body->named_parameters())
      if (item.key().starts_with("4.")) item.value().requires_grad_(false);
    mp.emplace(precision, *model,
               MixedPrecisionOptions{.autocast = testing::kAnyMachine, .accumulation = accumulation});
    optimizer.emplace(mp->params(), AdamWOptions{.lr = 1e-2});
  }

  at::Tensor loss(int step) {
    torch::manual_seed(100 + step);
    const at::Tensor ids = torch::randint(16, {24}), next = torch::randint(16, {24});
    return mp->forward([&] { return torch::cross_entropy_loss(model->forward(ids), next); });
  }
  void train(int from, int to) {
    for (int step = from; step < to; ++step) {
      mp->backward(loss(step));
      mp->close_sum();
      const auto grads = mp->inspect_grads();
      ASSERT_TRUE(optimizer->step(grads.clipped_to(1.0)).stepped());
      mp->advance(grads);
      optimizer->zero_grad();
    }
  }

  std::shared_ptr<Net> model;
  std::optional<MixedPrecision> mp;
  std::optional<AdamW> optimizer;
};

/// As docs/guide.md has it.
void round_to_bf16(torch::nn::Module& model) {
  for (at::Tensor tensor : model.parameters()) tensor.set_data(tensor.to(torch::kBFloat16));
  for (at::Tensor tensor : model.buffers())
    if (tensor.is_floating_point()) tensor.set_data(tensor.to(torch::kBFloat16));
}

at::Tensor logits_of(Net& model) {
  const torch::NoGradGuard no_grad;
  model.eval();
  return model.forward(torch::arange(16));
}

TEST(WeightFile, Fp32HasEveryBitOfTheMastersAndSavingChangesNothing) {
  const ScratchFolder scratch;
  const std::string file = scratch / "model.pt";
  for (const Precision& precision :
       {Precision::bf16(), Precision::bf16(WeightStorage::Fp32Master), Precision::bf16(WeightStorage::Kahan),
        Precision::bf16(WeightStorage::Stochastic), Precision::bf16(WeightStorage::Fp32), Precision::fp16(),
        Precision::fp32()}) {
    auto given = precision;
    if (given.loss_scaling) given.loss_scaling->initial = 0x1p8;
    Training run(given), twin(given);
    run.train(0, 3);
    run.mp->save_weights(file, *run.model);

    const auto plain = std::make_shared<Net>(), by_hand = std::make_shared<Net>();
    torch::load(plain, file);
    for (const Param& param : run.mp->params()) {
      const at::Tensor found = plain->named_parameters()[param.name];
      EXPECT_TRUE(bit_equal(found, full_precision(param))) << given.name() << " " << param.name;
      const torch::NoGradGuard no_grad;
      by_hand->named_parameters()[param.name].copy_(full_precision(param));
    }
    for (const auto& item : run.model->named_buffers()) {
      EXPECT_TRUE(bit_equal(plain->named_buffers()[item.key()], item.value())) << item.key();
      by_hand->named_buffers()[item.key()].copy_(item.value());
    }
    EXPECT_TRUE(plain->tied.is_alias_of(plain->tokens->weight)) << "one tensor in the module that reads it";
    EXPECT_TRUE(bit_equal(logits_of(*plain), logits_of(*by_hand))) << given.name();

    run.train(3, 6);
    twin.train(0, 6);
    expect_same_state(twin.mp->state_dict(), run.mp->state_dict());
    expect_same_state(twin.optimizer->state_dict(), run.optimizer->state_dict());
  }
}

TEST(WeightFile, Bf16HasTheWeightsThatForwardUses) {
  const ScratchFolder scratch;
  const std::string file = scratch / "model.pt";
  auto mixed = Precision::bf16();
  mixed.keep("body.1.*", WeightStorage::Fp32);
  for (const Precision& precision : {mixed, Precision::bf16(WeightStorage::Fp32), Precision::fp32()}) {
    Training run(precision);
    run.train(0, 3);
    run.mp->save_weights(file, *run.model, at::kBFloat16);
    const auto plain = std::make_shared<Net>();
    round_to_bf16(*plain);
    torch::load(plain, file);
    for (const Param& param : run.mp->params())
      EXPECT_TRUE(bit_equal(plain->named_parameters()[param.name], param.working.detach().to(at::kBFloat16)))
          << param.name;
    for (const auto& item : run.model->named_buffers())
      EXPECT_TRUE(bit_equal(plain->named_buffers()[item.key()],
                            item.value().is_floating_point() ? item.value().to(at::kBFloat16) : item.value()))
          << item.key();
    EXPECT_EQ(plain->order.scalar_type(), at::kLong);

    run.model->eval();
    const at::Tensor expected = run.mp->forward([&] {
      const torch::NoGradGuard no_grad;
      return run.model->forward(torch::arange(16)).to(at::kFloat);
    });
    // About six roundings to BF16 on the way, each of up to 2^-9 of the largest logit in both of them.
    const double bound = 12 * 0x1p-9 * expected.abs().max().item<double>();
    const at::Tensor off = (logits_of(*plain).to(at::kFloat) - expected).abs().max();
    EXPECT_LE(off.item<double>(), bound);
    std::printf("%s: BF16 logits are off by %.4f, bound %.4f\n", precision.name().c_str(), off.item<double>(),
                bound);
  }
}

// What docs/guide.md says of torch::load in LibTorch 2.13.
TEST(WeightFile, TorchLoadLeavesTheTypesOfTheModule) {
  const ScratchFolder scratch;
  const std::string full = scratch / "full.pt", low = scratch / "low.pt";
  Training run(Precision::bf16());
  run.mp->save_weights(full, *run.model);
  run.mp->save_weights(low, *run.model, at::kBFloat16);
  const auto plain = std::make_shared<Net>();
  std::string said;
  try {
    torch::load(plain, low);
  } catch (const c10::Error& error) {
    said = error.what_without_backtrace();
  }
  EXPECT_NE(said.find("out of bounds for storage"), std::string::npos)
      << "FP32 tensors, BF16 file: too few bytes. " << said;

  const auto rounded = std::make_shared<Net>();
  round_to_bf16(*rounded);
  torch::load(rounded, full);
  EXPECT_EQ(rounded->tied.scalar_type(), at::kBFloat16) << "BF16 tensors, FP32 file: read as BF16, no error";
  EXPECT_FALSE(bit_equal(rounded->tied, run.model->tied));

  const auto all = std::make_shared<Net>();
  all->to(torch::kBFloat16);
  EXPECT_EQ(all->order.scalar_type(), at::kBFloat16) << "Module::to converts whole numbers, too";

  // Why floating-point buffers are rounded with the weights.
  const at::Tensor x = torch::randn({4, 3}).to(at::kBFloat16), weight = torch::ones({3}, at::kBFloat16);
  EXPECT_THROW(torch::batch_norm(x, weight, weight, torch::zeros({3}), torch::ones({3}), /*training=*/false,
                                 0.1, 1e-5, false),
               c10::Error);
}

TEST(WeightFile, OneOfSeveralModelsOrAPartOfOne) {
  const ScratchFolder scratch;
  const std::string file = scratch / "part.pt";
  torch::nn::Linear generator(4, 4), critic(4, 1), stranger(4, 4);
  MixedPrecision mp(Precision::bf16(), {{"generator", *generator}, {"critic", *critic}},
                    {.autocast = kAnyMachine});
  mp.save_weights(file, critic);
  torch::nn::Linear read(4, 1);
  torch::load(read, file);
  EXPECT_TRUE(bit_equal(read->weight, full_precision(mp.params("critic")[0])));
  EXPECT_NE(error_of([&] { mp.save_weights(file, stranger); }).find("parameter 'weight' is not among the 4"),
            std::string::npos);

  Training run(Precision::bf16());
  run.mp->save_weights(file, run.model->body);
  const auto plain = std::make_shared<Net>();
  torch::load(plain->body, file);
  EXPECT_TRUE(bit_equal(plain->body->parameters()[0], full_precision(run.mp->params()[1])));
}

TEST(WeightFile, OtherTypesAndTheMiddleOfAStepAreRefused) {
  const ScratchFolder scratch;
  const std::string file = scratch / "model.pt";
  for (const Accumulation accumulation : {Accumulation::None, Accumulation::Fp32}) {
    Training run(Precision::bf16(), accumulation);
    const auto save = [&] { return error_of([&] { run.mp->save_weights(file, *run.model); }); };
    for (const auto type : {at::kHalf, at::kDouble, at::kLong})
      EXPECT_NE(error_of([&] {
                  run.mp->save_weights(file, *run.model, type);
                }).find(detail::concat("save_weights as ", type, "; it writes at::kFloat")),
                std::string::npos);
    const auto refused = [&] { return save().find("in the middle of a step") != std::string::npos; };
    EXPECT_FALSE(refused());
    run.mp->backward(run.loss(0));
    EXPECT_TRUE(refused());
    run.mp->zero_grad();
    EXPECT_FALSE(refused());
    run.mp->backward(run.loss(0));
    run.mp->close_sum();
    const auto grads = run.mp->inspect_grads();
    EXPECT_TRUE(refused());
    (void)run.optimizer->step(grads.unclipped());
    EXPECT_TRUE(refused());
    run.mp->advance(grads);
    EXPECT_EQ(save(), "no error");
  }
}

TEST(WeightFile, WhatTheDiskRefusesLeavesTheModelAsItWas) {
  Training run(Precision::bf16()), twin(Precision::bf16());
  EXPECT_THROW(run.mp->save_weights("/dev/full", *run.model), FileError);
  EXPECT_THROW(run.mp->save_weights("/no/such/folder/model.pt", *run.model), FileError);
  expect_same_state(twin.mp->state_dict(), run.mp->state_dict());
  run.train(0, 2);
  twin.train(0, 2);
  expect_same_state(twin.mp->state_dict(), run.mp->state_dict());
}

TEST(WeightFile, FollowsASaveOfTheModulesOwn) {
  struct Own : torch::nn::Module {
    Own() : layer(register_module("layer", torch::nn::Linear(3, 3))) {}
    void save(torch::serialize::OutputArchive& archive) const override {
      archive.write("mine", layer->weight);
      archive.write("epoch", c10::IValue(7));
    }
    torch::nn::Linear layer;
  };
  const ScratchFolder scratch;
  const std::string file = scratch / "own.pt";
  Own model;
  MixedPrecision mp(Precision::bf16(), model, {.autocast = kAnyMachine});
  mp.save_weights(file, model);
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  at::Tensor mine;
  c10::IValue epoch;
  archive.read("mine", mine);
  archive.read("epoch", epoch);
  EXPECT_TRUE(bit_equal(mine, full_precision(mp.params()[0])));
  EXPECT_EQ(epoch.toInt(), 7);
  EXPECT_EQ(model.layer->weight.scalar_type(), at::kBFloat16);
}

TEST(WeightFile, TorchScriptModuleWithItsCode) {
  const ScratchFolder scratch;
  const std::string file = scratch / "script.pt";
  torch::manual_seed(1);
  torch::jit::Module module("m");
  module.register_parameter("weight", torch::randn({4, 4}), /*is_buffer=*/false);
  module.register_buffer("shift", torch::ones({4}));
  module.define("def forward(self, x):\n  return torch.matmul(x, self.weight) + self.shift\n");
  MixedPrecision mp(Precision::bf16(), module, {.autocast = kAnyMachine});
  const at::Tensor master = full_precision(mp.params()[0]), x = torch::randn({2, 4});
  mp.save_weights(file, module);
  torch::jit::Module plain = torch::jit::load(file);
  EXPECT_TRUE(bit_equal(plain.forward({x}).toTensor(), torch::matmul(x, master) + 1));
  mp.save_weights(file, module, at::kBFloat16);
  plain = torch::jit::load(file);
  EXPECT_EQ(plain.attr("weight").toTensor().scalar_type(), at::kBFloat16);
  EXPECT_EQ(plain.attr("shift").toTensor().scalar_type(), at::kBFloat16);
  EXPECT_EQ(module.attr("shift").toTensor().scalar_type(), at::kFloat);
}

}  // namespace halfstep::testing::weight_file_test
