// What a user does to a weight between two steps wins, whatever the storage and the door.
#include <gtest/gtest.h>
#include <halfstep/checkpoint.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>

#include "support/any_machine.h"
#include "support/bits.h"
#include "support/scratch.h"
#include "support/small_models.h"

namespace halfstep {
namespace weight_edits_test {

using testing::bit_equal;
using testing::kAnyMachine;
using testing::Mlp;

const MixedPrecisionOptions kHere{.autocast = kAnyMachine};
constexpr double kRate = 1e-2, kDecay = 0.1;
constexpr const char* kEdited = "body.2.weight";

struct Setting {
  const char* name;
  Precision precision;
};

std::vector<Setting> settings() {
  std::vector<Setting> all{{"fp32", Precision::fp32()}};
  for (const auto storage : {WeightStorage::Fp32, WeightStorage::Fp32Master, WeightStorage::SplitMaster,
                             WeightStorage::Kahan, WeightStorage::Stochastic, WeightStorage::Nearest}) {
    all.push_back({"bf16", Precision::bf16(storage)});
    if (storage != WeightStorage::SplitMaster) all.push_back({"fp16", Precision::fp16(storage)});
  }
  for (auto& [name, precision] : all)
    if (precision.loss_scaling) precision.loss_scaling->initial = 256;
  return all;
}

/// Where the edits come from: a model of the same shape that was never Halfstep's.
std::shared_ptr<Mlp> plain_model(int seed) {
  torch::manual_seed(seed);
  return std::make_shared<Mlp>(20, 24, 10);
}

/// An edit, and the values that it writes, in FP32.
struct Door {
  const char* name;
  std::function<void(Mlp&, MixedPrecision&)> edit;
};

at::Tensor weight_of(Mlp& model) { return model.named_parameters()[kEdited]; }

const std::vector<Door>& doors() {
  static const auto folder = std::make_shared<testing::ScratchFolder>();
  static const std::vector<Door> all{
      {"zero_", [](Mlp& m, auto&) { weight_of(m).zero_(); }},
      {"fill_", [](Mlp& m, auto&) { weight_of(m).fill_(0.3); }},
      {"copy_", [](Mlp& m, auto&) { weight_of(m).copy_(weight_of(*plain_model(5))); }},
      {"clamp_", [](Mlp& m, auto&) { weight_of(m).clamp_(0, 0.05); }},
      {"mul_ by a mask",
       [](Mlp& m, auto&) { weight_of(m).mul_(at::eye(24).to(weight_of(m).scalar_type())); }},
      {"data().zero_", [](Mlp& m, auto&) { weight_of(m).data().zero_(); }},
      {"data().copy_", [](Mlp& m, auto&) { weight_of(m).data().copy_(weight_of(*plain_model(5)).data()); }},
      {"set_data",
       [](Mlp& m, auto&) {
         weight_of(m).set_data(weight_of(*plain_model(5)).detach().to(weight_of(m).scalar_type()));
       }},
      {"set_data of FP32", [](Mlp& m, auto&) { weight_of(m).set_data(weight_of(*plain_model(5)).detach()); }},
      {"torch::load of FP32",
       [](Mlp& m, auto&) {
         const auto path = (folder->path() / "fp32.pt").string();
         torch::save(plain_model(5)->body, path);
         torch::load(m.body, path);
       }},
      {"torch::load of its own type",
       [](Mlp& m, auto&) {
         const auto path = (folder->path() / "low.pt").string();
         const auto other = plain_model(5);
         other->to(weight_of(m).scalar_type());
         torch::save(other->body, path);
         torch::load(m.body, path);
       }},
      {"load_module_state",
       [](Mlp& m, auto&) {
         const auto other = plain_model(5);
         other->to(weight_of(m).scalar_type());
         load_module_state(m, module_state(*other));
       }},
      {"Module::to(kFloat), then copy_",
       [](Mlp& m, auto&) {
         m.to(at::kFloat);
         weight_of(m).copy_(weight_of(*plain_model(5)));
       }},
      {"set_full_precision",
       [](Mlp&, MixedPrecision& mp) {
         for (const Param& param : mp.params())
           if (param.name == kEdited) set_full_precision(param, weight_of(*plain_model(5)).detach());
       }},
  };
  return all;
}

const Param& param_of(const MixedPrecision& mp) {
  for (const Param& param : mp.params())
    if (param.name == kEdited) return param;
  throw std::logic_error("no such parameter");
}

/// Half a unit in the last place of a working copy, relative to a value in its normal range; and the
/// smallest.
struct Rounding {
  double relative, smallest;
};
Rounding rounding_of(at::ScalarType type) {
  if (type == at::kBFloat16) return {0x1p-8, 0x1p-134};
  if (type == at::kHalf) return {0x1p-11, 0x1p-25};
  return {0x1p-24, 0x1p-150};
}

/// How far a storage may be from the exact result of one step from `edited` to `stepped`.
at::Tensor allowed(const Param& param, const at::Tensor& edited, const at::Tensor& stepped) {
  const auto [half_ulp, smallest] = rounding_of(param.working.scalar_type());
  // A master rounds to what was written: it may lie half an ulp of the working copy beside it.
  at::Tensor bound = half_ulp * edited.abs() + smallest;
  const at::Tensor rounding = half_ulp * stepped.abs() + smallest;
  switch (param.storage) {
    case WeightStorage::Stochastic:
      bound = bound + 2 * rounding;  // up or down, by a whole ulp
      break;
    case WeightStorage::Nearest:
      bound = bound + rounding;
      break;
    case WeightStorage::Kahan:
      bound = bound + half_ulp * rounding * 2 + smallest;  // the compensation's own rounding
      break;
    default:
      break;
  }
  // About ten FP32 operations, on numbers no larger than the weight and 1.
  return bound + 10 * 0x1p-24 * (stepped.abs() + edited.abs() + 2 * kRate);
}

struct Training {
  std::shared_ptr<Mlp> model = plain_model(1);
  MixedPrecision mp;
  AdamW optimizer;
  explicit Training(const Precision& precision)
      : mp(precision, *model, kHere), optimizer(mp.params(), {.lr = kRate, .weight_decay = kDecay}) {}

  /// What happens between backward and the optimizer is up to `look`.
  StepReport step(int number, const std::function<void()>& look = [] {}) {
    torch::manual_seed(100 + number);
    const at::Tensor x = torch::randn({32, 20}), target = torch::randint(10, {32});
    mp.backward(mp.forward([&] { return model->loss(x, target); }));
    look();
    const auto grads = mp.inspect_grads();
    const auto report = optimizer.step(grads.unclipped());
    mp.advance(grads);
    optimizer.zero_grad();
    return report;
  }
};

TEST(WeightEdits, NextStepIsFp32sStepFromTheEditedWeight) {
  for (const auto& [setting, precision] : settings())
    for (const Door& door : doors()) {
      SCOPED_TRACE(detail::concat(setting, " ", to_string(precision.weights), ", ", door.name));
      Training run(precision);
      for (int i = 0; i < 3; ++i) ASSERT_TRUE(run.step(i).stepped());
      {
        const torch::NoGradGuard no_grad;
        door.edit(*run.model, run.mp);
      }
      // What FP32 training would start from: the values that the door wrote, before any forward.
      const bool fp32_written = std::string_view(door.name).find("of FP32") != std::string_view::npos;
      const at::Tensor edited = (fp32_written ? weight_of(*plain_model(5)) : weight_of(*run.model))
                                    .detach()
                                    .to(at::kDouble)
                                    .clone();
      const StateDict state = run.optimizer.state_dict();
      const std::string prefix = std::string("param.") + kEdited + ".";
      const at::Tensor first = state.tensor(prefix + "first_moment").to(at::kDouble),
                       second = state.tensor(prefix + "second_moment").to(at::kDouble);
      at::Tensor grad;
      ASSERT_TRUE(run.step(3,
                           [&] {
                             const Param& param = param_of(run.mp);
                             grad = param.working.grad().to(at::kDouble) / run.mp.loss_scale();
                           })
                      .stepped());
      // AdamW in FP64, its fourth step.
      const at::Tensor m = 0.9 * first + 0.1 * grad, v = 0.999 * second + 0.001 * grad * grad;
      const at::Tensor stepped =
          edited * (1 - kRate * kDecay) -
          kRate / (1 - std::pow(0.9, 4)) * m / ((v / (1 - std::pow(0.999, 4))).sqrt() + 1e-8);
      const Param& param = param_of(run.mp);
      const at::Tensor error = (full_precision(param).to(at::kDouble) - stepped).abs();
      const at::Tensor share = error / allowed(param, edited, stepped);
      EXPECT_TRUE(share.le(1).all().item<bool>())
          << share.max().item<double>() << " of what is allowed; "
          << full_precision(param).isnan().sum().item<int64_t>() << " NaN";
      EXPECT_EQ(param.working.scalar_type(),
                precision.weights == WeightStorage::Fp32 ? at::kFloat : precision.compute);
    }
}

// Written between backward and step: written before forward, a NaN gives gradients that no step is taken
// with.
TEST(WeightEdits, NaNAndInfStayThroughAStep) {
  for (const auto& [setting, precision] : settings()) {
    SCOPED_TRACE(detail::concat(setting, " ", to_string(precision.weights)));
    Training run(precision);
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(run.step(i).stepped());
    at::Tensor written;
    ASSERT_TRUE(run.step(3,
                         [&] {
                           const torch::NoGradGuard no_grad;
                           at::Tensor flat = param_of(run.mp).working.view(-1);
                           flat.slice(0, 0, flat.numel(), 3).fill_(std::nan(""));
                           flat.slice(0, 1, flat.numel(), 3).fill_(-INFINITY);
                           written = flat.detach().clone();
                         })
                    .stepped());
    for (const at::Tensor& value : {full_precision(param_of(run.mp)), param_of(run.mp).working.detach()}) {
      EXPECT_TRUE(value.view(-1).masked_select(written.isnan()).isnan().all().item<bool>());
      EXPECT_TRUE(value.view(-1).isfinite().equal(written.isfinite()));
    }
  }
}

TEST(WeightEdits, Fp32FileIsTakenInWithAllItsBits) {
  const testing::ScratchFolder folder;
  const auto path = (folder.path() / "fp32.pt").string();
  for (const auto& precision :
       {Precision::bf16(), Precision::bf16(WeightStorage::Fp32Master), Precision::fp16()}) {
    Training run(precision);
    const auto file = plain_model(5);
    torch::save(file->body, path);
    torch::load(run.model->body, path);
    run.mp.forward([] {});
    for (const Param& param : run.mp.params())
      EXPECT_TRUE(bit_equal(full_precision(param), file->named_parameters()[param.name].detach()))
          << param.name;
  }
}

TEST(WeightEdits, PartOfALargerTensorIsNotTakenForAnFp32File) {
  for (const bool temporary : {false, true})
    for (const int steps : {0, 2}) {
      Training run(Precision::bf16());
      for (int i = 0; i < steps; ++i) ASSERT_TRUE(run.step(i).stepped());
      at::Tensor table = torch::randn({48, 24}).to(at::kBFloat16);
      const at::Tensor written = table.narrow(0, 0, 24).clone();
      weight_of(*run.model).set_data(table.narrow(0, 0, 24));
      if (temporary) table.reset();
      run.mp.forward([] {});
      EXPECT_TRUE(bit_equal(weight_of(*run.model).detach(), written)) << temporary << " " << steps;
    }
}

TEST(WeightEdits, PartOfALargerTensorThatIsThenEditedIsTakenAsItIs) {
  for (const auto& [name, precision] : settings()) {
    torch::nn::Embedding model(10, 4);
    MixedPrecision mp(precision, model, kHere);
    const auto type = model->weight.scalar_type();
    at::Tensor wanted;
    {
      const torch::NoGradGuard no_grad;
      // Twice as large, and nobody else holds it.
      model->weight.set_data(torch::randn({20, 4}).to(type).slice(0, 0, 10));
      model->weight[0].zero_();
      wanted = model->weight.detach().clone();
    }
    mp.forward([&] { return model(torch::tensor({1, 2})); });
    EXPECT_TRUE(bit_equal(model->weight.detach(), wanted)) << name << " " << to_string(precision.weights);
  }
}

TEST(WeightEdits, Fp32FileIsTakenInThoughSomebodyHoldsItsMemory) {
  const testing::ScratchFolder folder;
  const std::string path = (folder / "weights.pt").string();
  torch::nn::Linear from(8, 8);
  torch::save(from, path);
  for (const auto& [name, precision] : settings()) {
    if (precision.weights == WeightStorage::Fp32) continue;
    torch::nn::Linear model(8, 8);
    MixedPrecision mp(precision, model, kHere);
    torch::serialize::InputArchive archive;
    archive.load_from(path);
    model->load(archive);
    const at::Tensor alias = model->weight.detach().t();
    mp.forward([&] { return model(torch::ones({1, 8})); });
    const at::Tensor taken = full_precision(mp.params()[0]);
    EXPECT_LE((taken - from->weight).abs().max().item<double>(), 0x1p-8)
        << name << " " << to_string(precision.weights);
  }
}

TEST(WeightEdits, LoadedInInferenceModeTrainOn) {
  const testing::ScratchFolder folder;
  const auto path = (folder.path() / "fp32.pt").string();
  torch::save(plain_model(5)->body, path);
  Training run(Precision::bf16());
  torch::load(run.model->body, path);
  {
    const c10::InferenceMode inference;
    run.mp.forward([] {});
  }
  EXPECT_TRUE(run.step(0).stepped());
}

TEST(WeightEdits, RoundTripThroughFp32KeepsTheMaster) {
  for (const auto& precision :
       {Precision::bf16(), Precision::bf16(WeightStorage::Fp32Master), Precision::fp16()}) {
    Training run(precision);
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(run.step(i).stepped());
    std::vector<at::Tensor> before;
    for (const Param& param : run.mp.params()) before.push_back(full_precision(param));
    run.model->to(at::kFloat);
    run.mp.forward([] {});
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(bit_equal(full_precision(run.mp.params()[i]), before[i]));
      EXPECT_EQ(run.mp.params()[i].working.scalar_type(), precision.compute);
    }
  }
}

TEST(WeightEdits, ZeroedWeightsTrainOn) {
  for (const auto& [setting, precision] : settings()) {
    SCOPED_TRACE(detail::concat(setting, " ", to_string(precision.weights)));
    Training run(precision);
    {
      const torch::NoGradGuard no_grad;
      weight_of(*run.model).zero_();
    }
    for (int i = 0; i < 20; ++i) ASSERT_TRUE(run.step(i).stepped());
    const at::Tensor full = full_precision(param_of(run.mp));
    EXPECT_EQ(full.isnan().sum().item<int64_t>(), 0);
    EXPECT_EQ(full.eq(0).sum().item<int64_t>(), 0);
  }
}

TEST(WeightEdits, EmbeddingsMaxNormHoldsInEveryStorage) {
  for (const auto& [setting, precision] : settings()) {
    SCOPED_TRACE(detail::concat(setting, " ", to_string(precision.weights)));
    torch::manual_seed(1);
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(64, 32).max_norm(1.0));
    MixedPrecision mp(precision, embedding, kHere);
    AdamW optimizer(mp.params(), {.lr = 1e-2, .weight_decay = 0});
    for (int i = 0; i < 100; ++i) {
      const at::Tensor ids = torch::randint(64, {32});
      mp.backward(mp.forward([&] { return -embedding(ids).to(at::kFloat).sum(1).mean(); }));
      const auto grads = mp.inspect_grads();
      ASSERT_TRUE(optimizer.step(grads.unclipped()).stepped());
      mp.advance(grads);
      optimizer.zero_grad();
    }
    // A row is cut to 1 when it is looked up, and steps by at most 10 rates an element until the next look; a
    // row is left out of 32 of 64 draws with probability 0.6, so that a dozen steps in a row are rare.
    const double largest = embedding->weight.detach().to(at::kFloat).norm(2, 1).max().item<double>();
    EXPECT_LT(largest, 1 + 12 * 1e-2 * std::sqrt(32.0));
  }
}

TEST(WeightEdits, MastersOfElementsThatWereNotEditedKeepEveryUpdate) {
  // Clipping after each step, as weight clipping does: updates of 2^-12 of the weight must add up.
  for (const auto& precision : {Precision::bf16(), Precision::bf16(WeightStorage::Fp32Master),
                                Precision::bf16(WeightStorage::Kahan)}) {
    SCOPED_TRACE(to_string(precision.weights));
    torch::nn::Linear model(torch::nn::LinearOptions(8, 8).bias(false));
    {
      const torch::NoGradGuard no_grad;
      model->weight.fill_(1.0);
    }
    MixedPrecision mp(precision, model, kHere);
    SGD optimizer(mp.params(), {.lr = 0x1p-12});
    for (int i = 0; i < 256; ++i) {
      model->weight.mutable_grad() = at::ones({8, 8}, at::kBFloat16);
      const auto grads = mp.inspect_grads();
      (void)optimizer.step(grads.unclipped());
      mp.advance(grads);
      optimizer.zero_grad();
      const torch::NoGradGuard no_grad;
      model->weight.clamp_(-2, 2);
      model->weight[0][0] = 0.25;  // a real edit beside them
    }
    const at::Tensor full = full_precision(mp.params()[0]);
    EXPECT_FLOAT_EQ(full[1][1].item<float>(), 1 - 256 * 0x1p-12f);
    EXPECT_NEAR(full[0][0].item<float>(), 0.25, 0x1p-8 * 0.25);
  }
}

}  // namespace weight_edits_test
}  // namespace halfstep
