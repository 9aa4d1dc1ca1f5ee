// What the doctor sees of several ranks, in real processes: who failed, what their tensors were like
// together, and how far they lie apart.
#include <gtest/gtest.h>
#include <halfstep/op_tracer.h>
#include <halfstep/probe.h>
#include <halfstep/task.h>
#include <halfstep/train_step.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <sstream>

#include "distributed/rank_processes.h"
#include "support/any_machine.h"
#include "support/scratch.h"
#include "train/trainer_fixture.h"

namespace halfstep {
namespace doctor_ranks_test {

using nlohmann::json;
using testing::kAnyMachine;
using testing::RankProcesses;
using testing::ScratchFolder;
using testing::texts_of_ranks;

constexpr double kInf = std::numeric_limits<double>::infinity();

/// The loss of a batch, counted from 1, of a model of one weight.
using LossOf = std::function<at::Tensor(torch::nn::LinearImpl& model, int64_t batch)>;

class OneWeight final : public Task {
 public:
  explicit OneWeight(LossOf loss) : loss_(std::move(loss)) {
    torch::manual_seed(1);
    model_ = std::make_shared<torch::nn::LinearImpl>(torch::nn::LinearOptions(1, 1).bias(false));
    const torch::NoGradGuard no_grad;
    model_->weight.fill_(0.5);
  }
  torch::nn::Module& model() override { return *model_; }
  void take_batch() override { ++batch_; }
  at::Tensor loss() override { return loss_(*model_, batch_); }
  Score evaluate(const MixedPrecision&) override { return {}; }
  StateDict state_dict() const override {
    StateDict state;
    state.set("batch", batch_);
    return state;
  }
  void load_state_dict(const StateDict& saved) override { batch_ = saved.integer("batch"); }

 private:
  LossOf loss_;
  std::shared_ptr<torch::nn::LinearImpl> model_;
  int64_t batch_ = 0;
};

/// Of the output for `input`, times `factor`: that is the gradient, too, for an input of 1.
at::Tensor loss_of(torch::nn::LinearImpl& model, const at::Tensor& input, double factor = 1) {
  return model.forward(input).to(at::kFloat).sum() * factor;
}

/// As data, which is there before a step: an Inf that a step makes itself may be meant, as a mask is.
at::Tensor input(double value) { return torch::full({1, 1}, value); }

struct Illness {
  std::vector<std::string> set;
  std::function<LossOf(const Ranks& ranks)> loss;
};

/// By name, for the processes of the ranks.
const std::map<std::string, Illness>& illnesses() {
  static const auto fails_on = [](const std::set<int>& which) {
    return [which](const Ranks& ranks) -> LossOf {
      return [data = input(which.contains(ranks.rank()) ? kInf : 1.0)](auto& model, int64_t) {
        return loss_of(model, data);
      };
    };
  };
  static const auto factor = [](double value) {
    return [value](const Ranks&) -> LossOf {
      return [value, data = input(1)](auto& model, int64_t) { return loss_of(model, data, value); };
    };
  };
  static const std::map<std::string, Illness> all = {
      {"all", {{}, fails_on({0, 1})}},
      {"one", {{}, fails_on({1})}},
      // At this scale the gradient of rank 0's output is 40,960 in FP16, its half of the mean; the whole
      // would be beyond 65,504.
      {"scale",
       {{"precision.compute=fp16", "precision.loss_scale.initial=65536"},
        [](const Ranks& ranks) -> LossOf {
          return [data = input(ranks.rank() == 1 ? kInf : 0.01)](auto& model, int64_t) {
            return loss_of(model, data, 1.25);
          };
        }}},
      // Rank 1's first of three micro-batches; each forward exchanges something.
      {"collective",
       {{"train.accumulation=3", "train.steps=2"},
        [](const Ranks& ranks) -> LossOf {
          return [ranks, well = input(1), other = input(2), bad = input(kInf)](auto& model, int64_t batch) {
            const at::Tensor sum = torch::full({1}, static_cast<float>(batch));
            ranks.sum(sum);
            const bool in_step = sum.item<float>() == static_cast<float>(2 * batch);
            return loss_of(model, ranks.rank() == 1 && batch % 3 == 1 ? bad : in_step ? well : other);
          };
        }}},
      // Half of these is a rank's part. 50,000 has room in FP16, twice that has none; 150,000 has none alone.
      {"sum of two", {{"run.reduction=fp16", "train.steps=2"}, factor(100'000)}},
      {"cast", {{"run.reduction=fp16", "train.steps=2"}, factor(300'000)}},
      // 8e18 in each of 4 micro-batches: 2^63 = 9.2e18 is what a norm may be.
      {"batches", {{"train.accumulation=4", "train.steps=2"}, factor(3.2e19)}},
      {"far off",
       {{"watch.every=1", "train.steps=6", "optimizer.lr=1e-6"},
        [](const Ranks& ranks) -> LossOf {
          return [value = ranks.rank() == 2 ? 10.0 : 1.0, data = input(1)](auto& model, int64_t) {
            return loss_of(model, data, value);
          };
        }}},
      {"healthy", {{"watch.every=3", "train.steps=12", "log.every=5"}, factor(1)}},
  };
  return all;
}

HALFSTEP_RANK_CASE(trains_ill) {
  const Illness& illness = illnesses().at(arguments[0]);
  std::vector<std::string> set = {"model.kind=own",     "train.steps=9",    "train.evaluate_every=0",
                                  "checkpoint.every=0", "optimizer.lr=0.1", "train.on_divergence=go_on",
                                  "watch.every=0"};
  set.insert(set.end(), illness.set.begin(), illness.set.end());
  Trainer trainer(std::make_unique<OneWeight>(illness.loss(ranks)), resolve_config({.set = set}),
                  arguments[1], {.ranks = std::make_shared<const Ranks>(ranks)});
  testing::Counter counter;
  return std::string(to_string(trainer.run(counter, counter.stop).outcome));
}

/// The records of a run of these ranks.
std::vector<json> log_of(int ranks, const std::string& illness) {
  const ScratchFolder folder;
  for (const std::string& text : texts_of_ranks(ranks, "trains_ill", {illness, (folder / "run").string()}))
    EXPECT_EQ(text, "done");
  std::vector<json> records;
  std::ifstream file(folder / "run/log.jsonl");
  for (std::string line; std::getline(file, line);) records.push_back(json::parse(line));
  return records;
}

std::vector<json> of_kind(const std::vector<json>& records, const std::string& kind) {
  std::vector<json> found;
  for (const json& record : records)
    if (record["kind"] == kind) found.push_back(record);
  return found;
}

/// What was found with this code; null if nothing.
json finding_of(const std::vector<json>& records, const std::string& code) {
  for (const json& record : of_kind(records, "finding"))
    if (record["code"] == code) return record;
  return nullptr;
}

TEST(DoctorOfRanks, AllThatFailInAStepAreTold) {
  const auto records = log_of(2, "all");
  const auto culprits = of_kind(records, "culprit");
  EXPECT_EQ(culprits.size(), 8u);
  for (const json& culprit : culprits) {
    EXPECT_EQ(culprit["rank"], 0);
    EXPECT_EQ(culprit["ranks"], json({0, 1}));
  }
  EXPECT_TRUE(finding_of(records, "rank-differs").is_null());
  EXPECT_EQ(records.front()["ranks"], 2);
}

TEST(DoctorOfRanks, OneThatFailsAloneDiffers) {
  const auto records = log_of(2, "one");
  for (const json& culprit : of_kind(records, "culprit")) {
    EXPECT_EQ(culprit["rank"], 1);
    EXPECT_EQ(culprit["ranks"], json({1}));
    EXPECT_EQ(culprit["op"], "input");
  }
  const json finding = finding_of(records, "rank-differs");
  ASSERT_FALSE(finding.is_null());
  EXPECT_EQ(finding["what"], "Only rank 1 of 2 makes numbers that are not finite.");
}

TEST(DoctorOfRanks, AStepIsTakenAgainWithTheScaleThatItHad) {
  const auto culprits = of_kind(log_of(2, "scale"), "culprit");
  ASSERT_FALSE(culprits.empty());
  EXPECT_EQ(culprits[0]["ranks"], json({1})) << culprits[0];
  EXPECT_EQ(culprits[0]["op"], "input");
}

TEST(DoctorOfRanks, AllLookAtAsManyMicroBatchesAsTheStepHad) {
  const auto culprits = of_kind(log_of(2, "collective"), "culprit");
  ASSERT_EQ(culprits.size(), 2u);
  for (const json& culprit : culprits) EXPECT_EQ(culprit["ranks"], json({1})) << culprit;
}

TEST(DoctorOfRanks, ASumOverRanksThatFp16CannotHoldIsNamed) {
  for (const auto& [illness, alone] :
       {std::pair("sum of two", json::array()), std::pair("cast", json({0, 1}))}) {
    const auto records = log_of(2, illness);
    const auto culprits = of_kind(records, "culprit");
    ASSERT_EQ(culprits.size(), 2u) << illness;
    EXPECT_EQ(culprits[0]["op"], "sum over ranks");
    EXPECT_EQ(culprits[0]["layer"], "weight");
    EXPECT_EQ(culprits[0]["direction"], "backward");
    EXPECT_EQ(culprits[0]["ranks"], alone);
    EXPECT_EQ(culprits[0]["precision_is_cause"], true);
    EXPECT_EQ(culprits[0]["inputs"].size(), 2u);
    EXPECT_NE(culprits[0]["inputs"][0].get<std::string>().find(illness == std::string("cast") ? "150,000"
                                                                                              : "50,000"),
              std::string::npos)
        << culprits[0]["inputs"];
    const json finding = finding_of(records, "nan-producer");
    ASSERT_FALSE(finding.is_null());
    EXPECT_EQ(finding["severity"], "serious");
    EXPECT_NE(finding["remedy"].get<std::string>().find("run.reduction=fp32"), std::string::npos);
  }
}

TEST(DoctorOfRanks, ASumOfMicroBatchesThatIsTooLargeIsNamed) {
  const auto records = log_of(1, "batches");
  const auto culprits = of_kind(records, "culprit");
  ASSERT_EQ(culprits.size(), 2u);
  EXPECT_EQ(culprits[0]["op"], "sum of micro-batches");
  EXPECT_EQ(culprits[0]["layer"], "weight");
  EXPECT_EQ(culprits[0]["output"], "FP32 [1, 1]: largest magnitude 3.2e+19, whose square FP32 does not hold");
  EXPECT_EQ(records.front()["ranks"], 1);
}

TEST(DoctorOfRanks, ALossFarFromThoseOfTheOthersIsTold) {
  const auto records = log_of(3, "far off");
  const auto steps = of_kind(records, "step");
  ASSERT_EQ(steps.size(), 6u);
  EXPECT_EQ(steps[0]["rank_losses"], json({0.5, 0.5, 5.0}));
  EXPECT_EQ(steps[0]["loss"], 2.0);
  const json finding = finding_of(records, "rank-differs");
  ASSERT_FALSE(finding.is_null());
  EXPECT_EQ(finding["began"], 1);
  EXPECT_EQ(finding["step"], 5);
  EXPECT_EQ(finding["what"].get<std::string>().find(
                "Rank 2's loss is far from that of the other 2 ranks: 5.000 against"),
            0u)
      << finding["what"];
}

TEST(DoctorOfRanks, LossesOfRanksAreLoggedWhereTensorsAreLookedAt) {
  const auto records = log_of(2, "healthy");
  std::set<int64_t> with, looked_at;
  for (const json& record : of_kind(records, "step"))
    if (record.contains("rank_losses")) with.insert(record["step"].get<int64_t>());
  for (const json& record : of_kind(records, "probe")) looked_at.insert(record["step"].get<int64_t>());
  EXPECT_EQ(with, looked_at);
  EXPECT_EQ(with, (std::set<int64_t>{1, 3, 6, 9, 12}));
  EXPECT_TRUE(of_kind(records, "finding").empty());
}

// Merging.

/// All but the sum, which is rounded in another order.
bool same_counts(const TensorStats& a, const TensorStats& b) {
  TensorStats one = a, other = b;
  const double bound = 1e-12 * static_cast<double>(a.count) * static_cast<double>(a.amax);
  if (std::abs(one.sum - other.sum) > bound) return false;
  one.sum = other.sum = 0;
  return one.packed() == other.packed();
}

/// "" where the records are these tensors', each once, and no others of the role.
std::string fault_of(const std::vector<ProbeRecord>& records, const std::string& role,
                     const std::map<std::string, at::Tensor>& tensors) {
  std::set<std::string> seen;
  for (const ProbeRecord& record : records) {
    if (record.role != role) continue;
    if (!seen.insert(record.name).second) return role + " " + record.name + " is there twice";
    const auto tensor = tensors.find(record.name);
    if (tensor == tensors.end()) return role + " " + record.name + " is of nobody";
    if (!same_counts(record.stats, statistics_of(tensor->second)))
      return role + " " + record.name + " has other statistics";
  }
  return seen.size() == tensors.size() ? "" : role + ": some are missing";
}

struct Fork final : torch::nn::Module {
  torch::nn::Linear shared = register_module("shared", torch::nn::Linear(6, 5));
  torch::nn::Linear left = register_module("left", torch::nn::Linear(5, 4));
  torch::nn::Linear right = register_module("right", torch::nn::Linear(5, 4));
};

/// Rank 0 goes left, all others go right.
HALFSTEP_RANK_CASE(forks) {
  torch::manual_seed(3);
  Fork model;
  MixedPrecision mp(Precision::fp32(), model, {.autocast = kAnyMachine, .ranks = ranks});
  SGD optimizer(mp.params(), {.lr = 0.1});
  Probe probe(mp, {.every = 1});
  for (int step = 1; step <= 2; ++step) {
    torch::manual_seed(10 * step + ranks.rank());
    const bool goes_left = ranks.rank() == 0;
    std::map<std::string, at::Tensor> outputs;
    const at::Tensor loss = mp.forward([&] {
      const at::Tensor hidden = outputs["shared"] = model.shared(torch::randn({3, 6}));
      torch::nn::Linear& way = goes_left ? model.left : model.right;
      return (outputs[goes_left ? "left" : "right"] = way(hidden.relu())).square().mean();
    });
    mp.backward(loss);
    const GradSummary grads = mp.inspect_grads();
    std::map<std::string, at::Tensor> gradients, weights;
    for (const Param& param : mp.params()) gradients[param.name] = param.working.grad().clone();
    (void)optimizer.step(grads.unclipped());
    mp.advance(grads);
    optimizer.zero_grad();
    for (const Param& param : mp.params()) weights[param.name] = param.working.detach().clone();
    const auto merged = merged_over_ranks(probe.take(), ranks, /*parts=*/false);
    // Both ranks' tensors, as one.
    const at::Tensor own_way = outputs[goes_left ? "left" : "right"].detach();
    const at::Tensor ways = ranks.gathered(own_way);
    const std::map<std::string, at::Tensor> joined = {
        {"shared", ranks.gathered(outputs["shared"].detach().contiguous())},
        {"left", ways[0].contiguous()},
        {"right", ways.slice(0, 1).contiguous()}};
    for (const std::string& fault :
         {fault_of(merged, "activation", joined), fault_of(merged, "gradient", gradients),
          fault_of(merged, "weight", weights)})
      if (!fault.empty()) return "step " + std::to_string(step) + ": " + fault;
  }
  return "as joined";
}

TEST(MergedOverRanks, LayersThatSomeRanksDoNotUseAreThoseOfTheOthers) {
  for (const int size : {2, 3})
    for (const std::string& text : texts_of_ranks(size, "forks")) EXPECT_EQ(text, "as joined");
}

ProbeRecord record_of(int64_t step, const std::string& role, const std::string& name, int seed) {
  torch::manual_seed(seed);
  return {.step = step, .seconds = 0, .role = role, .name = name, .stats = statistics_of(torch::randn({64}))};
}

/// What each rank gives, of its own making: seeds are 100 times the rank and more.
std::vector<ProbeRecord> records_of(const std::string& what, int rank) {
  const int own = 100 * rank;
  if (what == "only rank " + std::to_string(rank))
    return {record_of(1, "activation", "a", own + 1), record_of(1, "gradient", "w", own + 2),
            record_of(2, "activation", "a", own + 3)};
  if (what == "another order" && rank == 0)
    return {record_of(1, "activation", "a", own + 1), record_of(1, "gradient", "w", 2),
            record_of(1, "activation", "b", own + 3)};
  if (what == "another order")
    return {record_of(1, "activation", "b", own + 3), record_of(1, "activation", "a", own + 1),
            record_of(1, "gradient", "w", 2), record_of(2, "gradient", "w", 4)};
  if (what == "twice" && rank == 0)
    return {record_of(1, "activation", "a", 1), record_of(1, "activation", "a", 2)};
  if (what == "twice") return {record_of(1, "activation", "a", 101)};
  return {};
}

std::string line_of(const ProbeRecord& record) {
  std::ostringstream text;
  text << record.step << " " << record.role << " " << record.name << ":";
  for (const int64_t number : record.stats.packed()) text << " " << number;
  return text.str() + "\n";
}

const std::vector<std::string> kMerges = {"none", "only rank 0", "only rank 1", "another order", "twice"};

HALFSTEP_RANK_CASE(merges_what_it_is_given) {
  std::string text;
  for (const bool parts : {false, true})
    for (const std::string& what : kMerges) {
      text += what + (parts ? ", in parts\n" : "\n");
      for (const ProbeRecord& record : merged_over_ranks(records_of(what, ranks.rank()), ranks, parts))
        text += line_of(record);
    }
  return text;
}

TEST(MergedOverRanks, RecordsAreMatchedByWhatTheyAreOf) {
  const auto joined = [](int64_t step, const std::string& role, const std::string& name,
                         const std::vector<int>& seeds) {
    ProbeRecord record{.step = step, .seconds = 0, .role = role, .name = name};
    for (const int seed : seeds) record.stats.merge(record_of(step, role, name, seed).stats);
    return line_of(record);
  };
  std::string expected;
  for (const bool parts : {false, true})
    for (const std::string& what : kMerges) {
      expected += what + (parts ? ", in parts\n" : "\n");
      for (const int rank : {0, 1})
        if (const int own = 100 * rank; what == "only rank " + std::to_string(rank))
          expected += joined(1, "activation", "a", {own + 1}) + joined(1, "gradient", "w", {own + 2}) +
                      joined(2, "activation", "a", {own + 3});
      // What all have alike is counted once, unless each has a part.
      if (what == "another order")
        expected += joined(1, "activation", "a", {1, 101}) +
                    joined(1, "gradient", "w", parts ? std::vector{2, 2} : std::vector{2}) +
                    joined(1, "activation", "b", {3, 103}) + joined(2, "gradient", "w", {4});
      if (what == "twice")
        expected += joined(1, "activation", "a", {1, 101}) + joined(1, "activation", "a", {2});
    }
  for (const std::string& text : texts_of_ranks(2, "merges_what_it_is_given")) EXPECT_EQ(text, expected);
}

struct Chain final : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 6));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(6, 6));
  torch::nn::Linear third = register_module("third", torch::nn::Linear(6, 6));
};

/// Sharded weights lie one behind the other in one storage; a Linear of three dimensions is given a view of
/// its weight, and adds its bias in place.
HALFSTEP_RANK_CASE(layers_of_shards) {
  const auto sharding = static_cast<Sharding>(std::stoi(arguments.at(0)));
  torch::manual_seed(3);
  Chain model;
  {
    const torch::NoGradGuard no_grad;
    model.first->weight.copy_(torch::eye(6));
    model.first->bias.zero_();
    model.second->weight.fill_(10);
  }
  MixedPrecision mp(
      Precision::fp32(), model,
      {.autocast = kAnyMachine, .accumulation = Accumulation::Fp32, .ranks = ranks, .sharding = sharding});
  AdamW optimizer(mp.params(), {.lr = 0.1});
  Probe probe(mp, {.every = 1});
  const auto forward = [&](const at::Tensor& input, std::map<std::string, at::Tensor>& outputs) {
    return mp.forward([&] {
      at::Tensor rows = input;
      for (const auto& [name, layer] : {std::pair("first", model.first), std::pair("second", model.second),
                                        std::pair("third", model.third)})
        rows = outputs[name] = torch::nn::Linear(layer)->forward(rows);
      return rows.square().mean();
    });
  };
  std::map<std::string, at::Tensor> outputs;
  mp.backward(forward(torch::randn({2, 4, 6}), outputs), {.last = true});
  mp.close_sum();
  const GradSummary grads = mp.inspect_grads();
  (void)optimizer.step(grads.unclipped());
  mp.advance(grads);
  optimizer.zero_grad();
  if (const std::string fault = fault_of(probe.take(), "activation", outputs); !fault.empty()) return fault;
  // With weights in parts the model's memory is not that of the params.
  if (sharding == Sharding::Weights) return "as alone";
  std::string named;
  {
    OpTracer tracer(mp.params());
    const at::Tensor loss = forward(torch::full({2, 4, 6}, 1e38f), outputs);
    mp.backward(loss, {.last = true});
    const auto culprit = tracer.culprit(loss);
    named = culprit ? culprit->layer : "nobody";
  }
  return named == "second" ? "as alone" : "the culprit is of " + named;
}

TEST(DoctorOfRanks, OutputsAndCulpritsAreOfTheirLayersWithShardedWeightsToo) {
  for (const Sharding sharding : {Sharding::None, Sharding::States, Sharding::Gradients, Sharding::Weights})
    for (const std::string& text :
         texts_of_ranks(2, "layers_of_shards", {std::to_string(static_cast<int>(sharding))}))
      EXPECT_EQ(text, "as alone") << static_cast<int>(sharding);
}

}  // namespace doctor_ranks_test
}  // namespace halfstep
