#include "illnesses.h"

#include <ATen/CPUGeneratorImpl.h>
#include <halfstep/halfstep.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

namespace {

using halfstep::Precision;
using torch::Tensor;

struct Batch {
  Tensor x;
  int64_t number = 0;  // counted from 1
  bool with_remedy = false;
};

using Loss = std::function<Tensor(Patient&, const Batch&)>;
using Prepare = std::function<void(Patient&)>;
using Spoil = std::function<void(Batch&)>;  // of a batch, before the step
using Settings = std::vector<std::string>;

class Treatment : public halfstep::Task {
 public:
  Treatment(Loss loss, const Prepare& prepare, Spoil spoil, bool with_remedy)
      : loss_(std::move(loss)), spoil_(std::move(spoil)) {
    const torch::NoGradGuard no_grad;
    if (prepare) prepare(*model_);
    batch_.with_remedy = with_remedy;
  }
  torch::nn::Module& model() override { return *model_; }
  void take_batch() override {
    at::Generator random = at::detail::createCPUGenerator(static_cast<uint64_t>(batch_.number++));
    batch_.x = torch::randn({64, Patient::kWidth}, random);
    if (spoil_ && !batch_.with_remedy) spoil_(batch_);
  }
  Tensor loss() override { return loss_(*model_, batch_); }
  halfstep::Score evaluate(const halfstep::MixedPrecision&) override { return {}; }
  halfstep::StateDict state_dict() const override {
    halfstep::StateDict state;
    state.set("batch", batch_.number);
    return state;
  }
  void load_state_dict(const halfstep::StateDict& saved) override { batch_.number = saved.integer("batch"); }

 private:
  std::shared_ptr<Patient> model_ = std::make_shared<Patient>();
  Loss loss_;
  Spoil spoil_;
  Batch batch_;
};

struct Silent : halfstep::RunWatcher {
  void begin(const halfstep::RunPlan&) override {}
  void step(const halfstep::StepRecord&) override {}
  void evaluation(const halfstep::EvaluationRecord&) override {}
  void sample(const halfstep::SampleRecord&) override {}
  void note(int64_t, std::string_view) override {}
  void end(const halfstep::RunEnd&) override {}
};

/// A run of halfstep::Trainer.
struct Trained {
  Loss loss;
  Settings ill;
  Settings remedy;  // instead of `ill`
  Prepare prepare{};
  Spoil spoil{};

  void operator()(const std::filesystem::path& folder, bool with_remedy) const {
    Settings all = {"model.kind=own",
                    "train.steps=40",
                    "train.threads=1",
                    "optimizer.lr=1e-3",
                    "watch.every=5",
                    "train.on_divergence=go_on",
                    "checkpoint.every_minutes=0"};
    const Settings& own = with_remedy ? remedy : ill;
    all.insert(all.end(), own.begin(), own.end());
    halfstep::Trainer trainer(std::make_unique<Treatment>(loss, prepare, spoil, with_remedy),
                              halfstep::resolve_config({.set = all}), folder);
    Silent silent;
    const std::atomic<bool> stop = false;
    (void)trainer.run(silent, stop);
  }
};

/// What a loop of one's own writes of itself, and what is found in it meanwhile.
class OwnLog {
 public:
  explicit OwnLog(const std::filesystem::path& folder)
      : log_((std::filesystem::create_directories(folder), halfstep::RunLog::create(folder, {}))) {}

  void step(const halfstep::StepRecord& record, const std::vector<halfstep::ProbeRecord>& probes) {
    std::vector<halfstep::Finding> found;
    const auto take = [&](const auto& each) {
      for (halfstep::Finding& finding : watch_.take(each)) found.push_back(std::move(finding));
    };
    for (const halfstep::ProbeRecord& probe : probes) {
      log_.probe(probe);
      take(probe);
    }
    log_.step(record);
    take(record);
    for (const halfstep::Finding& finding : found) log_.finding({.step = record.step, .finding = finding});
  }

 private:
  halfstep::RunLog log_;
  halfstep::FindingWatch watch_{{.compute = "bf16"}};
};

// To see what BF16 does to the numbers, on processors without BF16 too.
constexpr halfstep::AutocastOptions kAnyProcessor{.allow_emulated = true};

/// Each micro-batch's backward adds to gradients of BF16; with the remedy Halfstep adds them in FP32.
void sum_in_bf16(const std::filesystem::path& folder, bool with_remedy) {
  auto model = std::make_shared<Patient>();
  halfstep::MixedPrecision mp(
      Precision::bf16(), *model,
      {.autocast = kAnyProcessor,
       .accumulation = with_remedy ? halfstep::Accumulation::Fp32 : halfstep::Accumulation::None});
  halfstep::AdamW optimizer(mp.params(), {.lr = 1e-3});
  halfstep::Probe probe(mp, {.every = 1});
  OwnLog log(folder);
  for (int64_t step = 1; step <= 2; ++step) {
    double mean_loss = 0.0;
    for (int64_t i = 0; i < kMicroBatches; ++i) {
      const Tensor loss = mp.forward([&] { return model->loss_of(micro_batch(step, i)); }) / kMicroBatches;
      mean_loss += loss.item<double>();
      if (with_remedy)
        mp.backward(loss);
      else
        loss.backward();
    }
    mp.close_sum();
    const auto grads = mp.inspect_grads();
    (void)optimizer.step(grads.unclipped());
    mp.advance(grads);
    optimizer.zero_grad();
    log.step({.step = step, .loss = mean_loss, .lr = 1e-3, .grad_norm = grads.norm()}, probe.take());
  }
}

/// Weights of BF16 and nothing beside them; with the remedy the 16 bits below them, at the same rate.
void train_pure_bf16(const std::filesystem::path& folder, bool with_remedy) {
  constexpr double kRate = 1e-4;
  const auto weights = with_remedy ? halfstep::WeightStorage::SplitMaster : halfstep::WeightStorage::Nearest;
  auto model = std::make_shared<Patient>();
  {
    const torch::NoGradGuard no_grad;
    model->second->weight.mul_(64);  // and an update of it is smaller still, beside it
  }
  halfstep::TrainStep step(Precision::bf16(weights), *model, halfstep::AdamWOptions{.lr = kRate},
                           {.precision = {.autocast = kAnyProcessor}});
  halfstep::Probe probe(step.mixed_precision(), {.every = 10});
  OwnLog log(folder);
  for (int64_t number = 1; number <= 30; ++number) {
    const auto report = step([&] { return model->loss_of(micro_batch(number, 0)); }, {.stalls = true});
    log.step({.step = number,
              .loss = step.loss().item<double>(),
              .lr = kRate,
              .grad_norm = report.grad_norm(),
              .skipped = !report.stepped(),
              .stalled_share = report.stall().lost_fraction(),
              .stalled_most = report.stall().parameter},
             probe.take());
  }
}

Tensor plain(Patient& model, const Batch& batch) { return model.loss_of(batch.x); }

std::vector<Illness> all_illnesses() {
  const Settings fp16 = {"precision.compute=fp16"}, bf16 = {"precision.compute=bf16"},
                 fp8_current = {"precision.compute=fp8-current"}, mxfp8 = {"precision.compute=mxfp8"};
  std::vector<Illness> all;

  // The gradient of a weight is that of the layer's output times its input, and the input is small. No
  // operation: what is zero was counted in tensors.
  all.push_back({.name = "underflow",
                 .planted = "gradients below FP16's range, without a loss scale",
                 .code = "gradient-underflow",
                 .layer = "first.weight",
                 .op = "",
                 .train = Trained{
                     .loss = [](Patient& model, const Batch& batch) { return model.loss_of(batch.x * 1e-4); },
                     .ill = {"precision.compute=fp16", "precision.loss_scale.initial=1"},
                     .remedy = fp16}});

  // The loss is FP32 and carries the scale; its gradient is cast to the type of the last layer, FP16.
  all.push_back({.name = "high-scale",
                 .planted = "a loss scale that is far too high",
                 .code = "scale-falling",
                 .layer = "after last",
                 .op = "ToCopyBackward0",
                 .train = Trained{.loss = plain,
                                  .ill = {"precision.compute=fp16", "precision.loss_scale.initial=1e15"},
                                  .remedy = fp16}});

  // The derivative of a root at 0 is a division by 0, whatever the loss scale.
  const Settings no_limit = {"precision.compute=fp16", "train.steps=60",
                             "precision.loss_scale.max_consecutive_skips=0"};
  all.push_back({.name = "one-layer",
                 .planted = "one layer whose gradients are not finite whatever the loss scale",
                 .code = "scale-at-floor",
                 .layer = "after second",
                 .op = "div",
                 .train = Trained{.loss =
                                      [](Patient& model, const Batch& batch) {
                                        const Tensor h = model.hidden(batch.x);
                                        const double epsilon = batch.with_remedy ? 1e-3 : 0.0;
                                        const Tensor root = torch::sqrt(h.to(torch::kFloat) * 0.0 + epsilon);
                                        return model.loss(model.answer(h)) + root.mean();
                                      },
                                  .ill = no_limit,
                                  .remedy = no_limit}});

  all.push_back({.name = "attention",
                 .planted = "attention logits beyond FP16's 65504",
                 .code = "overflow-attention-logits",
                 .layer = "after attention.1",
                 .op = "matmul",
                 .train = Trained{.loss =
                                      [](Patient& model, const Batch& batch) {
                                        const Tensor query = model.query(batch.x), key = model.key(batch.x);
                                        const Tensor logits = torch::matmul(query, key.t());
                                        const Tensor h = model.hidden(batch.x);
                                        return model.loss(
                                            model.answer(torch::matmul(torch::softmax(logits, -1), h)));
                                      },
                                  .ill = fp16,
                                  .remedy = bf16,
                                  .prepare =
                                      [](Patient& model) {
                                        for (const Tensor& weight : model.projections->parameters())
                                          if (weight.dim() == 2) weight.mul_(200);
                                      }}});

  // What is near the end of the range is the output of a layer; nothing has overflowed yet, so that there is
  // no operation to name.
  all.push_back({.name = "near-overflow",
                 .planted = "activations above half of FP16's largest number",
                 .code = "activation-near-overflow",
                 .layer = "second",
                 .op = "",
                 .train = Trained{.loss =
                                      [](Patient& model, const Batch& batch) {
                                        return model.loss(model.answer(model.hidden(batch.x) / 32768));
                                      },
                                  .ill = fp16,
                                  .remedy = bf16,
                                  .prepare = [](Patient& model) { model.second->weight.mul_(36000); }}});

  // The gradients of all parameters are sums of as many parts: none is worse than the others, and autograd's
  // additions are not the model's operations.
  all.push_back({.name = "bf16-sums",
                 .planted = "gradients of 1,024 micro-batches, added in BF16",
                 .code = "accumulation-rounding",
                 .layer = "",
                 .op = "",
                 .train = sum_in_bf16});

  // What loses an update is the optimizer.
  all.push_back({.name = "pure-bf16",
                 .planted = "BF16 weights without a master at a small learning rate",
                 .code = "stalled-weights",
                 .layer = "second.weight",
                 .op = "",
                 .train = train_pure_bf16});

  all.push_back({.name = "exp",
                 .planted = "an exponential in FP16",
                 .code = "nan-producer",
                 .layer = "after third",
                 .op = "exp",
                 .train = Trained{.loss =
                                      [](Patient& model, const Batch& batch) {
                                        const Tensor h = model.third(model.hidden(batch.x));
                                        return (h * 0.1 + 12.0).exp().log().square().mean();
                                      },
                                  .ill = {"precision.compute=fp16", "precision.ops.exp=low"},
                                  .remedy = fp16}});

  // Squares of what is above 256 are Inf in FP16, and the variance is Inf - Inf. (Halfstep's own layer norm,
  // and its rule for means, are FP32.)
  all.push_back(
      {.name = "norm",
       .planted = "a layer norm by hand, over activations whose squares FP16 does not hold",
       .code = "nan-producer",
       .layer = "after second",
       .op = "mul",
       .train = Trained{.loss =
                            [](Patient& model, const Batch& batch) {
                              const Tensor h = model.hidden(batch.x);
                              const Tensor mean = h.mean(-1, /*keepdim=*/true);
                              const Tensor variance = (h * h).mean(-1, /*keepdim=*/true) - mean * mean;
                              return model.loss(model.answer((h - mean) * (variance + 1e-5).rsqrt()));
                            },
                        .ill = {"precision.compute=fp16", "precision.ops.mean=stock"},
                        .remedy = bf16,
                        .prepare = [](Patient& model) { model.second->weight.mul_(8000); }}});

  // No operation: half of a tensor lies below the format's normal numbers beside its largest values.
  all.push_back(
      {.name = "outliers",
       .planted = "one channel 300,000 times the others, under one scale for the tensor",
       .code = "outlier-channels",
       .layer = "second",
       .op = "",
       .train = Trained{.loss = plain, .ill = fp8_current, .remedy = mxfp8, .prepare = [](Patient& model) {
                          model.second->weight[3].mul_(3e5);
                        }}});

  // Values that were held at the format's largest number are counted by layer, not by operation.
  all.push_back(
      {.name = "stale-amax",
       .planted = "what one layer is given grows, and its scale is that of earlier steps",
       .code = "stale-amax",
       .layer = "second.weight",
       .op = "",
       .train = Trained{.loss =
                            [](Patient& model, const Batch& batch) {
                              const double growth = std::exp2(
                                  2.0 * std::clamp<double>(static_cast<double>(batch.number) - 27, 0, 8));
                              const Tensor given = torch::relu(model.first(batch.x)) * growth;
                              return model.loss(model.answer(torch::relu(model.second(given) / growth)));
                            },
                        .ill = {"precision.compute=fp8-delayed"},
                        .remedy = fp8_current}});

  all.push_back({.name = "vanishing",
                 .planted = "half of what one layer is given is ten million times smaller than the rest",
                 .code = "fp8-vanishing",
                 .layer = "third.weight",
                 .op = "",
                 .train = Trained{
                     .loss =
                         [](Patient& model, const Batch& batch) {
                           const auto halves = model.second(torch::relu(model.first(batch.x))).chunk(2, -1);
                           return model.loss(model.answer(torch::cat({halves[0] * 1e-7, halves[1]}, -1)));
                         },
                     .ill = fp8_current,
                     .remedy = mxfp8}});

  // One wild batch, and weights that are far away after it: the whole model, no layer and no operation.
  const Settings sgd = {"precision.compute=bf16", "optimizer.kind=sgd", "optimizer.lr=2"};
  Settings clipped = sgd;
  clipped.push_back("optimizer.clip_norm=0.1");
  all.push_back({.name = "spike",
                 .planted = "one batch whose gradient throws the weights far away",
                 .code = "loss-spike",
                 .layer = "",
                 .op = "",
                 .train = Trained{.loss =
                                      [](Patient& model, const Batch& batch) {
                                        return model.loss_of(batch.number == 30 ? batch.x * 8 : batch.x);
                                      },
                                  .ill = sgd,
                                  .remedy = clipped}});

  all.push_back({.name = "log",
                 .planted = "the logarithm of 0",
                 .code = "nan-producer",
                 .layer = "after second",
                 .op = "log",
                 .train = Trained{.loss =
                                      [](Patient& model, const Batch& batch) {
                                        const double least = batch.with_remedy ? 1e-6 : 0.0;
                                        return -model.hidden(batch.x).clamp_min(least).log().mean();
                                      },
                                  .ill = bf16,
                                  .remedy = bf16}});

  all.push_back({.name = "bad-batch",
                 .planted = "an Inf in each eighth batch",
                 .code = "nan-producer",
                 .layer = "first",
                 .op = "input",
                 .train = Trained{.loss = plain, .ill = bf16, .remedy = bf16, .spoil = [](Batch& batch) {
                                    if (batch.number % 8 == 4)
                                      batch.x[5][7] = std::numeric_limits<float>::infinity();
                                  }}});

  all.push_back({.name = "tiny-norm",
                 .planted = "a division by a norm of 0",
                 .code = "nan-producer",
                 .layer = "after second",
                 .op = "div",
                 .train = Trained{
                     .loss =
                         [](Patient& model, const Batch& batch) {
                           const Tensor h =
                               torch::relu(model.second(batch.x) - 50.0).to(torch::kFloat);  // all of it is 0
                           const double epsilon = batch.with_remedy ? 1e-6 : 0.0;
                           return model.loss(
                               model.answer(h / (h.square().sum(-1, /*keepdim=*/true) + epsilon)));
                         },
                     .ill = bf16,
                     .remedy = bf16}});
  return all;
}

}  // namespace

Patient::Patient() {
  torch::manual_seed(3);
  const auto linear = [] { return torch::nn::Linear(kWidth, kWidth); };
  first = register_module("first", linear());
  second = register_module("second", linear());
  third = register_module("third", linear());
  projections = register_module("attention", torch::nn::ModuleList(linear(), linear()));
  last = register_module("last", linear());
}

Tensor micro_batch(int64_t step, int64_t number) {
  at::Generator random = at::detail::createCPUGenerator(static_cast<uint64_t>(step * kMicroBatches + number));
  return torch::randn({8, Patient::kWidth}, random);
}

const std::vector<Illness>& illnesses() {
  static const std::vector<Illness> all = all_illnesses();
  return all;
}
