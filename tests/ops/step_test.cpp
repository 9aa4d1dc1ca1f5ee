// A whole step of a small model, whose blocks are mostly operations of our own.
#include <gtest/gtest.h>
#include <halfstep/models.h>
#include <halfstep/train_step.h>
#include <torch/torch.h>

#include "support/any_machine.h"

namespace halfstep::testing {
namespace step_test {

/// Loss, and all weights after a few steps, with as many threads.
std::vector<at::Tensor> trained(int threads) {
  at::set_num_threads(threads);
  Llama model(LlamaConfig{.vocab_size = 512,
                          .hidden_size = 128,
                          .intermediate_size = 384,
                          .num_hidden_layers = 2,
                          .num_attention_heads = 4,
                          .num_key_value_heads = 2,
                          .max_position_embeddings = 256,
                          .tie_word_embeddings = true},
              /*seed=*/3);
  TrainStep step(Precision::bf16(), *model, AdamWOptions{.lr = 1e-3},
                 {.max_grad_norm = 1, .precision = {.autocast = kAnyMachine}});
  at::manual_seed(5);
  const at::Tensor ids = at::randint(512, {4, 129});
  std::vector<at::Tensor> made;
  for (int i = 0; i < 3; ++i) {
    const StepReport report = step([&] { return model->loss(ids.narrow(1, 0, 128), ids.narrow(1, 1, 128)); });
    EXPECT_TRUE(report.stepped());
    made.push_back(step.loss().detach().clone());
  }
  for (const at::Tensor& parameter : model->parameters()) made.push_back(parameter.detach().clone());
  return made;
}

TEST(WholeStep, OfASmallLlamaHasTheSameBitsForOneTwoAndFourThreadsAndFromRunToRun) {
  const int before = at::get_num_threads();
  const auto one = trained(1);
  for (const int threads : {1, 2, 4}) {
    const auto other = trained(threads);
    ASSERT_EQ(other.size(), one.size());
    for (std::size_t i = 0; i < one.size(); ++i)
      EXPECT_TRUE(at::equal(one[i], other[i])) << threads << " threads, tensor " << i;
  }
  at::set_num_threads(before);
}

}  // namespace step_test
}  // namespace halfstep::testing
