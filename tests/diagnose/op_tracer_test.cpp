// The tracer names the operation that made a number which is not finite: planted after each operation of two
// models in turn, and from causes that training has.
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/op_tracer.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>

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

/// A transformer's block, attention by hand or LibTorch's, between an embedding and a loss.
struct Block : torch::nn::Module {
  explicit Block(bool fused_attention) : fused(fused_attention) {
    embedding = register_module("embedding", torch::nn::Embedding(17, 16));
    first_norm = register_module("first_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})));
    query_key_value = register_module("query_key_value", torch::nn::Linear(16, 48));
    projection = register_module("projection", torch::nn::Linear(16, 16));
    second_norm = register_module("second_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})));
    up = register_module("up", torch::nn::Linear(16, 64));
    down = register_module("down", torch::nn::Linear(64, 16));
    head = register_module("head", torch::nn::Linear(16, 17));
  }

  at::Tensor loss() {
    const at::Tensor ids = torch::arange(24).remainder(17).view({2, 12});
    at::Tensor x = embedding(ids);
    const auto parts =
        query_key_value(first_norm(x)).view({2, 12, 3, 4, 4}).permute({2, 0, 3, 1, 4}).unbind(0);
    at::Tensor mixed;
    if (fused) {
      mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    } else {
      const at::Tensor mask = torch::ones({12, 12}, at::kBool).triu(1);
      const at::Tensor logits =
          (at::matmul(parts[0], parts[1].transpose(-1, -2)) / 2.0).masked_fill(mask, -kInf);
      mixed = at::matmul(at::softmax(logits, -1), parts[2]);
    }
    x = x + projection(mixed.transpose(1, 2).reshape({2, 12, 16}));
    x = x + down(at::gelu(up(second_norm(x))));
    return at::cross_entropy_loss(head(x).view({24, 17}), ids.roll(-1, 1).reshape({24}));
  }

  bool fused;
  torch::nn::Embedding embedding{nullptr};
  torch::nn::LayerNorm first_norm{nullptr}, second_norm{nullptr};
  torch::nn::Linear query_key_value{nullptr}, projection{nullptr}, up{nullptr}, down{nullptr}, head{nullptr};
};

struct ConvNet : torch::nn::Module {
  ConvNet() {
    first = register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).padding(1)));
    norm = register_module("norm", torch::nn::BatchNorm2d(8));
    second = register_module("second", torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 8, 3).padding(1)));
    shortcut = register_module("shortcut", torch::nn::Conv2d(3, 8, 1));
    head = register_module("head", torch::nn::Linear(8, 5));
  }

  at::Tensor loss() {
    const at::Tensor image = torch::linspace(-1, 1, 4 * 3 * 8 * 8).view({4, 3, 8, 8}).sin();
    at::Tensor x = at::relu(norm(first(image)));
    x = at::max_pool2d(second(x) + shortcut(image), 2);
    x = at::adaptive_avg_pool2d(at::silu(x), {1, 1}).flatten(1);
    return at::cross_entropy_loss(head(at::tanh(x)), torch::arange(4));
  }

  torch::nn::Conv2d first{nullptr}, second{nullptr}, shortcut{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear head{nullptr};
};

/// Writes a NaN or an Inf into what the n-th operation puts out that makes new numbers.
struct Plant {
  static inline int64_t count = 0, at = -1;
  static inline double value = NAN;
  static inline std::string op{};

  struct Inputs final : at::ObserverContext {
    std::vector<const void*> memory{};
  };

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
    auto inputs = std::make_unique<Inputs>();
    for (const c10::IValue& input : call.inputs())
      if (input.isTensor() && input.toTensor().defined() && input.toTensor().has_storage())
        inputs->memory.push_back(input.toTensor().storage().data());
    return inputs;
  }

  static void end(const at::RecordFunction& call, at::ObserverContext* context) {
    const std::string_view name = call.name();
    if (name.starts_with("aten::empty") || name.starts_with("aten::new_empty")) return;
    for (const c10::IValue& output : call.outputs()) {
      if (!output.isTensor() || !output.toTensor().defined() || output.toTensor().numel() == 0) continue;
      const at::Tensor tensor = output.toTensor();
      if (!tensor.is_floating_point()) continue;
      const auto& memory = static_cast<Inputs*>(context)->memory;
      if (std::ranges::find(memory, tensor.storage().data()) != memory.end()) continue;
      if (count++ == at) {
        op = name.substr(6);  // after "aten::"
        write(tensor);
      }
      return;
    }
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
    op.clear();
  }
  ~Plant() { at::removeCallback(handle); }
  at::CallbackHandle handle;
};

struct Outcome {
  std::string planted;
  bool harmed = false;
  std::optional<CulpritRecord> culprit{};
};

/// One forward and backward, with a number planted after operation `place`.
template <typename Model, typename... Arguments>
Outcome step_with_plant(const Precision& precision, int64_t place, double value, Arguments... arguments) {
  torch::manual_seed(3);
  Model model(arguments...);
  MixedPrecision mp(precision, model, {.autocast = kAnyMachine});
  Plant::at = place;
  Plant::value = value;
  const Plant plant;  // before the tracer, which then sees what it leaves
  const OpTracer tracer(mp.params());
  const at::Tensor loss = mp.forward([&] { return model.loss(); });
  mp.backward(loss);
  Outcome outcome{.planted = Plant::op, .culprit = tracer.culprit(loss)};
  const at::RecordFunctionGuard not_recorded(false);
  outcome.harmed = !loss.isfinite().item<bool>();
  for (const Param& param : mp.params())
    if (param.working.grad().defined()) outcome.harmed |= !param.working.grad().isfinite().all().item<bool>();
  return outcome;
}

struct Tally {
  int64_t sites = 0, exact = 0;
  std::string others{};
};

template <typename Model, typename... Arguments>
Tally plant_everywhere(const Precision& precision, double value, Arguments... arguments) {
  Tally tally;
  // HALFSTEP_EVERY_SITE=1 for all of them: a minute.
  const int64_t stride = std::getenv("HALFSTEP_EVERY_SITE") ? 1 : 3;
  for (int64_t place = 0;; place += stride) {
    const Outcome outcome = step_with_plant<Model>(precision, place, value, arguments...);
    if (outcome.planted.empty()) break;
    if (!outcome.harmed) continue;  // nobody used the number
    ++tally.sites;
    if (outcome.culprit && outcome.culprit->op == outcome.planted) {
      ++tally.exact;
    } else {
      tally.others +=
          detail::concat("  ", place, ": planted after ", outcome.planted,
                         ", named: ", outcome.culprit ? sentence(*outcome.culprit) : "nothing", "\n");
    }
  }
  return tally;
}

TEST(OpTracer, NamesTheOperationAfterWhichANumberWasPlanted) {
  int64_t sites = 0, exact = 0;
  std::string others;
  const auto add = [&](const char* what, const Tally& tally) {
    sites += tally.sites;
    exact += tally.exact;
    if (!tally.others.empty()) others += detail::concat(what, "\n", tally.others);
    std::cout << what << ": " << tally.exact << " of " << tally.sites << " sites\n";
    EXPECT_GE(tally.sites, 10) << what;
  };
  add("block, FP32, NaN", plant_everywhere<Block>(Precision::fp32(), NAN, false));
  add("block, BF16, NaN", plant_everywhere<Block>(Precision::bf16(), NAN, false));
  add("block with LibTorch's attention, FP16, Inf", plant_everywhere<Block>(Precision::fp16(), kInf, true));
  add("conv net, FP32, Inf", plant_everywhere<ConvNet>(Precision::fp32(), kInf));
  add("conv net, BF16, NaN", plant_everywhere<ConvNet>(Precision::bf16(), NAN));
  std::cout << exact << " of " << sites << " sites named exactly\n" << others;
  EXPECT_GE(sites, 60);
  EXPECT_GE(static_cast<double>(exact), 0.95 * static_cast<double>(sites)) << others;
}

TEST(OpTracer, SaysNothingOfAHealthyStepAndChangesNoBit) {
  for (const Precision& precision : {Precision::fp32(), Precision::bf16(), Precision::fp16()}) {
    std::vector<at::Tensor> grads[2];
    for (const bool traced : {false, true}) {
      torch::manual_seed(3);
      Block model(false);
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
