// Illnesses of precision, planted one at a time: the right finding comes first, with layer and operation, and
// its remedy makes the run well. Healthy runs have no finding.
#include <halfstep/findings.h>
#include <halfstep/task.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>

#include "trainer_fixture.h"

namespace halfstep::testing {
namespace {

struct Patient : torch::nn::Module {
  Patient() {
    torch::manual_seed(3);
    first = register_module("first", torch::nn::Linear(32, 32));
    second = register_module("second", torch::nn::Linear(32, 32));
    third = register_module("third", torch::nn::Linear(32, 32));
    attention = register_module("attention", torch::nn::ModuleDict());
    attention->update({{"query", torch::nn::Linear(32, 32).ptr()}, {"key", torch::nn::Linear(32, 32).ptr()}});
    last = register_module("last", torch::nn::Linear(32, 32));
  }
  at::Tensor layer(const std::string& name, const at::Tensor& x) {
    return attention[name]->as<torch::nn::Linear>()->forward(x);
  }
  at::Tensor hidden(const at::Tensor& x) { return at::relu(second(at::relu(first(x)))); }
  at::Tensor end(const at::Tensor& h) { return (last(at::relu(third(h))) - 0.5).square().mean(); }

  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr}, last{nullptr};
  torch::nn::ModuleDict attention{nullptr};
};

using Loss = std::function<at::Tensor(Patient&, const at::Tensor& x, int64_t batch)>;

/// Draws its batches from LibTorch's generator.
class Treatment : public Task {
 public:
  Treatment(Loss loss, const std::function<void(Patient&)>& prepare) : loss_(std::move(loss)) {
    const torch::NoGradGuard no_grad;
    if (prepare) prepare(*model_);
  }
  torch::nn::Module& model() override { return *model_; }
  void take_batch() override {
    ++taken_;
    batch_ = torch::randn({64, 32});
  }
  at::Tensor loss() override { return loss_(*model_, batch_, taken_); }
  Score evaluate(const MixedPrecision&) override { return {}; }
  StateDict state_dict() const override {
    StateDict state;
    state.set("taken", taken_);
    return state;
  }
  void load_state_dict(const StateDict& saved) override { taken_ = saved.integer("taken"); }

 private:
  std::shared_ptr<Patient> model_ = std::make_shared<Patient>();
  Loss loss_;
  at::Tensor batch_;
  int64_t taken_ = 0;
};

struct Diagnosis {
  std::string code{}, severity{}, layer{}, op{}, all{};
};

class Illness : public TrainerTest {
 protected:
  /// The first finding of such a run that is more than a note, as `halfstep doctor` orders them.
  Diagnosis diagnosis(const Loss& loss, std::vector<std::string> set,
                      const std::function<void(Patient&)>& prepare = {}) {
    std::vector<std::string> all = {"model.kind=own",
                                    "train.steps=40",
                                    "optimizer.lr=1e-3",
                                    "watch.every=5",
                                    "train.on_divergence=go_on",
                                    "checkpoint.every_minutes=0"};
    all.insert(all.end(), set.begin(), set.end());
    const std::string name = "run" + std::to_string(runs_++);
    Counter counter;
    Trainer trainer(std::make_unique<Treatment>(loss, prepare), resolve_config({.set = all}), folder_ / name);
    (void)trainer.run(counter, counter.stop);
    return first_of(name);
  }

  Diagnosis first_of(const std::string& name) const {
    const auto rank_of = [](const Diagnosis& finding) {
      const auto codes = finding_codes();
      return std::pair(finding.severity == "serious" ? 0 : 1,
                       std::ranges::find(codes, finding.code) - codes.begin());
    };
    Diagnosis first;
    std::string all;
    for (const json& line : log(name)) {
      if (line["kind"] != "finding") continue;
      const Diagnosis found{.code = line["code"],
                            .severity = line["severity"],
                            .layer = line.value("layer", ""),
                            .op = line.value("op", "")};
      all += "\n  " + line.dump();
      if (found.severity == "note") continue;
      if (first.code.empty() || rank_of(found) < rank_of(first)) first = found;
    }
    first.all = all;
    return first;
  }

  int runs_ = 0;
};

at::Tensor plain(Patient& model, const at::Tensor& x, int64_t) { return model.end(model.hidden(x)); }

TEST_F(Illness, GradientUnderflowInFp16WithoutAScale) {
  const Loss small = [](Patient& model, const at::Tensor& x, int64_t) {
    return 1e-4 * model.end(model.hidden(x)).to(at::kFloat);
  };
  const Diagnosis ill = diagnosis(small, {"precision.compute=fp16", "precision.loss_scale.initial=1"});
  EXPECT_EQ(ill.code, "gradient-underflow") << ill.all;
  EXPECT_FALSE(ill.layer.empty());
  EXPECT_EQ(diagnosis(small, {"precision.compute=fp16"}).code, "");
}

TEST_F(Illness, ALossScaleThatIsTooHigh) {
  const Diagnosis ill = diagnosis(plain, {"precision.compute=fp16", "precision.loss_scale.initial=1e15"});
  EXPECT_EQ(ill.code, "scale-falling") << ill.all;
  EXPECT_EQ(diagnosis(plain, {"precision.compute=fp16"}).code, "");
}

TEST_F(Illness, AScaleThatCollapsesForOneLayer) {
  const auto with = [](double eps) -> Loss {
    return [eps](Patient& model, const at::Tensor& x, int64_t) {
      const at::Tensor h = model.hidden(x);
      return model.end(h) + at::sqrt(h.to(at::kFloat) * 0.0 + eps).mean();  // its derivative at 0 is Inf
    };
  };
  const std::vector<std::string> fp16 = {"precision.compute=fp16", "train.steps=60",
                                         "precision.loss_scale.max_consecutive_skips=0"};
  const Diagnosis ill = diagnosis(with(0), fp16);
  EXPECT_EQ(ill.code, "scale-at-floor") << ill.all;
  EXPECT_EQ(ill.op, "div") << ill.all;  // of the square root's derivative
  EXPECT_NE(ill.layer.find("second"), std::string::npos) << ill.layer;
  EXPECT_EQ(diagnosis(with(1e-3), fp16).code, "");
}

TEST_F(Illness, AttentionLogitsBeyondFp16) {
  const Loss attend = [](Patient& model, const at::Tensor& x, int64_t) {
    const at::Tensor logits = at::matmul(model.layer("query", x), model.layer("key", x).t());
    return model.end(at::matmul(at::softmax(logits, -1), model.hidden(x)));
  };
  const auto large = [](Patient& model) {
    for (const char* name : {"query", "key"})
      model.attention[name]->as<torch::nn::Linear>()->weight.mul_(500);
  };
  const Diagnosis ill = diagnosis(attend, {"precision.compute=fp16"}, large);
  EXPECT_EQ(ill.code, "overflow-attention-logits") << ill.all;
  EXPECT_NE(ill.layer.find("attention"), std::string::npos) << ill.layer;
  EXPECT_EQ(diagnosis(attend, {"precision.compute=bf16"}, large).code, "");
}

TEST_F(Illness, AccumulationInBf16OverAThousandParts) {
  // In a loop of one's own: the sum of equal parts stops growing, and the watch that is told of it says so.
  at::Tensor low = torch::zeros({1}, at::kBFloat16), high = torch::zeros({1});
  const at::Tensor part = torch::full({1}, 1.0 / 1024);
  for (int i = 0; i < 1024; ++i) low += part.to(at::kBFloat16), high += part;
  EXPECT_LT(low.item<float>(), 0.6f);
  EXPECT_EQ(high.item<float>(), 1.0f);
  FindingWatch told({.compute = "bf16", .summed_parts = 1024, .sum_type = "bf16"});
  const auto found = told.take(StepRecord{.step = 1, .loss = 1});
  ASSERT_FALSE(found.empty());
  EXPECT_EQ(found.front().code, "accumulation-rounding");
  FindingWatch mended({.compute = "bf16", .summed_parts = 1024, .sum_type = "fp32"});
  EXPECT_TRUE(mended.take(StepRecord{.step = 1, .loss = 1}).empty());
}

TEST_F(Illness, UpdatesThatAreRoundedAway) {
  const Diagnosis ill = diagnosis(plain, {"precision.compute=fp32", "optimizer.lr=1e-10"});
  EXPECT_EQ(ill.code, "stalled-weights") << ill.all;
  EXPECT_EQ(diagnosis(plain, {"precision.compute=bf16"}).code, "");
}

TEST_F(Illness, AnExponentialInFp16) {
  const Loss grows = [](Patient& model, const at::Tensor& x, int64_t) {
    return (model.third(model.hidden(x)) * 0.1 + 12.0).exp().log().square().mean();
  };
  const Diagnosis ill = diagnosis(grows, {"precision.compute=fp16", "precision.ops.exp=low"});
  EXPECT_EQ(ill.code, "nan-producer") << ill.all;
  EXPECT_EQ(ill.op, "exp");
  EXPECT_NE(ill.layer.find("third"), std::string::npos) << ill.layer;
  EXPECT_EQ(diagnosis(grows, {"precision.compute=fp16"}).code, "");
}

TEST_F(Illness, ANormOverActivationsThatFp16DoesNotHold) {
  const Loss norm = [](Patient& model, const at::Tensor& x, int64_t) {
    return model.end(at::layer_norm(model.hidden(x), {32}));
  };
  const auto huge = [](Patient& model) { model.second->weight.mul_(2e5); };
  const Diagnosis ill = diagnosis(norm, {"precision.compute=fp16"}, huge);
  EXPECT_EQ(ill.code, "nan-producer") << ill.all;
  EXPECT_EQ(ill.layer, "second");
  EXPECT_EQ(diagnosis(norm, {"precision.compute=bf16"}, huge).code, "");
}

TEST_F(Illness, OutlierChannelsUnderOneScale) {
  const auto outliers = [](Patient& model) { model.second->weight[3].mul_(3e5); };
  const Diagnosis ill = diagnosis(plain, {"precision.compute=fp8-current"}, outliers);
  EXPECT_EQ(ill.code, "outlier-channels") << ill.all;
  EXPECT_NE(ill.layer.find("second"), std::string::npos) << ill.layer;
  EXPECT_EQ(diagnosis(plain, {"precision.compute=mxfp8"}, outliers).code, "");
}

TEST_F(Illness, AnAmaxThatIsOld) {
  const Loss shifts = [](Patient& model, const at::Tensor& x, int64_t batch) {
    const double growth =
        batch < 28 ? 1 : std::pow(3.0, static_cast<double>(std::min<int64_t>(batch, 36) - 27));
    return model.end(model.hidden(x * growth)).log1p();
  };
  const Diagnosis ill = diagnosis(shifts, {"precision.compute=fp8-delayed"});
  EXPECT_EQ(ill.code, "stale-amax") << ill.all;
  const Diagnosis well = diagnosis(shifts, {"precision.compute=fp8-current"});
  EXPECT_NE(well.code, "stale-amax") << well.all;
  EXPECT_NE(well.code, "fp8-saturating") << well.all;
}

TEST_F(Illness, TheLogarithmOfZero) {
  const auto with = [](double least) -> Loss {
    return [least](Patient& model, const at::Tensor& x, int64_t) {
      return -at::relu(model.second(at::relu(model.first(x)))).clamp_min(least).log().mean();
    };
  };
  const Diagnosis ill = diagnosis(with(0), {"precision.compute=bf16"});
  EXPECT_EQ(ill.code, "nan-producer") << ill.all;
  EXPECT_EQ(ill.op, "log");
  EXPECT_NE(ill.layer.find("second"), std::string::npos) << ill.layer;
  EXPECT_EQ(diagnosis(with(1e-6), {"precision.compute=bf16"}).code, "");
}

TEST_F(Illness, ABatchThatIsNotFinite) {
  const auto with = [](int64_t bad) -> Loss {
    return [bad](Patient& model, const at::Tensor& x, int64_t batch) {
      at::Tensor given = x.clone();
      if (batch % 8 == bad) given[5][7].fill_(std::numeric_limits<double>::infinity());
      return model.end(model.hidden(given.set_requires_grad(false)));
    };
  };
  const Diagnosis ill = diagnosis(with(4), {"precision.compute=bf16"});
  EXPECT_EQ(ill.code, "nan-producer") << ill.all;
  EXPECT_EQ(ill.layer, "first");
  EXPECT_EQ(diagnosis(with(-1), {"precision.compute=bf16"}).code, "");
}

TEST_F(Illness, ADivisionByATinyNorm) {
  const auto with = [](double eps) -> Loss {
    return [eps](Patient& model, const at::Tensor& x, int64_t) {
      const at::Tensor h = at::relu(model.second(x) - 50.0).to(at::kFloat);  // all of it is 0
      return model.end(h / (h.square().sum(-1, /*keepdim=*/true) + eps));
    };
  };
  const Diagnosis ill = diagnosis(with(0), {"precision.compute=bf16"});
  EXPECT_EQ(ill.code, "nan-producer") << ill.all;
  EXPECT_EQ(ill.op, "div");
  EXPECT_NE(ill.layer.find("second"), std::string::npos) << ill.layer;
  EXPECT_EQ(diagnosis(with(1e-6), {"precision.compute=bf16"}).code, "");
}

TEST_F(Illness, HealthyRunsHaveNoFinding) {
  for (const std::string precision : {"bf16", "fp16", "fp8-delayed", "fp8-current", "mxfp8"})
    for (const int seed : {1, 2}) {
      Counter counter;
      const std::string name = detail::concat("healthy-", precision, "-", seed);
      (void)run(config({"train.steps=60", "watch.every=5", "train.evaluate_every=0", "model.width=32",
                        "precision.compute=" + precision, detail::concat("train.seed=", seed)}),
                name, counter);
      const Diagnosis found = first_of(name);
      EXPECT_EQ(found.code, "") << name << found.all;
    }
}

}  // namespace
}  // namespace halfstep::testing
