// A Probe sees the tensors of the steps that it looks at, and changes none of them.
#include <gtest/gtest.h>
#include <halfstep/probe.h>
#include <halfstep/train_step.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <stdexcept>

#include "support/any_machine.h"
#include "support/bits.h"
#include "support/python.h"
#include "support/scratch.h"
#include "support/small_models.h"

namespace halfstep {
namespace probe_test {

using testing::bit_equal;
using testing::kAnyMachine;
using testing::Mlp;

std::shared_ptr<Mlp> fresh_model() {
  torch::manual_seed(1);
  return std::make_shared<Mlp>(20, 24, 10);
}

at::Tensor batch_loss(Mlp& model, int number) {
  torch::manual_seed(100 + number);
  return model.loss(torch::randn({32, 20}), torch::randint(10, {32}));
}

std::vector<Precision> precisions() { return {Precision::fp32(), Precision::bf16(), Precision::fp16()}; }

TEST(Probe, LooksAtTheFirstStepAndEachThatItsNumberDivides) {
  auto model = fresh_model();
  TrainStep step(Precision::bf16(), *model, AdamWOptions{.lr = 1e-2},
                 {.precision = {.autocast = kAnyMachine}});
  Probe probe(step.mixed_precision(), {.every = 3});
  std::map<int64_t, std::map<std::string, int>> seen;
  for (int number = 1; number <= 8; ++number) {
    (void)step([&] { return batch_loss(*model, number); });
    for (const ProbeRecord& record : probe.take()) ++seen[record.step][record.role];
  }
  ASSERT_EQ(seen.size(), 3u);
  for (const int64_t at : {1, 3, 6}) {
    EXPECT_EQ(seen[at]["weight"], 6);
    EXPECT_EQ(seen[at]["gradient"], 6);
    EXPECT_EQ(seen[at]["update"], 6);
    EXPECT_EQ(seen[at]["activation"], 4);  // of three layers, and the logits
  }
}

/// The tensors of a step, written down for NumPy.
class Dump {
 public:
  void question(const std::string& what, const ProbeRecord& record, const at::Tensor& tensor,
                const at::Tensor& minus = {}) {
    nlohmann::json asked = {{"format", tensor.scalar_type() == at::kBFloat16 ? "BF16"
                                       : tensor.scalar_type() == at::kHalf   ? "FP16"
                                                                             : "FP32"},
                            {"file", written(tensor)}};
    if (minus.defined()) asked["minus"] = written(minus);
    questions_.push_back(std::move(asked));
    records_.emplace_back(what + ", " + record.role + " of " + record.name, record);
  }

  /// The records and NumPy's answers.
  void compare() const {
    const nlohmann::json answers =
        testing::ask_python("tests/kernels/statistics_oracle.py", {{"many", questions_}});
    ASSERT_EQ(answers.size(), records_.size());
    for (std::size_t i = 0; i < records_.size(); ++i)
      compare(records_[i].first, records_[i].second, answers[i]);
  }

 private:
  std::string written(const at::Tensor& tensor) {
    const at::Tensor values = tensor.detach().contiguous();
    const std::string path = (folder_.path() / std::to_string(files_++)).string();
    std::ofstream(path, std::ios::binary)
        .write(static_cast<const char*>(values.const_data_ptr()),
               static_cast<std::streamsize>(values.nbytes()));
    return path;
  }

  static void compare(const std::string& what, const ProbeRecord& record, const nlohmann::json& theirs) {
    const TensorStats& stats = record.stats;
    EXPECT_EQ(stats.count, theirs["count"]) << what;
    EXPECT_EQ(stats.zeros, theirs["zeros"]) << what;
    EXPECT_EQ(stats.nans, theirs["nans"]) << what;
    EXPECT_EQ(stats.infinities, theirs["infinities"]) << what;
    EXPECT_EQ(std::bit_cast<uint32_t>(stats.amax), theirs["amax"]) << what;
    EXPECT_EQ(stats.exponents, (theirs["exponents"].get<std::array<int64_t, 256>>())) << what;
    const auto count = static_cast<double>(stats.count);
    // A lane adds count / 16 values, the tree four times, 2^-53 each.
    EXPECT_LE(std::abs(stats.sum - theirs["sum"].get<double>()),
              (count / 16 + 5) * 0x1p-53 * theirs["magnitudes"].get<double>())
        << what;
    const auto expect_shares = [&](const FormatShares& shares, const nlohmann::json& counts,
                                   const std::string& in) {
      EXPECT_EQ(shares.zero, counts["zero"].get<double>() / count) << in;
      EXPECT_EQ(shares.subnormal, counts["subnormal"].get<double>() / count) << in;
      EXPECT_EQ(shares.saturated, counts["saturated"].get<double>() / count) << in;
      EXPECT_EQ(shares.non_finite, counts["non_finite"].get<double>() / count) << in;
    };
    for (const Format format :
         {Format::FP32, Format::BF16, Format::FP16, Format::E4M3, Format::E5M2, Format::E2M1}) {
      const char* const name = traits(format).name;
      expect_shares(stats.in(format), theirs["in"][name], what + " in " + name);
      expect_shares(stats.in_scaled(format), theirs["in_scaled"][name], what + " in " + name + ", scaled");
    }
  }

  testing::ScratchFolder folder_;
  int files_ = 0;
  nlohmann::json questions_ = nlohmann::json::array();
  std::vector<std::pair<std::string, ProbeRecord>> records_;
};

TEST(Probe, ItsNumbersOfEveryRoleAreNumPys) {
  Dump dump;
  std::map<std::string, FormatShares> seen;  // by role, the largest in any format
  Precision fp16 = Precision::fp16();
  fp16.loss_scaling->initial = 256;  // with which no gradient of this model is Inf
  const std::pair<const char*, Precision> kinds[] = {
      {"FP32", Precision::fp32()}, {"BF16", Precision::bf16()}, {"FP16", fp16}};
  for (const auto& [name, precision] : kinds) {
    auto model = fresh_model();
    {
      // Magnitudes at which formats end, on either side.
      const torch::NoGradGuard no_grad;
      at::Tensor weight = model->body[0]->as<torch::nn::Linear>()->weight;
      weight.mul_(at::exp2(torch::randint(-20, 4, weight.sizes())));
      weight[0][0] = 500;
      weight[1].mul_(1e-38);
    }
    MixedPrecision mp(precision, *model, {.autocast = kAnyMachine});
    AdamW optimizer(mp.params(), {.lr = 1e-2});
    Probe probe(mp, {.every = 1});
    std::map<std::string, at::Tensor> outputs;
    torch::manual_seed(5);
    const at::Tensor x = torch::randn({32, 20}) * at::exp2(torch::randint(-20, 3, {32, 20})),
                     target = torch::randint(10, {32});
    const at::Tensor loss = mp.forward([&] {
      at::Tensor y = x;
      for (std::size_t i = 0; i < model->body->size(); ++i) {
        if (auto* const linear = model->body[i]->as<torch::nn::Linear>())
          y = outputs["body." + std::to_string(i)] = linear->forward(y);
        else
          y = at::gelu(y);
      }
      outputs["body.4, logits after it"] = y;
      return torch::nn::functional::cross_entropy(y, target);
    });
    mp.backward(loss);
    const GradSummary grads = mp.inspect_grads();
    std::map<std::string, at::Tensor> gradients, before, after;
    for (const Param& param : mp.params()) {
      gradients[param.name] = param.working.grad().clone();
      before[param.name] = full_precision(param).clone();
    }
    (void)optimizer.step(grads.unclipped());
    mp.advance(grads);
    for (const Param& param : mp.params()) after[param.name] = full_precision(param);
    std::map<std::string, int> looked;
    for (const ProbeRecord& record : probe.take()) {
      const std::string what = name;
      if (record.role == "activation") dump.question(what, record, outputs.at(record.name));
      if (record.role == "gradient") dump.question(what, record, gradients.at(record.name));
      if (record.role == "weight") dump.question(what, record, after.at(record.name));
      if (record.role == "update") dump.question(what, record, after.at(record.name), before.at(record.name));
      ++looked[record.role];
      for (const Format format : {Format::FP16, Format::E4M3, Format::E2M1}) {
        const FormatShares shares = record.stats.in(format);
        FormatShares& most = seen[record.role];
        most.zero = std::max(most.zero, shares.zero);
        most.subnormal = std::max(most.subnormal, shares.subnormal);
        most.saturated = std::max(most.saturated, shares.saturated);
      }
    }
    EXPECT_EQ(looked,
              (std::map<std::string, int>{{"activation", 4}, {"gradient", 6}, {"update", 6}, {"weight", 6}}));
  }
  dump.compare();
  // A comparison of nothing with nothing would pass, too.
  for (const auto& [role, most] : seen) {
    EXPECT_GT(most.zero, 0) << role;
    EXPECT_GT(most.subnormal, 0) << role;
    if (role != "update") {
      EXPECT_GT(most.saturated, 0) << role;
    }
  }
}

TEST(Probe, ChangesNoBit) {
  for (const Precision& precision : precisions()) {
    std::vector<at::Tensor> ends[2];
    for (const bool watched : {false, true}) {
      auto model = fresh_model();
      TrainStep step(precision, *model, AdamWOptions{.lr = 1e-2},
                     {.micro_batches = 2, .precision = {.autocast = kAnyMachine}});
      std::optional<Probe> probe;
      if (watched) probe.emplace(step.mixed_precision(), ProbeOptions{.every = 2});
      for (int number = 1; number <= 6; ++number) (void)step([&] { return batch_loss(*model, number); });
      for (const Param& param : step.mixed_precision().params())
        ends[watched].push_back(full_precision(param));
    }
    for (std::size_t i = 0; i < ends[0].size(); ++i) EXPECT_TRUE(bit_equal(ends[0][i], ends[1][i]));
  }
}

// A mask may be the lowest number of its type. It is no magnitude that logits have, near overflow or not.
TEST(Probe, AMaskOfFiniteNumbersIsNoLogit) {
  torch::nn::Linear model(4, 4);
  for (const double mask :
       {-65504.0, -3.4028234663852886e38, -1e9, -std::numeric_limits<double>::infinity()}) {
    MixedPrecision mp(Precision::fp32(), model);
    SGD optimizer(mp.params(), {.lr = 1e-3});
    Probe probe(mp, {.every = 1});
    const at::Tensor hidden = torch::ones({4, 4}, at::kBool).triu(1);
    mp.backward(mp.forward([&] {
      return at::softmax(model(torch::ones({4, 4})) + torch::zeros({4, 4}).masked_fill(hidden, mask), -1)
          .square()
          .sum();
    }));
    const GradSummary grads = mp.inspect_grads();
    (void)optimizer.step(grads.unclipped());
    mp.advance(grads);
    int looks = 0;
    for (const ProbeRecord& record : probe.take())
      if (record.name.ends_with(ProbeRecord::kLogitsAfter)) {
        ++looks;
        EXPECT_EQ(record.stats.infinities, 6) << mask;
        EXPECT_LT(record.stats.amax, 100.0f) << mask;
      }
    EXPECT_EQ(looks, 1);
  }
}

TEST(Probe, LooksMoreRarelyInALongRun) {
  torch::nn::Linear model(2, 2);
  MixedPrecision mp(Precision::fp32(), model);
  SGD optimizer(mp.params(), {.lr = 1e-3});
  Probe probe(mp, {.every = 1});
  std::vector<int64_t> steps;
  for (int64_t number : {1, 2, 40, 41, 42, 80, 81, 82, 84, 160, 164, 168}) {
    probe.set_step(number);
    mp.backward(mp.forward([&] { return model(torch::ones({1, 2})).sum(); }));
    const GradSummary grads = mp.inspect_grads();
    (void)optimizer.step(grads.unclipped());
    mp.advance(grads);
    optimizer.zero_grad();
    if (const auto records = probe.take(); !records.empty()) steps.push_back(records.front().step);
  }
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 2, 40, 42, 80, 84, 160, 168}));
}

/// How many values each activation had.
std::map<std::string, int64_t> activation_counts(const std::vector<ProbeRecord>& records) {
  std::map<std::string, int64_t> counts;
  for (const ProbeRecord& record : records)
    if (record.role == "activation") counts[record.name] += record.stats.count;
  return counts;
}

TEST(Probe, OfAForwardThatThrewOrWasAnEvaluationNothingIsLeft) {
  auto model = fresh_model();
  TrainStep step(Precision::fp32(), *model, AdamWOptions{.lr = 1e-2});
  Probe probe(step.mixed_precision(), {.every = 1});
  (void)step([&] { return batch_loss(*model, 1); });
  const auto first = activation_counts(probe.take());
  ASSERT_EQ(first.size(), 4u);  // layers, and the logits of the loss
  EXPECT_THROW((void)step([&] {
                 (void)batch_loss(*model, 2);
                 throw std::runtime_error("no batch");
                 return at::Tensor();
               }),
               std::runtime_error);
  try {
    step.forward([&] {
      (void)batch_loss(*model, 2);
      throw std::runtime_error("no batch");
    });
  } catch (const std::runtime_error&) {  // nobody has called zero_grad
  }
  step.forward([&] {
    const torch::NoGradGuard evaluation;
    return batch_loss(*model, 3);
  });
  (void)step([&] { return batch_loss(*model, 4); });
  EXPECT_EQ(activation_counts(probe.take()), first);
}

TEST(Probe, AStepThatStartsAgainIsToldOnce) {
  auto model = fresh_model();
  MixedPrecision mp(Precision::fp32(), *model);
  Probe probe(mp, {.every = 1});
  for (const bool starts_again : {true, false}) {
    mp.backward(mp.forward([&] { return batch_loss(*model, 1); }));
    const GradSummary grads = mp.inspect_grads();
    starts_again ? mp.zero_grad() : mp.advance(grads);
  }
  std::map<std::string, int> roles;
  for (const ProbeRecord& record : probe.take()) ++roles[record.role];
  EXPECT_EQ(roles,
            (std::map<std::string, int>{{"activation", 4}, {"gradient", 6}, {"weight", 6}, {"update", 6}}));
}

// What autograd adds in a parameter's own type, and only that: Halfstep's own sums are FP32, or compensated.
TEST(Probe, SaysOfHowManyForwardsAGradientIsThatAutogradAddedUp) {
  struct Case {
    Precision precision;
    Accumulation accumulation;
    bool is_summed_by_autograd;
    int64_t parts;
  };
  for (const Case& each : {Case{Precision::bf16(), Accumulation::None, true, 5},
                           Case{Precision::bf16(), Accumulation::None, false, 1},
                           Case{Precision::bf16(), Accumulation::Fp32, false, 1},
                           Case{Precision::bf16(), Accumulation::Bf16Kahan, false, 1},
                           Case{Precision::fp32(), Accumulation::None, true, 1}}) {
    auto model = fresh_model();
    MixedPrecision mp(each.precision, *model, {.autocast = kAnyMachine, .accumulation = each.accumulation});
    AdamW optimizer(mp.params(), {.lr = 1e-2});
    Probe probe(mp, {.every = 2});
    for (int number = 1; number <= 4; ++number) {
      const int forwards = each.is_summed_by_autograd || each.accumulation != Accumulation::None ? 5 : 1;
      for (int i = 0; i < forwards; ++i) {
        const at::Tensor loss = mp.forward([&] { return batch_loss(*model, number); });
        {
          const torch::NoGradGuard no_grad;  // an evaluation in between is no part of the sum
          (void)mp.forward([&] { return batch_loss(*model, number); });
        }
        if (each.is_summed_by_autograd)
          loss.backward();
        else
          mp.backward(loss);
      }
      mp.close_sum();
      const GradSummary grads = mp.inspect_grads();
      (void)optimizer.step(grads.unclipped());
      mp.advance(grads);
      mp.zero_grad();
    }
    int64_t gradients = 0;
    for (const ProbeRecord& record : probe.take()) {
      gradients += record.role == "gradient";
      EXPECT_EQ(record.summed_parts, record.role == "gradient" ? each.parts : 1) << record.role;
      EXPECT_EQ(record.sum_type, record.summed_parts > 1 ? "bf16" : "");
    }
    EXPECT_EQ(gradients, 3 * 6);  // of steps 1, 2 and 4
  }
}

TEST(Probe, LogitsAreCountedOnceInAForwardInsideAnotherToo) {
  auto model = fresh_model();
  MixedPrecision mp(Precision::fp32(), *model);
  Probe probe(mp, {.every = 1});
  const auto loss = [&] { return at::softmax(model->body->forward(torch::ones({2, 20})), -1).sum(); };
  mp.backward(mp.forward([&] { return loss() + mp.forward(loss); }));
  mp.advance(mp.inspect_grads());
  EXPECT_EQ(activation_counts(probe.take()),
            (std::map<std::string, int64_t>{
                {"body.0", 96}, {"body.2", 96}, {"body.4", 40}, {"body.4, logits after it", 40}}));
}

TEST(Probe, MayEndAtAnyTimeAndAnotherTakeItsPlace) {
  auto model = fresh_model();
  auto first = std::make_unique<MixedPrecision>(Precision::fp32(), *model);
  auto probe = std::make_unique<Probe>(*first, ProbeOptions{.every = 1});
  probe =
      std::make_unique<Probe>(*first, ProbeOptions{.every = 1});  // the new one is there before the old goes
  MixedPrecision mp = std::move(*first);
  first.reset();
  const auto run = [&](bool ends_within) {
    mp.backward(mp.forward([&] {
      if (ends_within) probe.reset();
      return batch_loss(*model, 1);
    }));
    mp.advance(mp.inspect_grads());
    mp.zero_grad();
  };
  run(false);
  EXPECT_EQ(probe->take().size(), 22u);
  run(true);
  std::optional<MixedPrecision> second(std::move(mp));
  Probe last(*second, {.every = 1});
  second.reset();  // before the Probe
}

TEST(Probe, ABiasThatIsAddedInPlaceIsPartOfTheOutput) {
  // LibTorch's Linear of three dimensions: a product, and then the bias.
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(8, 4));
  MixedPrecision mp(Precision::fp32(), *model, {.autocast = kAnyMachine});
  Probe probe(mp, {.every = 1});
  std::vector<at::Tensor> outputs;
  const at::Tensor loss = mp.forward([&] {
    for (int call = 0; call < 2; ++call) outputs.push_back(model->forward(torch::randn({2, 5, 8})));
    return (outputs[0] + outputs[1]).sum();
  });
  mp.backward(loss);
  const GradSummary grads = mp.inspect_grads();
  mp.advance(grads);
  const TensorStats expected = statistics_of(torch::stack(outputs).contiguous());
  int found = 0;
  for (const ProbeRecord& record : probe.take())
    if (record.role == "activation") {
      ++found;
      EXPECT_EQ(record.stats.count, expected.count);
      EXPECT_EQ(record.stats.amax, expected.amax);
      EXPECT_EQ(record.stats.exponents, expected.exponents);
    }
  EXPECT_EQ(found, 1);
}

TEST(Statistics, OfTensorsThatAreNotInOneRow) {
  const at::Tensor square = torch::randn({64, 64});
  EXPECT_EQ(statistics_of(square.t()).packed(), statistics_of(square.t().contiguous()).packed());
  EXPECT_EQ(statistics_of(square.to(at::kDouble)).count, 4096);
  EXPECT_THROW((void)statistics_of(torch::ones({2}, at::kLong)), Error);
}

}  // namespace probe_test
}  // namespace halfstep
