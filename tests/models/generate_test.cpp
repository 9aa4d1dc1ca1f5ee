#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <halfstep/checkpoint.h>
#include <halfstep/error.h>
#include <halfstep/models.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace halfstep {
namespace {

Gpt2 tiny() {
  return Gpt2(Gpt2Config{.vocab_size = 50,
                         .n_positions = 16,
                         .n_embd = 16,
                         .n_layer = 1,
                         .n_head = 2,
                         .initializer_range = 0.5},
              7);
}

TEST(Generate, ColdestChoosesTheLikeliestTokenOfEachForward) {
  Gpt2 model = tiny();
  const std::vector<int64_t> written = generate(*model, {1, 2, 3}, {.tokens = 5, .temperature = 0});
  ASSERT_EQ(written.size(), 5U);
  model->eval();
  const at::NoGradGuard no_grad;
  std::vector<int64_t> ids = {1, 2, 3};
  for (const int64_t token : written) {
    const at::Tensor seen =
        at::from_blob(ids.data(), {1, static_cast<int64_t>(ids.size())}, at::kLong).clone();
    EXPECT_EQ(token, model->forward(seen)[0][-1].argmax().item<int64_t>());
    ids.push_back(token);
  }
}

TEST(Generate, SeedDecidesAndLibTorchsGeneratorIsNotTouched) {
  Gpt2 model = tiny();
  const auto before = random_state();
  const GenerateOptions options{.tokens = 12, .temperature = 1, .seed = 5};
  const auto first = generate(*model, {1}, options), again = generate(*model, {1}, options);
  EXPECT_EQ(first, again);
  auto other = options;
  other.seed = 6;
  EXPECT_NE(generate(*model, {1}, other), first);  // equal by chance: one in about 20^12
  const auto after = random_state();
  for (const auto& [name, value] : before)
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      EXPECT_TRUE(tensor->equal(after.tensor(name)));
    }
  EXPECT_TRUE(model->is_training());
}

TEST(Generate, EachSubmoduleHasItsOwnModeAgainAfterAnErrorToo) {
  Gpt2 model = tiny();
  bool training = true;
  for (const auto& module : model->modules(/*include_self=*/false)) {
    if (module->children().empty()) module->train(training = !training);
  }
  const auto modes_of = [&] {
    std::vector<bool> found = {model->is_training()};
    for (const auto& module : model->modules(false)) found.push_back(module->is_training());
    return found;
  };
  const auto before = modes_of();
  ASSERT_NE(std::count(before.begin(), before.end(), false), 0);
  (void)generate(*model, {1, 2, 3}, {.tokens = 2});
  EXPECT_EQ(modes_of(), before);
  EXPECT_THROW(generate(*model, {1}, {.tokens = 30}), Error) << "more than the 16 positions that it has";
  EXPECT_EQ(modes_of(), before);
}

// Every family, windows shorter than what is read among them, in stretches of several lengths.
TEST(KeyValueCache, ReadingOnGivesTheLogitsOfReadingAll) {
  const CausalLMSizes sizes{
      .vocabulary = 40, .context = 64, .layers = 2, .width = 32, .heads = 4, .key_value_heads = 2};
  for (const std::string family : {"gpt2", "llama", "mistral", "qwen2", "qwen3"}) {
    CausalLMSizes own = sizes;
    if (family == "gpt2") own.key_value_heads.reset();
    auto config = nlohmann::json::parse(config_json_of(family, own));
    if (family == "mistral") config["sliding_window"] = 5;
    const auto model = make_causal_lm(config.dump(), 3);
    const EvaluationScope asked(*model);
    const at::Tensor ids = at::randint(40, {2, 30}, at::kLong), whole = model->forward(ids);
    KeyValueCache cache;
    int64_t at = 0;
    for (const int64_t count : {7, 1, 1, 4, 1, 16}) {
      const at::Tensor part = model->read_on(ids.narrow(1, at, count), cache);
      // Sums of at most 64 products of numbers around 1, in another order: 64 roundings of 2^-24 each.
      EXPECT_LT((part - whole.narrow(1, at, count)).abs().max().item<double>(), 64 * 0x1p-24 * 8)
          << family << " at " << at;
      at += count;
      EXPECT_EQ(cache.length(), at);
    }
  }
}

// In FP64, where the texts by themselves and the same ones in a row differ by the order of sums alone.
TEST(PackedTexts, HaveTheLogitsLossAndGradientsOfEachByItself) {
  const CausalLMSizes sizes{
      .vocabulary = 40, .context = 64, .layers = 2, .width = 32, .heads = 4, .key_value_heads = 2};
  for (const std::string family : {"gpt2", "llama", "mistral", "qwen2", "qwen3"}) {
    SCOPED_TRACE(family);
    CausalLMSizes own = sizes;
    if (family == "gpt2") own.key_value_heads.reset();
    auto config = nlohmann::json::parse(config_json_of(family, own));
    if (family == "mistral") config["sliding_window"] = 5;
    const auto model = make_causal_lm(config.dump(), 3);
    model->to(at::kDouble);
    const std::vector<std::vector<int64_t>> lengths = {{9, 1, 14, 6}, {30}, {2, 28}, {1, 1, 27, 1}};
    const at::Tensor ids = at::randint(40, {4, 30}, at::kLong), targets = at::randint(40, {4, 30}, at::kLong);
    targets.masked_fill_(at::randint(3, {4, 30}, at::kLong).eq(0), -100);
    at::Tensor documents = at::empty_like(ids);
    const auto gradients = [&](const at::Tensor& loss) {
      model->zero_grad();
      loss.backward();
      std::vector<at::Tensor> all;
      for (const at::Tensor& parameter : model->parameters()) all.push_back(parameter.grad().clone());
      return all;
    };
    at::Tensor sum = at::zeros({}, at::kDouble);
    std::vector<at::Tensor> alone;
    for (int64_t row = 0; row < 4; ++row) {
      int64_t begin = 0;
      std::vector<at::Tensor> texts;
      for (size_t text = 0; text < lengths[static_cast<size_t>(row)].size(); ++text) {
        const int64_t length = lengths[static_cast<size_t>(row)][text];
        // Numbers come again: a text ends where the number changes.
        documents[row].narrow(0, begin, length).fill_(static_cast<int64_t>(text % 2));
        const at::Tensor logits = model->forward(ids[row].narrow(0, begin, length).unsqueeze(0));
        texts.push_back(logits[0]);
        sum = sum + at::cross_entropy_loss(logits[0], targets[row].narrow(0, begin, length), {},
                                           at::Reduction::Sum);
        begin += length;
      }
      alone.push_back(at::cat(texts));
    }
    // Some hundred roundings of 2^-53 in each logit, of numbers below 8; a weight's gradient sums 120 of
    // them.
    constexpr double kLogit = 500 * 0x1p-53 * 8, kGradient = 120 * kLogit;
    const at::Tensor packed = model->forward_packed(ids, documents);
    EXPECT_LT((packed - at::stack(alone)).abs().max().item<double>(), kLogit);
    const auto expected = gradients(sum / targets.ne(-100).sum());
    for (const bool recompute : {false, true}) {
      model->recompute_blocks = recompute;
      const auto found = gradients(model->loss(ids, targets, documents));
      for (size_t i = 0; i < found.size(); ++i)
        EXPECT_LT((found[i] - expected[i]).abs().max().item<double>(), kGradient) << i;
    }
    const auto across = gradients(model->loss(ids, targets));
    EXPECT_GT((across.back() - expected.back()).abs().max().item<double>(), 1e6 * kGradient)
        << "texts that see one another are others";
    EXPECT_THROW(model->forward_packed(ids, documents[0]), Error);
  }
}

TEST(Generate, WithAndWithoutACacheWritesTheSameAndStopsAtAnEnd) {
  Gpt2 model = tiny();
  GenerateOptions options{.tokens = 12, .temperature = 0};
  const auto cached = generate(*model, {1, 2, 3}, options);
  options.cache = false;
  EXPECT_EQ(generate(*model, {1, 2, 3}, options), cached);
  std::vector<int64_t> told;
  options.cache = true;
  options.ends = {cached[4]};
  options.each_token = [&](int64_t id) { told.push_back(id); };
  auto ended = generate(*model, {1, 2, 3}, options);
  EXPECT_EQ(ended.back(), cached[4]);
  EXPECT_LE(ended.size(), 5U);
  ended.pop_back();
  EXPECT_EQ(told, ended);
}

TEST(Generate, OnlyTheLikeliestTokensAreDrawnWhereThatIsAsked) {
  Gpt2 model = tiny();
  const at::NoGradGuard no_grad;
  model->eval();
  const at::Tensor first = at::softmax(model->forward(at::full({1, 1}, 1, at::kLong))[0][-1], -1);
  const auto [sorted, order] = first.sort(-1, /*descending=*/true);
  const double most = sorted[0].item<double>(), second = sorted[1].item<double>();
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const auto one = [&](GenerateOptions options) {
      options.tokens = 1;
      options.temperature = 1;
      options.seed = seed;
      return generate(*model, {1}, options)[0];
    };
    EXPECT_EQ(one({.top_k = 1}), order[0].item<int64_t>());
    EXPECT_EQ(one({.top_p = most / 2}), order[0].item<int64_t>());
    const int64_t of_two = one({.top_p = most + second / 2});
    EXPECT_TRUE(of_two == order[0].item<int64_t>() || of_two == order[1].item<int64_t>()) << of_two;
  }
  EXPECT_THROW(generate(*model, {1}, {.top_p = 0}), Error);
}

TEST(Generate, ContextBoundsWhatTheModelIsShown) {
  Gpt2 model = tiny();  // refuses more than 16 tokens
  EXPECT_EQ(generate(*model, {1, 2, 3}, {.tokens = 30, .context = 16}).size(), 30U);
  EXPECT_THROW(generate(*model, {}, {}), Error);
}

}  // namespace
}  // namespace halfstep
