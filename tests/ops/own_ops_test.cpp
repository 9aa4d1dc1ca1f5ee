// The table of operations that Halfstep computes itself: each row is reached, and steps aside for arguments
// that it does not cover.
#include "ops/own_ops.h"

#include <gtest/gtest.h>
#include <halfstep/autocast.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/torch.h>

#include <set>

namespace halfstep::testing {
namespace own_ops_test {

using Arguments = std::vector<c10::IValue>;

struct Call {
  const char* what;
  Arguments arguments;
};

/// Calls of one operation; the first argument is differentiated.
struct Calls {
  std::string op;
  std::vector<Call> taken, left_alone;
};

Calls cross_entropy_calls() {
  const auto loss = [](const at::Tensor& logits, const at::Tensor& target, const c10::IValue& weight = {},
                       double label_smoothing = 0) {
    const int64_t reduction = at::Reduction::Mean, ignore_index = -100;
    return Arguments{logits, target, weight, reduction, ignore_index, label_smoothing};
  };
  const at::Tensor fp32 = at::randn({6, 10}), low = fp32.to(at::kBFloat16);
  const at::Tensor classes = at::randint(10, {6}), weight = at::rand({10}) + 0.5;
  return {.op = "cross_entropy_loss",
          .taken = {{"BF16 logits", loss(low, classes)},
                    {"FP16 logits", loss(fp32.to(at::kHalf), classes)},
                    {"class weights", loss(low, classes, weight)},
                    {"label smoothing", loss(low, classes, {}, 0.1)}},
          .left_alone = {
              {"FP32 logits", loss(fp32, classes)},
              {"class weights and label smoothing", loss(low, classes, weight, 0.1)},
              {"probabilities as the target", loss(low, at::softmax(at::randn({6, 10}), 1))},
              {"logits of pixels", loss(at::randn({2, 10, 3}).to(at::kBFloat16), at::randint(10, {2, 3}))},
              {"one row", loss(low[0], classes[0])}}};
}

Calls rms_norm_calls() {
  const auto norm = [](const at::Tensor& rows, std::vector<int64_t> shape, const c10::IValue& gain = {},
                       const c10::IValue& eps = 1e-3) {
    return Arguments{rows, std::move(shape), gain, eps};
  };
  const at::Tensor fp32 = at::randn({4, 6, 16}), low = fp32.to(at::kBFloat16), gain = at::rand({16}) + 0.5;
  return {.op = "rms_norm",
          .taken = {{"BF16 rows", norm(low, {16}, gain)},
                    {"FP16 rows", norm(fp32.to(at::kHalf), {16}, gain)},
                    {"a low gain", norm(low, {16}, gain.to(at::kBFloat16))},
                    {"no gain", norm(low, {16})},
                    {"no eps", norm(low, {16}, gain, {})}},
          .left_alone = {{"FP32 rows", norm(fp32, {16}, gain)},
                         {"two dimensions", norm(low, {6, 16})},
                         {"rows across memory", norm(low.transpose(0, 2), {4})}}};
}

Calls rms_norm_function_calls() {
  const at::Tensor fp32 = at::randn({4, 6, 16}), low = fp32.to(at::kBFloat16), gain = at::rand({16}) + 0.5;
  return {.op = "halfstep::rms_norm",
          .taken = {{"BF16 rows", {low, gain, 1e-3}},
                    {"FP16 rows", {fp32.to(at::kHalf), gain, 1e-3}},
                    {"a low gain", {low, gain.to(at::kBFloat16), 1e-3}}},
          .left_alone = {{"FP32 rows", {fp32, gain, 1e-3}}}};
}

Calls layer_norm_function_calls() {
  const at::Tensor fp32 = at::randn({4, 6, 16}), low = fp32.to(at::kBFloat16);
  const at::Tensor gain = at::rand({16}) + 0.5, bias = at::randn({16});
  return {.op = "halfstep::layer_norm",
          .taken = {{"BF16 rows", {low, gain, bias, 1e-3}},
                    {"FP16 rows", {fp32.to(at::kHalf), gain, bias, 1e-3}},
                    {"low gain and bias", {low, gain.to(at::kBFloat16), bias.to(at::kBFloat16), 1e-3}}},
          .left_alone = {{"FP32 rows", {fp32, gain, bias, 1e-3}}}};
}

Calls attention_calls() {
  const auto attend = [](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const c10::IValue& mask = {}, double dropout = 0, bool causal = false,
                         const c10::IValue& scale = {}, bool shares_heads = false) {
    return Arguments{query, key, value, mask, dropout, causal, scale, shares_heads};
  };
  const at::Tensor fp32 = at::randn({2, 4, 20, 16}), low = fp32.to(at::kBFloat16);
  const at::Tensor few_heads = low.narrow(1, 0, 2), longer = at::randn({2, 4, 30, 16}).to(at::kBFloat16);
  const at::Tensor mask = at::randn({20, 20}), of_bools = mask.gt(-1);
  return {
      .op = "scaled_dot_product_attention",
      .taken = {{"BF16", attend(low, low, low)},
                {"FP32, which the rule casts", attend(fp32, fp32, fp32)},
                {"FP16, which the rule casts", attend(fp32.to(at::kHalf), low, low)},
                {"causal, with a scale", attend(low, low, low, {}, 0, true, 0.3)},
                {"shared heads", attend(low, few_heads, few_heads, {}, 0, false, {}, true)},
                {"other keys than queries", attend(low, longer, longer)},
                {"a mask of Bools", attend(low, low, low, of_bools)},
                {"a mask of numbers for each head", attend(low, low, low, mask.expand({2, 4, 20, 20}))},
                {"dropout", attend(low, low, low, {}, 0.1)}},
      .left_alone = {{"one head without its dimension", attend(low[0], low[0], low[0])},
                     {"few queries", attend(low.narrow(2, 0, 8), low, low)},
                     {"elements of a row across memory",
                      attend(low.transpose(2, 3).contiguous().transpose(2, 3), low, low)},
                     {"a mask that is learned", attend(low, low, low, at::zeros({20, 20}).requires_grad_())},
                     {"values of another size", attend(low, low, low.narrow(3, 0, 8))}}};
}

Calls rotary_calls() {
  const at::Tensor rows = at::randn({2, 5, 3, 8}), low = rows.to(at::kBFloat16).transpose(1, 2);
  const at::Tensor cos = at::rand({5, 8}), sin = at::rand({5, 8});
  const at::Tensor cos_of_texts = at::rand({2, 1, 5, 8}), sin_of_texts = at::rand({2, 1, 5, 8});
  return {
      .op = "halfstep::rotary",
      .taken = {{"BF16 heads of a product", {low, cos, sin}},
                {"FP16 heads", {low.to(at::kHalf), cos, sin}},
                {"heads that lie apart", {low.contiguous(), cos, sin}},
                {"some heads of several", {low.narrow(1, 1, 2), cos, sin}},
                {"angles of each text", {low, cos_of_texts, sin_of_texts}}},
      .left_alone = {{"FP32 heads", {low.to(at::kFloat), cos, sin}},
                     {"low angles", {low, cos.to(at::kBFloat16), sin.to(at::kBFloat16)}},
                     {"a gap between elements", {low.transpose(2, 3).contiguous().transpose(2, 3), cos, sin}},
                     {"one angle for all positions", {low, cos[0], sin[0]}},
                     {"angles that get a gradient", {low, cos.clone().requires_grad_(), sin}},
                     {"three dimensions", {low[0], cos, sin}}}};
}

Calls gelu_calls() {
  const at::Tensor fp32 = at::randn({4, 6}), low = fp32.to(at::kBFloat16);
  return {.op = "gelu",
          .taken = {{"BF16", {low, "tanh"}}, {"FP16", {fp32.to(at::kHalf), "tanh"}}},
          .left_alone = {{"FP32", {fp32, "tanh"}},
                         {"by erf", {low, "none"}},
                         {"another order in memory", {low.t(), "tanh"}},
                         {"no elements", {low.narrow(0, 0, 0), "tanh"}}}};
}

Calls swiglu_calls() {
  const at::Tensor gate = at::randn({4, 6}), up = at::randn({4, 6});
  const at::Tensor low_gate = gate.to(at::kBFloat16), low_up = up.to(at::kBFloat16);
  return {.op = "halfstep::swiglu",
          .taken = {{"BF16", {low_gate, low_up}}, {"FP16", {gate.to(at::kHalf), up.to(at::kHalf)}}},
          .left_alone = {{"FP32", {gate, up}},
                         {"BF16 beside FP32", {low_gate, up}},
                         {"BF16 beside FP16", {low_gate, up.to(at::kHalf)}},
                         {"two orders in memory", {low_gate, low_up.t().contiguous().t()}},
                         {"one row for all", {low_gate, low_up[0]}},
                         {"no elements", {low_gate.narrow(0, 0, 0), low_up.narrow(0, 0, 0)}}}};
}

Calls convolution_calls() {
  const auto conv = [](const at::Tensor& input, const at::Tensor& weight, const c10::IValue& bias = {},
                       int64_t stride = 1, int64_t padding = 1, int64_t dilation = 1, int64_t groups = 1) {
    const auto both = [](int64_t value) { return std::vector<int64_t>{value, value}; };
    return Arguments{input, weight, bias, both(stride), both(padding), both(dilation), groups};
  };
  const at::Tensor fp32 = at::randn({3, 6, 4, 4}), low = fp32.to(at::kBFloat16);
  const at::Tensor weight = at::randn({5, 6, 3, 3}), low_weight = weight.to(at::kBFloat16);
  const at::Tensor wide = at::randn({2, 6, 5, 5}).to(at::kBFloat16), bias = at::randn({5});
  return {.op = "conv2d",
          .taken = {{"BF16", conv(low, low_weight)},
                    {"FP32, which the rule casts", conv(fp32, weight)},
                    {"a bias", conv(low, low_weight, bias)},
                    {"channels last", conv(low.contiguous(at::MemoryFormat::ChannelsLast), low_weight)},
                    {"halved", conv(low, low_weight, {}, 2)},
                    {"spread windows", conv(low, low_weight, {}, 1, 2, 2)},
                    {"one pixel", conv(low.narrow(2, 1, 1).narrow(3, 2, 1), low_weight)}},
          .left_alone = {{"wide images", conv(wide, low_weight)},
                         {"wide images to narrow ones", conv(wide, low_weight, {}, 2)},
                         {"narrow images to wide ones", conv(low, low_weight, {}, 1, 2)},
                         {"groups", conv(low, low_weight.narrow(1, 0, 2).narrow(0, 0, 3), {}, 1, 1, 1, 3)},
                         {"an image alone", conv(low[0], low_weight)},
                         {"no image", conv(low.narrow(0, 0, 0), low_weight)}}};
}

std::vector<Calls> all_calls() {
  at::manual_seed(5);
  return {attention_calls(), convolution_calls(),       cross_entropy_calls(),       gelu_calls(),
          rms_norm_calls(),  rms_norm_function_calls(), layer_norm_function_calls(), rotary_calls(),
          swiglu_calls()};
}

const OwnOp& row_of(const std::string& op) {
  for (const OwnOp& row : own_ops()) {
    if (row.op == op) return row;
  }
  throw std::runtime_error("no row for " + op);
}

c10::OperatorHandle handle_of(const std::string& op) {
  const std::string full = op.find("::") == op.npos ? "aten::" + op : op;
  return c10::Dispatcher::singleton().findSchema(torch::jit::parseName(full)).value();
}

struct Result {
  at::Tensor output, grad;
  std::string made_by;  // the type of its node in autograd's graph
  bool is_ours() const { return made_by.find("halfstep") != std::string::npos; }
};

at::Tensor call(const std::string& op, Arguments arguments) {
  handle_of(op).callBoxed(arguments);
  return arguments[0].toTensor();
}

/// `forward` makes an output of the arguments, the first of which is a leaf.
template <typename Forward>
Result result_of(Arguments arguments, Forward forward) {
  const at::Tensor leaf = arguments[0].toTensor().clone().requires_grad_();
  arguments[0] = leaf;
  const at::Tensor output = forward(std::move(arguments));
  return {output.detach(), torch::autograd::grad({output.sum()}, {leaf})[0], output.grad_fn()->name()};
}

/// Products as LibTorch computes them in BF16, so that those of no row have its bits.
Result in_scope(const std::string& op, const Arguments& arguments,
                const OpPolicy& policy = OpPolicy::standard()) {
  return result_of(arguments, [&](Arguments given) {
    const AutocastScope scope(at::kBFloat16, policy, {.allow_emulated = true, .products_in_fp32 = false});
    return call(op, std::move(given));
  });
}

Arguments cast_to(at::ScalarType type, Arguments given) {
  for (c10::IValue& argument : given)
    if (argument.isTensor() && argument.toTensor().is_floating_point())
      argument = argument.toTensor().to(type);
  return given;
}

/// LibTorch's operation without a scope, on tensors that were cast as the rule says.
Result by_libtorch(const std::string& op, const Arguments& arguments, OpRule rule) {
  const at::ScalarType type = rule == OpRule::Low ? at::kBFloat16 : at::kFloat;
  return result_of(arguments, [&](Arguments given) {
    return call(op, rule == OpRule::AsIs ? std::move(given) : cast_to(type, std::move(given)));
  });
}

TEST(OwnOps, EachRowIsAnOperationOfThePolicyAndHasItsCallsHere) {
  std::set<std::string> rows, called;
  for (const OwnOp& row : own_ops()) {
    EXPECT_EQ(OpPolicy::standard().rule(row.op), row.rule) << row.op << " would never run";
    // Products are ours where there are tiles: tests/ops/low_product_test.cpp.
    if (row.of_cast_arguments && row.op != "conv2d") continue;
    EXPECT_TRUE(rows.emplace(row.op).second) << row.op << " has two rows";
    EXPECT_TRUE(row.takes && row.run) << row.op;
  }
  for (const Calls& calls : all_calls()) {
    called.insert(calls.op);
    EXPECT_FALSE(calls.taken.empty() || calls.left_alone.empty()) << calls.op;
    for (const auto& list : {calls.taken, calls.left_alone}) {
      for (const Call& call : list)
        EXPECT_EQ(call.arguments.size(), handle_of(calls.op).schema().arguments().size()) << calls.op;
    }
  }
  // Never on the CPU: tests/device/device_autocast_test.cpp.
  EXPECT_EQ(rows.erase("layer_norm"), 1u);
  // Only where there is a recipe: tests/quant/recipe_training_test.cpp.
  for (const char* product : {"addmm", "linear", "matmul", "mm"}) EXPECT_EQ(rows.erase(product), 1u);
  EXPECT_EQ(rows, called);
}

TEST(OwnOps, ArgumentsThatARowTakesAreComputedByIt) {
  for (const Calls& calls : all_calls()) {
    for (const Call& call : calls.taken) {
      SCOPED_TRACE(calls.op + ": " + call.what);
      Arguments given = call.arguments;
      if (row_of(calls.op).of_cast_arguments) given = cast_to(at::kBFloat16, std::move(given));
      EXPECT_TRUE(row_of(calls.op).takes(given, {}));
      EXPECT_TRUE(in_scope(calls.op, call.arguments).is_ours());
    }
  }
}

TEST(OwnOps, ArgumentsThatNoRowTakesHaveTheBitsOfLibTorchsOwnOperation) {
  for (const Calls& calls : all_calls()) {
    for (const Call& call : calls.left_alone) {
      SCOPED_TRACE(calls.op + ": " + call.what);
      EXPECT_FALSE(row_of(calls.op).takes(call.arguments, {}));
      const Result got = in_scope(calls.op, call.arguments);
      const Result expected = by_libtorch(calls.op, call.arguments, row_of(calls.op).rule);
      EXPECT_FALSE(got.is_ours());
      EXPECT_EQ(got.output.scalar_type(), expected.output.scalar_type());
      EXPECT_TRUE(at::equal(got.output, expected.output));
      EXPECT_TRUE(at::equal(got.grad, expected.grad));
    }
  }
}

TEST(OwnOps, ARowRunsOnlyWhereThePolicyHasItsRule) {
  for (const Calls& calls : all_calls()) {
    for (const OpRule other : {OpRule::Stock, OpRule::Promote}) {
      OpPolicy policy = OpPolicy::standard();
      policy.set(calls.op, other);
      policy.set("rms_norm", other);  // what halfstep::rms_norm goes through then
      EXPECT_FALSE(in_scope(calls.op, calls.taken.front().arguments, policy).is_ours()) << calls.op;
    }
  }
}

TEST(OwnOps, RunAgainHasTheBitsOfTheFirstRun) {
  const at::NoGradGuard as_in_backward;
  for (const Calls& calls : all_calls()) {
    const OwnOp& row = row_of(calls.op);
    if (!row.run_again) continue;
    for (const Call& call : calls.taken)
      EXPECT_TRUE(at::equal(row.run_again(call.arguments), row.run(call.arguments, {})))
          << calls.op << ": " << call.what;
  }
}

}  // namespace own_ops_test
}  // namespace halfstep::testing
