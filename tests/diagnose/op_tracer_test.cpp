// The tracer names the operation that made a number which is not finite, its layer and its direction: planted
// into each result of each operation of two models in turn, and from causes that training has.
//
//   HALFSTEP_EVERY_SITE=1 build/release/bin/op_tracer_test --gtest_filter='OpTracer.Names*WasPlanted'
//
// takes every site, not each nineteenth, and prints the counts and what was not named rightly.
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/op_tracer.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <compare>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <set>
#include <unordered_map>

#include "support/any_machine.h"

/// Of no namespace, as a user's may be: writes a NaN by a pointer, in forward or in backward.
struct WritesNan : torch::autograd::Function<WritesNan> {
  static at::Tensor with_nan(const at::Tensor& values) {
    at::Tensor copy = values.clone();
    copy.mutable_data_ptr<float>()[0] = NAN;
    return copy;
  }
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, bool in_forward) {
    context->saved_data["in_forward"] = in_forward;
    return in_forward ? with_nan(x) : x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    return {context->saved_data["in_forward"].toBool() ? grads[0] : with_nan(grads[0]), at::Tensor()};
  }
};

namespace halfstep {
namespace op_tracer_test {

using testing::kAnyMachine;
constexpr double kInf = std::numeric_limits<double>::infinity();

/// Where the step is, as the test itself knows it and not as the tracer infers it: which module a model is
/// in, by what the model says of itself, and in backward, which module made the node that runs.
struct Where {
  static inline std::string layer{};
  static inline bool in_backward = false;
  static inline std::unordered_map<torch::autograd::Node*, std::string> layers_of{};

  static void start() {
    layer = "before the first layer";
    in_backward = false;
    layers_of.clear();
  }

  /// The nodes behind a tensor that nobody has claimed are of this module.
  static void claim(const at::Tensor& tensor) {
    std::vector<torch::autograd::Node*> open;
    if (tensor.defined() && tensor.grad_fn()) open.push_back(tensor.grad_fn().get());
    while (!open.empty()) {
      torch::autograd::Node* const node = open.back();
      open.pop_back();
      if (!layers_of.emplace(node, layer).second) continue;
      for (const auto& edge : node->next_edges())
        if (edge.function) open.push_back(edge.function.get());
    }
  }

  /// Into a module and out of it.
  template <typename Module>
  static at::Tensor run(const std::string& path, Module& module, const at::Tensor& input) {
    claim(input);
    layer = path;
    at::Tensor output = module(input);
    claim(output);
    layer = "after " + path;
    return output;
  }

  /// A sum of gradients between two nodes is of the node that ran last.
  struct Enter final : torch::autograd::FunctionPreHook {
    explicit Enter(std::string of) : layer_of_node(std::move(of)) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
      layer = layer_of_node;
      return grads;
    }
    std::string layer_of_node;
  };

  /// From here on all is backward: the loss times its scale and the first gradient, too.
  static void follow_backward(const at::Tensor& loss) {
    claim(loss);
    in_backward = true;
    for (const auto& [node, of] : layers_of) node->add_pre_hook(std::make_unique<Enter>(of));
  }
};

/// A transformer of so many blocks, attention by hand or LibTorch's, between an embedding and a loss.
struct Block : torch::nn::Module {
  Block() {
    attention = register_module("attention", std::make_shared<Module>());
    feed_forward = register_module("feed_forward", std::make_shared<Module>());
    first_norm = register_module("first_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})));
    query_key_value = attention->register_module("query_key_value", torch::nn::Linear(16, 48));
    projection = attention->register_module("projection", torch::nn::Linear(16, 16));
    second_norm = register_module("second_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})));
    up = feed_forward->register_module("up", torch::nn::Linear(16, 64));
    down = feed_forward->register_module("down", torch::nn::Linear(64, 16));
  }

  at::Tensor forward(const std::string& path, at::Tensor x, bool fused) {
    const at::Tensor all = Where::run(path + ".attention.query_key_value", query_key_value,
                                      Where::run(path + ".first_norm", first_norm, x));
    const auto parts = all.view({2, 12, 3, 4, 4}).permute({2, 0, 3, 1, 4}).unbind(0);
    at::Tensor mixed;
    if (fused) {
      mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    } else {
      // Two results of one operation, both used.
      const auto [deviation, mean] = at::std_mean(parts[0], {-1}, /*unbiased=*/false, /*keepdim=*/true);
      const at::Tensor query = (parts[0] - mean) / (deviation + 0.1);
      const at::Tensor mask = torch::ones({12, 12}, at::kBool).triu(1);
      const at::Tensor logits = at::matmul(query, parts[1].transpose(-1, -2)).div_(2.0);
      mixed = at::matmul(at::softmax(logits.masked_fill_(mask, -kInf), -1), parts[2]);
    }
    x = Where::run(path + ".attention.projection", projection, mixed.transpose(1, 2).reshape({2, 12, 16}))
            .add_(x);
    const at::Tensor wide =
        Where::run(path + ".feed_forward.up", up, Where::run(path + ".second_norm", second_norm, x));
    return x + Where::run(path + ".feed_forward.down", down, at::gelu(wide));
  }

  std::shared_ptr<Module> attention, feed_forward;
  torch::nn::LayerNorm first_norm{nullptr}, second_norm{nullptr};
  torch::nn::Linear query_key_value{nullptr}, projection{nullptr}, up{nullptr}, down{nullptr};
};

struct Transformer : torch::nn::Module {
  Transformer(int block_count, bool fused_attention) : fused(fused_attention) {
    embedding = register_module("embedding", torch::nn::Embedding(17, 16));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < block_count; ++i) blocks->push_back(std::make_shared<Block>());
    head = register_module("head", torch::nn::Linear(16, 17));
  }

  at::Tensor loss() {
    const at::Tensor ids = torch::arange(24).remainder(17).view({2, 12});
    at::Tensor x = Where::run("embedding", embedding, ids);
    for (std::size_t i = 0; i < blocks->size(); ++i)
      x = blocks->at<Block>(i).forward("blocks." + std::to_string(i), x, fused);
    const at::Tensor logits = Where::run("head", head, x);
    return at::cross_entropy_loss(logits.view({24, 17}), ids.roll(-1, 1).reshape({24}));
  }

  bool fused;
  torch::nn::Embedding embedding{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::Linear head{nullptr};
};

struct ConvNet : torch::nn::Module {
  ConvNet() {
    stem = register_module("stem", std::make_shared<Module>());
    first = stem->register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).padding(1)));
    norm = stem->register_module("norm", torch::nn::BatchNorm2d(8));
    second = register_module("second", torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 8, 3).padding(1)));
    shortcut = register_module("shortcut", torch::nn::Conv2d(3, 8, 1));
    head = register_module("head", torch::nn::Linear(8, 5));
  }

  at::Tensor loss() {
    const at::Tensor image = torch::linspace(-1, 1, 4 * 3 * 8 * 8).view({4, 3, 8, 8}).sin();
    at::Tensor x = Where::run("stem.norm", norm, Where::run("stem.first", first, image));
    x = Where::run("second", second, x.relu_());
    x = Where::run("shortcut", shortcut, image).add_(x);
    // Two results of one operation, both used.
    const auto [variance, mean] =
        at::var_mean(x, at::IntArrayRef{2, 3}, /*unbiased=*/false, /*keepdim=*/true);
    x = (x - mean).mul_(at::rsqrt(variance + 0.1));
    x = at::adaptive_avg_pool2d(at::silu(at::max_pool2d(x, 2)), {1, 1}).flatten(1);
    return at::cross_entropy_loss(Where::run("head", head, at::tanh_(x)), torch::arange(4));
  }

  std::shared_ptr<Module> stem;
  torch::nn::Conv2d first{nullptr}, second{nullptr}, shortcut{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear head{nullptr};
};

/// Where a number is planted: after a call of an operation, into one of its results.
struct Site {
  std::string op, layer, direction;
  std::size_t result = 0;
  bool in_place = false;  // the result is memory that the operation was given to write to
  auto operator<=>(const Site&) const = default;
};

/// Writes a NaN or an Inf into the n-th result that has new numbers, of all results of all operations.
struct Plant {
  static inline int64_t count = 0, at = -1;
  static inline double value = NAN;
  static inline std::optional<Site> site{};

  struct Inputs final : at::ObserverContext {
    std::vector<const void*> memory{};
  };

  static void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& see) {
    if (value.isTensor()) see(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) see(tensor);
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
    auto inputs = std::make_unique<Inputs>();
    for (const c10::IValue& input : call.inputs())
      for_each_tensor(input, [&](const at::Tensor& tensor) {
        if (tensor.defined() && tensor.has_storage()) inputs->memory.push_back(tensor.storage().data());
      });
    return inputs;
  }

  /// Memory without numbers of its own, and what only shows memory in another way.
  static bool makes_no_numbers(std::string_view op) {
    constexpr std::string_view kOthers[] = {"set_",     "detach_",    "as_strided_", "t_",
                                            "squeeze_", "unsqueeze_", "transpose_",  "requires_grad_"};
    return op.starts_with("empty") || op.starts_with("new_empty") || op.starts_with("resize") ||
           op.starts_with("_resize") || std::ranges::find(kOthers, op) != std::end(kOthers);
  }

  static void end(const at::RecordFunction& call, at::ObserverContext* context) {
    std::string_view name = call.name();
    name.remove_prefix(std::min(name.size(), name.find("::") + 2));
    if (makes_no_numbers(name)) return;
    const auto& memory = static_cast<Inputs*>(context)->memory;
    std::size_t result = 0;
    for (std::size_t i = 0; i < call.outputs().size(); ++i)
      for_each_tensor(call.outputs()[i], [&](const at::Tensor& tensor) {
        const std::size_t index = result++;
        if (!tensor.defined() || tensor.numel() == 0 || !tensor.is_floating_point()) return;
        const bool is_given = std::ranges::find(memory, tensor.storage().data()) != memory.end();
        if (is_given) {  // written to, or only viewed
          const auto schema = call.operator_schema();
          if (!schema || i >= schema->returns().size()) return;
          const c10::AliasInfo* const alias = schema->returns()[i].alias_info();
          if (!alias || !alias->isWrite()) return;
        }
        if (count++ != at) return;
        site = Site{.op = std::string(name),
                    .layer = Where::layer,
                    .direction = Where::in_backward ? "backward" : "forward",
                    .result = index,
                    .in_place = is_given};
        write(tensor);
      });
  }

  /// Into memory, so that no version counter tells.
  static void write(const at::Tensor& tensor) {
    const int64_t place = tensor.storage_offset();
    auto* const memory = static_cast<char*>(tensor.storage().mutable_data()) + place * tensor.element_size();
    if (tensor.scalar_type() == at::kFloat) {
      *reinterpret_cast<float*>(memory) = static_cast<float>(value);
    } else if (tensor.scalar_type() == at::kBFloat16) {
      *reinterpret_cast<c10::BFloat16*>(memory) = static_cast<float>(value);
    } else if (tensor.scalar_type() == at::kHalf) {
      *reinterpret_cast<c10::Half*>(memory) = static_cast<float>(value);
    } else if (tensor.scalar_type() == at::kDouble) {
      *reinterpret_cast<double*>(memory) = value;
    }
  }

  Plant()
      : handle(at::addThreadLocalCallback(at::RecordFunctionCallback(&begin, &end)
                                              .needsInputs(true)
                                              .needsOutputs(true)
                                              .scopes({at::RecordScope::FUNCTION}))) {
    count = 0;
    site.reset();
  }
  ~Plant() { at::removeCallback(handle); }
  at::CallbackHandle handle;
};

struct Outcome {
  std::optional<Site> planted{};
  bool harmed = false;
  std::optional<CulpritRecord> culprit{};
};

/// One forward and backward, with a number planted at the place of this number.
template <typename Model, typename... Arguments>
Outcome step_with_plant(const Precision& precision, int64_t place, double value, Arguments... arguments) {
  torch::manual_seed(3);
  Model model(arguments...);
  MixedPrecision mp(precision, model, {.autocast = kAnyMachine});
  Plant::at = place;
  Plant::value = value;
  Where::start();
  const Plant plant;  // before the tracer, which then sees what it leaves
  const OpTracer tracer(mp.params());
  const at::Tensor loss = mp.forward([&] { return model.loss(); });
  Where::follow_backward(loss);
  mp.backward(loss);
  Outcome outcome{.planted = Plant::site, .culprit = tracer.culprit(loss)};
  const at::RecordFunctionGuard not_recorded(false);
  outcome.harmed = !loss.isfinite().item<bool>();
  for (const Param& param : mp.params())
    if (param.working.grad().defined()) outcome.harmed |= !param.working.grad().isfinite().all().item<bool>();
  return outcome;
}

/// Numbers planted in one model at one precision, and how many were named rightly.
struct Tally {
  int64_t planted = 0;   ///< places, times two numbers
  int64_t harmless = 0;  ///< the loss and all gradients stayed finite
  int64_t forward = 0, backward = 0, in_place = 0, second_results = 0;  ///< of those that did harm
  int64_t op = 0, layer = 0, direction = 0, exact = 0;                  ///< right; and all three
  std::set<Site> sites{};                                               ///< that did harm
  std::string misses{};

  int64_t harmful() const { return forward + backward; }
  void add(const Tally& other) {
    planted += other.planted, harmless += other.harmless;
    forward += other.forward, backward += other.backward;
    in_place += other.in_place, second_results += other.second_results;
    op += other.op, layer += other.layer, direction += other.direction, exact += other.exact;
  }
};

/// Why a culprit that is not the planted site was named, as far as it can be told from its record.
std::string cause_of(const Site& site, const std::optional<CulpritRecord>& culprit) {
  if (!culprit) return "nothing was named";
  if (culprit->op != site.op) return detail::concat("another operation was named: ", sentence(*culprit));
  if (culprit->direction != site.direction) return "named in " + culprit->direction;
  return "named in the layer '" + culprit->layer + "'";
}

void look_at(Tally& tally, int64_t place, double value, const Outcome& outcome) {
  ++tally.planted;
  if (!outcome.harmed) {  // nobody used the number, or only as a divisor
    ++tally.harmless;
    return;
  }
  const Site& site = *outcome.planted;
  ++(site.direction == "forward" ? tally.forward : tally.backward);
  tally.in_place += site.in_place;
  tally.second_results += site.result > 0;
  tally.sites.insert(site);
  const auto& culprit = outcome.culprit;
  const bool op = culprit && culprit->op == site.op, layer = culprit && culprit->layer == site.layer,
             direction = culprit && culprit->direction == site.direction;
  tally.op += op, tally.layer += layer, tally.direction += direction;
  tally.exact += op && layer && direction;
  if (op && layer && direction) return;
  tally.misses += detail::concat("    ", place, ", ", std::isnan(value) ? "NaN" : "Inf", " in result ",
                                 site.result, " of ", site.op, ", ", site.direction, ", ", site.layer, ": ",
                                 cause_of(site, culprit), "\n");
}

bool takes_every_site() { return std::getenv("HALFSTEP_EVERY_SITE") != nullptr; }

template <typename Model, typename... Arguments>
Tally plant_everywhere(const Precision& precision, Arguments... arguments) {
  Tally tally;
  // HALFSTEP_EVERY_SITE=1 for all of them: some minutes.
  const int64_t stride = takes_every_site() ? 1 : 19;
  for (int64_t place = 0;; place += stride) {
    const Outcome with_nan = step_with_plant<Model>(precision, place, NAN, arguments...);
    if (!with_nan.planted) return tally;
    look_at(tally, place, NAN, with_nan);
    look_at(tally, place, kInf, step_with_plant<Model>(precision, place, kInf, arguments...));
  }
}

std::string text_of(const Tally& tally, std::size_t distinct) {
  return detail::concat(tally.exact, " of ", tally.harmful(), " named with operation, layer and direction (",
                        tally.op, " operation, ", tally.layer, " layer, ", tally.direction, " direction); ",
                        tally.forward, " in forward, ", tally.backward, " in backward, ", tally.in_place,
                        " in place, ", tally.second_results, " in second and later results, ", distinct,
                        " distinct sites; ", tally.planted, " planted, ", tally.harmless, " harmless");
}

TEST(OpTracer, NamesTheOperationTheLayerAndTheDirectionWhereANumberWasPlanted) {
  Tally all;
  std::set<std::pair<std::string, Site>> distinct;  // by model
  const auto add = [&](const char* model, const std::string& what, const Tally& tally) {
    all.add(tally);
    for (const Site& site : tally.sites) distinct.insert({model, site});
    std::cout << model << ", " << what << ": " << text_of(tally, tally.sites.size()) << "\n" << tally.misses;
    EXPECT_GE(tally.harmful(), 10) << what;
    // Of each model where every site is tried: one of some ten of a thinned form is more than a twentieth.
    if (takes_every_site()) {
      EXPECT_GE(static_cast<double>(tally.exact), 0.95 * static_cast<double>(tally.harmful()))
          << model << ", " << what;
    }
  };
  add("block", "FP32", plant_everywhere<Transformer>(Precision::fp32(), 1, false));
  add("block", "BF16", plant_everywhere<Transformer>(Precision::bf16(), 1, false));
  add("two blocks with LibTorch's attention", "FP16",
      plant_everywhere<Transformer>(Precision::fp16(), 2, true));
  add("conv net", "FP32", plant_everywhere<ConvNet>(Precision::fp32()));
  add("conv net", "BF16", plant_everywhere<ConvNet>(Precision::bf16()));
  std::cout << "all: " << text_of(all, distinct.size()) << "\n";
  EXPECT_GE(static_cast<double>(all.exact), 0.95 * static_cast<double>(all.harmful()));
  EXPECT_GE(distinct.size(), 60u);
  EXPECT_GT(all.in_place, 0);
  EXPECT_GT(all.second_results, 0);
}

TEST(OpTracer, SaysNothingOfAHealthyStepAndChangesNoBit) {
  for (const Precision& precision : {Precision::fp32(), Precision::bf16(), Precision::fp16()}) {
    std::vector<at::Tensor> grads[2];
    for (const bool traced : {false, true}) {
      torch::manual_seed(3);
      Transformer model(1, false);
      MixedPrecision mp(precision, model, {.autocast = kAnyMachine});
      std::optional<OpTracer> tracer;
      if (traced) tracer.emplace(mp.params());
      const at::Tensor loss = mp.forward([&] { return model.loss(); });
      mp.backward(loss);
      if (traced) {
        EXPECT_FALSE(tracer->culprit(loss)) << sentence(*tracer->culprit(loss));
        EXPECT_TRUE(tracer->producers().empty());  // a mask's -Inf is nobody's fault
      }
      for (const Param& param : mp.params()) grads[traced].push_back(param.working.grad().clone());
    }
    for (std::size_t i = 0; i < grads[0].size(); ++i) EXPECT_TRUE(at::equal(grads[0][i], grads[1][i]));
  }
}

/// The culprit of one step in this precision.
template <typename Loss>
CulpritRecord culprit_of(const Precision& precision, torch::nn::Module& model, Loss&& loss_of) {
  MixedPrecision mp(precision, model, {.autocast = kAnyMachine});
  const OpTracer tracer(mp.params());
  const at::Tensor loss = mp.forward(loss_of);
  mp.backward(loss);
  const auto culprit = tracer.culprit(loss);
  EXPECT_TRUE(culprit);
  return culprit.value_or(CulpritRecord{.op = "none"});
}

TEST(OpTracer, TellsWhetherPrecisionIsTheCause) {
  torch::nn::Sequential model(torch::nn::Linear(8, 8), torch::nn::Linear(8, 4));
  // 300 * 8 * 64 is beyond FP16, and the product of a layer that is by itself healthy.
  {
    const torch::NoGradGuard no_grad;
    model[0]->as<torch::nn::Linear>()->weight.fill_(64.0);
  }
  const at::Tensor x = torch::full({2, 8}, 300.0);
  const CulpritRecord overflow =
      culprit_of(Precision::fp16(), *model, [&] { return model->forward(x).to(at::kFloat).mean(); });
  EXPECT_EQ(overflow.layer, "0");
  EXPECT_TRUE(overflow.precision_is_cause) << sentence(overflow);
  EXPECT_EQ(overflow.direction, "forward");
  EXPECT_NE(overflow.verdict.find("FP16 ends at 65504"), std::string::npos) << sentence(overflow);

  torch::nn::Linear linear(4, 4);
  const CulpritRecord log_of_zero = culprit_of(
      Precision::bf16(), *linear, [&] { return linear(torch::zeros({2, 4})).mul(0).log().mean(); });
  EXPECT_EQ(log_of_zero.op, "log") << sentence(log_of_zero);
  EXPECT_FALSE(log_of_zero.precision_is_cause);
  EXPECT_EQ(log_of_zero.layer, "after the model");  // which is one layer
}

TEST(OpTracer, NamesWhatWasNotFiniteFromTheStart) {
  torch::nn::Linear linear(4, 4);
  at::Tensor batch = torch::zeros({2, 4});
  batch[1][2] = kInf;
  const CulpritRecord of_batch = culprit_of(Precision::bf16(), *linear, [&] { return linear(batch).mean(); });
  EXPECT_EQ(of_batch.op, "input");
  EXPECT_EQ(of_batch.inside, "addmm");
  EXPECT_FALSE(of_batch.precision_is_cause);

  torch::nn::Linear damaged(4, 4);
  MixedPrecision mp(Precision::bf16(), *damaged, {.autocast = kAnyMachine});
  {
    const torch::NoGradGuard no_grad;
    damaged->weight[0][0] = NAN;
  }
  const OpTracer tracer(mp.params());
  const at::Tensor loss = at::linear(torch::ones({2, 4}), damaged->weight.to(at::kFloat)).mean();
  const auto of_weight = tracer.culprit(loss);
  ASSERT_TRUE(of_weight);
  EXPECT_EQ(of_weight->op, "weight");
  EXPECT_EQ(of_weight->layer, "the model");
}

TEST(OpTracer, WhereAResultGoesIsNoInputOfIt) {
  torch::nn::Linear linear(4, 4);
  const CulpritRecord culprit = culprit_of(Precision::fp32(), *linear, [&] {
    const at::Tensor narrow = torch::zeros({2, 4}, at::kHalf);
    narrow.copy_(linear(torch::ones({2, 4})) * 0.0 + 1e5);
    return narrow.to(at::kFloat).mean();
  });
  EXPECT_EQ(culprit.inputs, std::vector<std::string>{"src: FP32 [2, 4], 100,000 to 100,000"})
      << sentence(culprit);
  EXPECT_TRUE(culprit.precision_is_cause);
}

TEST(OpTracer, FindsWhatOnlyBackwardMakes) {
  torch::nn::Linear linear(4, 4);
  // The loss is finite; the derivative of a square root at 0 is not.
  const CulpritRecord culprit = culprit_of(
      Precision::fp32(), *linear, [&] { return at::sqrt(linear(torch::ones({2, 4})) * 0.0).mean(); });
  EXPECT_EQ(culprit.direction, "backward");
  EXPECT_EQ(culprit.inside, "SqrtBackward0") << sentence(culprit);
  EXPECT_FALSE(culprit.precision_is_cause);
}

TEST(OpTracer, AMaskOfARowMakesTheSoftmaxTheCulprit) {
  torch::nn::Linear linear(4, 4);
  const CulpritRecord culprit = culprit_of(Precision::bf16(), *linear, [&] {
    const at::Tensor mask = torch::tensor({{true, true, true, true}, {true, false, false, false}});
    return at::softmax(linear(torch::ones({2, 4})).masked_fill(mask, -kInf), -1).sum();
  });
  EXPECT_NE(culprit.op.find("softmax"), std::string::npos) << sentence(culprit);
}

/// What one operation gives that must not be finite, and what is said of it.
CulpritRecord culprit_of_op(const std::function<at::Tensor()>& run) {
  const OpTracer tracer({});
  const at::Tensor result = run();
  const auto culprit = tracer.culprit(result);
  EXPECT_TRUE(culprit);
  return culprit.value_or(CulpritRecord{.op = "none"});
}

// What a mixed-precision run can choose is FP32: precision is the cause where FP32 has a number.
TEST(OpTracer, PrecisionIsTheCauseOnlyWhereFp32HasANumber) {
  const auto of = [](at::ScalarType type, std::vector<double> values) {
    return torch::tensor(values, at::kDouble).to(type);
  };
  struct Case {
    const char* what;
    std::function<at::Tensor()> run;
    bool precision;
  };
  const Case cases[] = {
      {"a sum", [&] { return torch::full({2000}, 100.0, at::kHalf).sum(); }, true},
      {"a running sum", [&] { return torch::full({2000}, 100.0, at::kHalf).cumsum(0); }, true},
      {"a running product", [&] { return torch::full({20}, 4.0, at::kHalf).cumprod(0); }, true},
      {"a product beyond FP32", [&] { return torch::full({200}, 4.0, at::kHalf).prod(); }, false},
      {"exp in FP16", [&] { return of(at::kHalf, {12, 0}).exp(); }, true},
      {"exp in FP32", [&] { return of(at::kFloat, {89, 0}).exp(); }, false},
      {"exp in BF16", [&] { return of(at::kBFloat16, {100, 0}).exp(); }, false},
      {"a matrix product",
       [&] { return torch::full({2, 2}, 300.0, at::kHalf).mm(torch::full({2, 2}, 300.0, at::kHalf)); }, true},
      {"a variance", [&] { return of(at::kHalf, {300, -300}).var(); }, true},
      {"an added number", [&] { return of(at::kHalf, {1, 2}) + 1e5; }, true},
      {"one over a subnormal", [&] { return of(at::kHalf, {1e-5, 1}).reciprocal(); }, true},
      {"a cast", [&] { return of(at::kFloat, {70000, 1}).to(at::kHalf); }, true},
      {"a cast by copy_", [&] { return torch::zeros({2}, at::kHalf).copy_(of(at::kFloat, {70000, 1})); },
       true},
      {"with whole numbers",
       [&] {
         return torch::zeros({3}, at::kHalf)
             .scatter_add_(0, torch::tensor({1, 1}, at::kLong), of(at::kHalf, {60000, 60000}));
       },
       true},
      {"a softmax without logits", [&] { return of(at::kFloat, {-kInf, -kInf}).softmax(0); }, false},
      {"a division by 0", [&] { return of(at::kHalf, {1, 1}) / of(at::kHalf, {0, 1}); }, false},
      {"a logarithm of 0", [&] { return of(at::kHalf, {0, 1}).log(); }, false},
      {"a root of -1", [&] { return of(at::kFloat, {-1, 1}).sqrt(); }, false},
      // What is written is an argument once more.
      {"in place, of itself",
       [&] {
         at::Tensor x = of(at::kHalf, {300, 1});
         return x.mul_(x);
       },
       true},
      {"in place, of a part of itself",
       [&] {
         at::Tensor x = of(at::kHalf, {300, 300});
         return x.select(0, 0).mul_(x.select(0, 0));
       },
       true},
      {"into an argument",
       [&] {
         at::Tensor x = of(at::kHalf, {300, 1});
         return at::mul_out(x, x, x);
       },
       true},
      // Of several results of the same size one is finite.
      {"a deviation of one number", [&] { return std::get<0>(at::std_mean(of(at::kFloat, {1}), 0, true)); },
       false},
      {"logarithms of a list",
       [&] { return at::_foreach_log({of(at::kFloat, {0}), of(at::kFloat, {1})})[0]; }, false},
      {"a type as an argument",
       [&] {
         const at::Tensor two = of(at::kHalf, {2, 2}), grad = of(at::kHalf, {60000, -60000});
         return at::_softmax_backward_data(grad, two, 0, at::kHalf);
       },
       true},
  };
  for (const Case& each : cases) {
    const CulpritRecord culprit = culprit_of_op(each.run);
    EXPECT_EQ(culprit.precision_is_cause, each.precision) << each.what << ": " << sentence(culprit);
  }
}

TEST(OpTracer, ABlameOfTheInputsLeavesOpenWhatRoundedThemToZero) {
  const CulpritRecord culprit =
      culprit_of_op([] { return torch::tensor({-20.0, 1.0}, at::kHalf).exp().log(); });
  EXPECT_EQ(culprit.op, "log");
  EXPECT_FALSE(culprit.precision_is_cause);
  EXPECT_NE(culprit.verdict.find("FP16 rounded it there"), std::string::npos) << culprit.verdict;
}

/// The culprit where a loss of these finite values is computed, beside a layer.
template <typename Make>
CulpritRecord culprit_of_values(Make&& make) {
  torch::nn::Linear linear(4, 4);
  return culprit_of(Precision::fp32(), *linear, [&] { return (linear(torch::ones({4, 4})) * make()).sum(); });
}

TEST(OpTracer, NamesAFunctionThatCallsNoOperation) {
  torch::nn::Linear linear(4, 4);
  for (const bool in_forward : {true, false}) {
    const CulpritRecord culprit = culprit_of(Precision::fp32(), *linear, [&] {
      return linear(in_forward ? WritesNan::apply(linear(torch::ones({2, 4})), true)
                               : WritesNan::apply(linear(torch::ones({2, 4})), false))
          .sum();
    });
    EXPECT_EQ(culprit.op, "WritesNan") << sentence(culprit);
    EXPECT_EQ(culprit.direction, in_forward ? "forward" : "backward") << sentence(culprit);
  }
}

TEST(OpTracer, AWriteBesideTheNumbersDoesNotClearThem) {
  // log makes a NaN in row 0; row 1 is written to, and is fine.
  const CulpritRecord culprit = culprit_of_values([] {
    const at::Tensor rows = torch::tensor({-1.0F, 1.0F, 1.0F, 1.0F}).view({4, 1}).log();
    rows[1].add_(1);
    return rows;
  });
  EXPECT_EQ(culprit.op, "log") << sentence(culprit);
}

TEST(OpTracer, MemoryThatTheProgramAllocatesIsWrittenToByOperations) {
  const CulpritRecord drawn = culprit_of_values([] { return torch::empty({4, 4}).uniform_(-2, -1).log_(); });
  EXPECT_EQ(drawn.op, "log_") << sentence(drawn);
  const at::Tensor large = torch::full({4, 4}, 1e6);
  const CulpritRecord copied =
      culprit_of_values([&] { return torch::empty({4, 4}, at::kHalf).copy_(large).to(at::kFloat); });
  EXPECT_EQ(copied.op, "copy_") << sentence(copied);
  EXPECT_TRUE(copied.precision_is_cause) << sentence(copied);
}

/// Fills memory by a pointer and copies it by an operation, as oneDNN's convolutions do.
at::Tensor copied_by_hand(const at::Tensor& x) {
  const at::Tensor made = at::empty_like(x);
  std::copy_n(x.const_data_ptr<float>(), x.numel(), made.mutable_data_ptr<float>());
  return made.clone();
}

TEST(OpTracer, WhatAnOperationFillsByHandIsNotBlamedOnTheNextOneInIt) {
  torch::Library library(torch::Library::FRAGMENT, "op_tracer_test", std::nullopt, __FILE__, __LINE__);
  library.def("copied_by_hand(Tensor x) -> Tensor");
  library.impl("copied_by_hand", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(copied_by_hand)));
  const auto by_hand = c10::Dispatcher::singleton()
                           .findSchemaOrThrow("op_tracer_test::copied_by_hand", "")
                           .typed<at::Tensor(const at::Tensor&)>();
  const at::Tensor negative = torch::full({4, 4}, -1.0F);
  const CulpritRecord before = culprit_of_values([&] { return by_hand.call(negative.log()); });
  EXPECT_EQ(before.op, "log") << sentence(before);
  // Outside any operation the program has made it.
  const CulpritRecord outside = culprit_of_values([&] { return copied_by_hand(torch::full({4, 4}, NAN)); });
  EXPECT_NE(outside.op, "clone") << sentence(outside);
}

TEST(OpTracer, LooksAtComplexNumbers) {
  const at::Tensor large = torch::full({4, 4}, 3e38F);
  const CulpritRecord overflow = culprit_of_values([&] { return at::abs(torch::fft::fft(large)); });
  EXPECT_EQ(overflow.op, "_fft_r2c") << sentence(overflow);
  // Four times 3e38 is a number in FP64 only, so no precision that a run can choose helps.
  EXPECT_NE(overflow.verdict.find("1.2e+39"), std::string::npos) << sentence(overflow);
  EXPECT_FALSE(overflow.precision_is_cause) << sentence(overflow);
  const CulpritRecord before =
      culprit_of_values([] { return at::abs(torch::fft::fft(torch::full({4, 4}, -1.0F).log())); });
  EXPECT_EQ(before.op, "log") << sentence(before);
}

TEST(OpTracer, WhatBackwardPutsOthersInThePlaceOfIsHarmless) {
  for (const bool is_harmed : {false, true}) {
    torch::nn::Linear linear(4, 4);
    MixedPrecision mp(Precision::fp32(), *linear);
    const OpTracer tracer(mp.params());
    // The derivative of a root is Inf at 0, and relu's is 0 there. That of 0 * root is NaN.
    const at::Tensor loss = mp.forward([&] {
      const at::Tensor y = linear(torch::ones({2, 4}));
      const at::Tensor harmless = at::sqrt(at::relu(y - 100)).sum();
      return is_harmed ? harmless + (at::pow(y * 0.0, 0.5) * 3).sum() : harmless;
    });
    mp.backward(loss);
    EXPECT_EQ(linear->weight.grad().isfinite().all().item<bool>(), !is_harmed);
    const auto culprit = tracer.culprit(loss);
    ASSERT_EQ(culprit.has_value(), is_harmed) << (culprit ? sentence(*culprit) : "nothing");
    if (is_harmed) {
      EXPECT_EQ(culprit->inside, "PowBackward0") << sentence(*culprit);
    }
  }
}

TEST(OpTracer, OverSeveralStepsTellsOfTheStepOfTheLoss) {
  torch::nn::Linear linear(4, 4);
  MixedPrecision mp(Precision::fp32(), *linear);
  const OpTracer tracer(mp.params());
  for (const bool is_harmed : {false, true, false}) {
    const at::Tensor loss = mp.forward([&] {
      const at::Tensor y = linear(torch::ones({2, 4}));
      return is_harmed ? at::sqrt(y * 0.0).sum() : y.sum();
    });
    mp.backward(loss);
    EXPECT_EQ(tracer.culprit(loss).has_value(), is_harmed);
    mp.zero_grad();
  }
}

TEST(OpTracer, OfSeveralTheLastOneMadeLooks) {
  const at::Tensor negative = -torch::ones({2});
  auto first = std::make_unique<OpTracer>(std::vector<Param>{});
  {
    const OpTracer inner({});
    const at::Tensor loss = at::log(at::relu(negative) + negative);
    ASSERT_TRUE(inner.culprit(loss));
    EXPECT_EQ(inner.culprit(loss)->op, "log");
    EXPECT_EQ(inner.producers().size(), 1u);
  }
  const at::Tensor loss = at::log(negative);
  ASSERT_TRUE(first->culprit(loss));
  EXPECT_EQ(first->culprit(loss)->op, "log");
  // The new one is there before the old one goes.
  first = std::make_unique<OpTracer>(std::vector<Param>{});
  const at::Tensor second = at::sqrt(negative);
  ASSERT_TRUE(first->culprit(second));
  EXPECT_EQ(first->culprit(second)->op, "sqrt");
}

TEST(OpTracer, ARepetitionInFp64DrawsNoRandomNumbers) {
  float drawn[2];
  for (const bool traced : {false, true}) {
    torch::manual_seed(3);
    std::optional<OpTracer> tracer;
    if (traced) tracer.emplace(std::vector<Param>{});
    torch::nn::GRU gru(torch::nn::GRUOptions(4, 4).num_layers(2).dropout(0.5));
    {
      const torch::NoGradGuard no_grad;
      for (const at::Tensor& parameter : gru->parameters()) parameter.fill_(-3e38);
    }
    const at::Tensor loss = std::get<0>(gru->forward(torch::full({2, 1, 4}, 100.0))).sum();
    drawn[traced] = torch::rand({1}).item<float>();
  }
  EXPECT_EQ(drawn[0], drawn[1]);
}

}  // namespace op_tracer_test
}  // namespace halfstep
