#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>
#include <halfstep/checkpoint.h>
#include <halfstep/error.h>
#include <halfstep/models.h>

#include <algorithm>

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

TEST(Generate, ContextBoundsWhatTheModelIsShown) {
  Gpt2 model = tiny();  // refuses more than 16 tokens
  EXPECT_EQ(generate(*model, {1, 2, 3}, {.tokens = 30, .context = 16}).size(), 30U);
  EXPECT_THROW(generate(*model, {}, {}), Error);
}

}  // namespace
}  // namespace halfstep
