// The programs of docs/guide.md, one test for each section: what the page shows is cut from here, line by
// line (tests/tools/guide_page_test.py), and what it says is easy to get wrong is got wrong here.
#include <gtest/gtest.h>
#include <halfstep/halfstep.h>
#include <torch/torch.h>

#include <cstdlib>

#include "guide/classifier.h"
#include "support/bits.h"
#include "support/error_of.h"
#include "support/python.h"
#include "support/scratch.h"

namespace halfstep::testing::guide_test {

// BF16 on every processor: where there are no instructions for it, right but slower than FP32.
const halfstep::MixedPrecisionOptions anywhere{.autocast = {.allow_emulated = true}};

/// Share of a large batch that is classified rightly.
double accuracy(Classifier& model) {
  const Batch batch = next_batch(2048);
  return model->forward(batch.x).argmax(1).eq(batch.target).to(torch::kFloat).mean().item<double>();
}

/// A whole step by the pieces.
void train_step(Classifier& model, halfstep::MixedPrecision& mp, halfstep::AdamW& optimizer) {
  const Batch batch = next_batch();
  const auto loss = mp.forward([&] { return loss_of(model, batch); });
  mp.backward(loss);
  const auto grads = mp.inspect_grads();
  const auto report = optimizer.step(grads.clipped_to(1.0));
  if (!report.stepped()) std::puts(report.sentence().c_str());
  mp.advance(grads);
  optimizer.zero_grad();
}

bool says(const std::string& message, const char* words) { return message.find(words) != std::string::npos; }

/// What LibTorch says to a call that must fail.
std::string refusal_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(Guide, FirstAnOrdinaryProgram) {
  torch::manual_seed(1);
  Classifier model;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int i = 0; i < 200; ++i) {
    optimizer.zero_grad();
    const auto loss = loss_of(model, next_batch());
    loss.backward();
    optimizer.step();
  }
  EXPECT_GT(accuracy(model), 0.8);
}

TEST(Guide, ThenInBf16) {
  torch::manual_seed(1);
  Classifier model;
  halfstep::TrainStep step(halfstep::Precision::bf16(), model, halfstep::AdamWOptions{.lr = 1e-2},
                           {.precision = anywhere});
  for (int i = 0; i < 200; ++i) {
    const auto report = step([&] { return loss_of(model, next_batch()); });
    if (!report.stepped()) std::puts(report.sentence().c_str());
  }
  EXPECT_GT(step.forward([&] { return accuracy(model); }), 0.8);
  EXPECT_EQ(model->head->weight.scalar_type(), torch::kBFloat16);
  EXPECT_TRUE(says(refusal_of([&] { accuracy(model); }), "mat1 and mat2 must have the same dtype"));
}

TEST(Guide, TheSameStepFromItsPieces) {
  torch::manual_seed(1);
  Classifier model, twin;
  torch::manual_seed(1);
  model = Classifier();
  torch::manual_seed(1);
  twin = Classifier();
  halfstep::TrainStep step(halfstep::Precision::bf16(), twin, halfstep::AdamWOptions{.lr = 1e-2},
                           {.max_grad_norm = 1.0, .precision = anywhere});
  halfstep::MixedPrecision mp(halfstep::Precision::bf16(), model, anywhere);
  halfstep::AdamW optimizer(mp.params(), {.lr = 1e-2});
  for (int i = 0; i < 3; ++i) {
    torch::manual_seed(10 + i);
    train_step(model, mp, optimizer);
    torch::manual_seed(10 + i);
    ASSERT_TRUE(step([&] { return loss_of(twin, next_batch()); }).stepped());
  }
  EXPECT_TRUE(bit_equal(model->head->weight, twin->head->weight));

  // Easy to get wrong.
  const auto loss = mp.forward([&] { return loss_of(model, next_batch()); });
  mp.backward(loss);
  EXPECT_TRUE(says(error_of([&] { mp.backward(mp.forward([&] { return loss_of(model, next_batch()); })); }),
                   "still has a gradient"));
  const auto grads = mp.inspect_grads();
  (void)optimizer.step(grads.unclipped());
  EXPECT_TRUE(says(error_of([&] { mp.backward(mp.forward([&] { return loss_of(model, next_batch()); })); }),
                   "advance was not called"));
}

TEST(Guide, BackwardBelongsOutsideAScope) {
  const auto w = torch::randn({64, 64}).requires_grad_(), x = torch::randn({8, 64});
  const auto gradient = [&](bool inside) {
    w.mutable_grad().reset();
    std::optional<halfstep::AutocastScope> scope;
    scope.emplace(at::kBFloat16, halfstep::OpPolicy::standard(),
                  halfstep::AutocastOptions{.allow_emulated = true});
    torch::Tensor loss;
    {
      const auto full = halfstep::AutocastScope::disabled();
      loss = torch::matmul(x, w).square().sum();
    }
    if (!inside) scope.reset();
    loss.backward();
    return w.grad().clone();
  };
  const auto right = gradient(false), rounded = gradient(true);
  EXPECT_EQ(rounded.scalar_type(), torch::kFloat);
  const double off = ((rounded - right).norm() / right.norm()).item<double>();
  std::printf("backward inside the scope: the FP32 part's gradient is off by %.2g\n", off);
  EXPECT_GT(off, 1e-4);
}

TEST(Guide, Accumulation) {
  torch::manual_seed(1);
  Classifier model;
  auto options = anywhere;
  options.accumulation = halfstep::Accumulation::Fp32;
  halfstep::MixedPrecision mp(halfstep::Precision::bf16(), model, options);
  halfstep::AdamW optimizer(mp.params(), {.lr = 1e-2});
  const int micro_batches = 4;
  for (int i = 0; i < 100; ++i) {
    for (int k = 0; k < micro_batches; ++k) {
      const auto loss = mp.forward([&] { return loss_of(model, next_batch(16)) / micro_batches; });
      mp.backward(loss);
    }
    mp.close_sum();
    const auto grads = mp.inspect_grads();
    const auto report = optimizer.step(grads.clipped_to(1.0));
    if (!report.stepped()) std::puts(report.sentence().c_str());
    mp.advance(grads);
    optimizer.zero_grad();
  }
  EXPECT_GT(mp.forward([&] { return accuracy(model); }), 0.7);

  const auto backward = [&] { mp.backward(mp.forward([&] { return loss_of(model, next_batch()); })); };
  backward();
  EXPECT_TRUE(says(error_of([&] { (void)mp.inspect_grads(); }), "still open"));
  optimizer.zero_grad();  // knows nothing of the sum
  backward();
  mp.close_sum();
  const double two = mp.inspect_grads().norm();
  mp.zero_grad();
  backward();
  mp.close_sum();
  EXPECT_GT(two, 1.3 * mp.inspect_grads().norm()) << "a sum of two, not a mean";
}

TEST(Guide, ParameterGroups) {
  torch::manual_seed(1);
  Classifier model;
  halfstep::MixedPrecision mp(halfstep::Precision::bf16(), model, anywhere);
  std::vector<halfstep::Param> matrices, others;
  for (const auto& param : mp.params()) (param.working.dim() >= 2 ? matrices : others).push_back(param);
  halfstep::AdamW optimizer(
      {{matrices, {.lr = 1e-2, .weight_decay = 0.1}}, {others, {.lr = 1e-2, .weight_decay = 0}}});
  for (int i = 0; i < 100; ++i) train_step(model, mp, optimizer);
  EXPECT_EQ(matrices.size(), 2U);
  EXPECT_EQ(optimizer.options(1).weight_decay, 0);
  EXPECT_GT(mp.forward([&] { return accuracy(model); }), 0.7);

  // A parameter in no group keeps its gradient, and the next backward says so.
  halfstep::AdamW forgets(matrices, {.lr = 1e-2});
  const auto one_step = [&] { train_step(model, mp, forgets); };
  one_step();
  EXPECT_TRUE(says(error_of(one_step), "'body.bias' still has a gradient"));
}

TEST(Guide, Freezing) {
  torch::manual_seed(1);
  Classifier model;
  for (auto& parameter : model->body->parameters()) parameter.requires_grad_(false);
  halfstep::MixedPrecision mp(halfstep::Precision::bf16(), model, anywhere);
  halfstep::AdamW optimizer(mp.params(), {.lr = 1e-2, .weight_decay = 0.1});
  for (int i = 0; i < 20; ++i) train_step(model, mp, optimizer);

  for (auto& parameter : model->body->parameters()) parameter.requires_grad_(true);
  for (int i = 0; i < 20; ++i) train_step(model, mp, optimizer);

  Classifier frozen;
  frozen->body->weight.requires_grad_(false);
  const auto before = frozen->body->weight.clone();
  halfstep::MixedPrecision other(halfstep::Precision::bf16(), frozen, anywhere);
  EXPECT_EQ(other.params()[0].name, "body.weight");
  EXPECT_EQ(other.params()[0].master.numel(), 0) << "2 bytes a weight, and nothing beside it";
  EXPECT_TRUE(
      bit_equal(halfstep::full_precision(other.params()[0]), frozen->body->weight.detach().to(torch::kFloat)))
      << "unfrozen, it starts from its rounded value";
  EXPECT_FALSE(bit_equal(halfstep::full_precision(other.params()[0]), before));

  // Frozen after MixedPrecision was built, it keeps its bits; frozen with a gradient, it is updated once
  // more.
  Classifier late;
  const auto weight = late->head->weight.detach().clone();
  halfstep::MixedPrecision keeps(halfstep::Precision::bf16(), late, anywhere);
  halfstep::AdamW its_optimizer(keeps.params(), {.lr = 1e-2});
  late->head->weight.requires_grad_(false);
  train_step(late, keeps, its_optimizer);
  const halfstep::Param head = keeps.params("head").front();
  EXPECT_TRUE(bit_equal(halfstep::full_precision(head), weight));
  late->head->weight.requires_grad_(true);
  keeps.backward(keeps.forward([&] { return loss_of(late, next_batch()); }));
  late->head->weight.requires_grad_(false);
  (void)its_optimizer.step(keeps.inspect_grads().unclipped());
  EXPECT_FALSE(bit_equal(halfstep::full_precision(head), weight));

  // A norm's running statistics are not parameters.
  for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
  const auto mean = frozen->norm->running_mean.clone();
  (void)other.forward([&] { return frozen->forward(next_batch().x); });
  EXPECT_FALSE(bit_equal(frozen->norm->running_mean, mean));
  frozen->norm->eval();
  const auto held = frozen->norm->running_mean.clone();
  (void)other.forward([&] { return frozen->forward(next_batch().x); });
  EXPECT_TRUE(bit_equal(frozen->norm->running_mean, held));
}

TEST(Guide, Evaluation) {
  torch::manual_seed(1);
  Classifier model;
  halfstep::MixedPrecision mp(halfstep::Precision::bf16(), model, anywhere);
  halfstep::AdamW optimizer(mp.params(), {.lr = 1e-2});
  for (int i = 0; i < 100; ++i) train_step(model, mp, optimizer);

  model->eval();
  const double right = mp.forward([&] {
    const torch::NoGradGuard no_grad;
    return accuracy(model);
  });
  model->train();
  EXPECT_GT(right, 0.7);

  const auto state = mp.state_dict();
  (void)mp.forward([&] { return model->forward(next_batch().x); });
  EXPECT_FALSE(
      bit_equal(mp.state_dict().tensor("buffer.norm.running_mean"), state.tensor("buffer.norm.running_mean")))
      << "without eval() an evaluation changes running statistics";
}

TEST(Guide, Clipping) {
  torch::manual_seed(1);
  Classifier model;
  halfstep::MixedPrecision mp(halfstep::Precision::fp16(), model);
  halfstep::AdamW optimizer(mp.params(), {.lr = 1e-2});
  mp.backward(mp.forward([&] { return loss_of(model, next_batch()); }));
  const auto grads = mp.inspect_grads(halfstep::GradDetail::PerParam);
  for (const auto& each : grads.params()) std::printf("%s %.3f\n", each.name.c_str(), each.norm);
  const auto report = optimizer.step(grads.clipped_to(0.1));
  mp.advance(grads);
  optimizer.zero_grad();

  auto scaled = halfstep::Precision::fp16();
  scaled.loss_scaling->initial = 0x1p8;
  Classifier other;
  halfstep::MixedPrecision low(scaled, other);
  low.backward(low.forward([&] { return loss_of(other, next_batch()); }));
  const double norm = low.inspect_grads().norm();
  const double seen_by_torch = torch::nn::utils::clip_grad_norm_(other->parameters(), 1e9);
  EXPECT_NEAR(seen_by_torch / norm, 0x1p8, 1) << "gradients carry the loss scale until the optimizer's pass";
  EXPECT_LT(norm, 100);
}

TEST(Guide, LearningRateSchedules) {
  torch::manual_seed(1);
  Classifier model;
  halfstep::MixedPrecision mp(halfstep::Precision::bf16(), model, anywhere);
  halfstep::AdamW optimizer(
      mp.params(),
      {.lr = 1e-2, .schedule = halfstep::Schedule::cosine({.warmup_steps = 10, .total_steps = 100})});
  for (int i = 0; i < 50; ++i) train_step(model, mp, optimizer);

  auto slower = optimizer.options();
  slower.lr = 1e-3;
  optimizer.set_options(slower);
  for (int i = 50; i < 100; ++i) train_step(model, mp, optimizer);
  EXPECT_GT(mp.forward([&] { return accuracy(model); }), 0.7);
  EXPECT_EQ(optimizer.options().lr, 1e-3) << "the full rate, not that of this step";
  EXPECT_EQ(optimizer.steps(), 100);
  EXPECT_EQ(slower.schedule.factor(100), 0) << "from total_steps on it stands still";

  const auto before = model->head->weight.clone();
  train_step(model, mp, optimizer);
  EXPECT_TRUE(bit_equal(model->head->weight, before));
  optimizer.set_options({.lr = 1e-3});
  EXPECT_EQ(optimizer.options().schedule.shape, halfstep::Schedule::Shape::Constant)
      << "what is not named has its default";

  // A skipped step moves no schedule.
  const int64_t steps = optimizer.steps();
  mp.backward(mp.forward([&] { return loss_of(model, next_batch()) * INFINITY; }));
  const auto grads = mp.inspect_grads();
  EXPECT_FALSE(optimizer.step(grads.unclipped()).stepped());
  mp.advance(grads);
  EXPECT_EQ(optimizer.steps(), steps);
}

TEST(Guide, SeveralModels) {
  torch::manual_seed(1);
  torch::nn::Sequential generator(torch::nn::Linear(4, 32), torch::nn::GELU(), torch::nn::Linear(32, 2));
  torch::nn::Sequential critic(torch::nn::Linear(2, 32), torch::nn::GELU(), torch::nn::Linear(32, 1));
  halfstep::MixedPrecision mp(halfstep::Precision::bf16(), {{"generator", *generator}, {"critic", *critic}},
                              anywhere);
  halfstep::AdamW generator_optimizer(mp.params("generator"), {.lr = 1e-3, .betas = {0.5, 0.9}});
  halfstep::AdamW critic_optimizer(mp.params("critic"), {.lr = 1e-3, .betas = {0.5, 0.9}});

  const auto step = [&](halfstep::AdamW& optimizer, const std::function<torch::Tensor()>& loss) {
    mp.backward(mp.forward(loss));
    const auto grads = mp.inspect_grads();
    const auto report = optimizer.step(grads.clipped_to(1.0));
    mp.advance(grads);
    mp.zero_grad();  // of both models
    return report.stepped();
  };
  for (int i = 0; i < 50; ++i) {
    const auto real = torch::randn({64, 2}) + 3, noise = torch::randn({64, 4});
    step(critic_optimizer, [&] {
      const auto fake = generator->forward(noise).detach();
      return torch::softplus(-critic->forward(real)).mean() + torch::softplus(critic->forward(fake)).mean();
    });
    for (auto& parameter : critic->parameters()) parameter.requires_grad_(false);
    step(generator_optimizer,
         [&] { return torch::softplus(-critic->forward(generator->forward(noise))).mean(); });
    for (auto& parameter : critic->parameters()) parameter.requires_grad_(true);
  }
  EXPECT_EQ(generator_optimizer.steps(), 50);
  EXPECT_EQ(critic_optimizer.steps(), 50);

  // The generator's loss reaches the critic's parameters, and clipping counts them.
  const auto norm = [&] {
    torch::manual_seed(2);
    mp.backward(
        mp.forward([&] { return critic->forward(generator->forward(torch::randn({64, 4}))).mean(); }));
    const double found = mp.inspect_grads().norm();
    mp.zero_grad();
    return found;
  };
  const double of_both = norm();
  for (auto& parameter : critic->parameters()) parameter.requires_grad_(false);
  EXPECT_LT(norm(), 0.9 * of_both);

  // A gradient penalty: twice differentiated.
  for (auto& parameter : critic->parameters()) parameter.requires_grad_(true);
  const auto between = torch::randn({64, 2}, torch::requires_grad());
  EXPECT_TRUE(step(critic_optimizer, [&] {
    const auto slope =
        torch::autograd::grad({critic->forward(between).sum()}, {between}, {}, /*retain_graph=*/true,
                              /*create_graph=*/true)[0];
    return (slope.norm(2, 1) - 1).square().mean();
  }));
}

/// log(1 + exp(x)) in FP32, whatever comes in.
struct Softplus : torch::autograd::Function<Softplus> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x) {
    const auto full = halfstep::AutocastScope::disabled();
    const auto wide = x.to(torch::kFloat);
    context->save_for_backward({wide});
    return wide.clamp_min(0) + wide.abs().neg().exp().log1p();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto wide = context->get_saved_variables()[0];
    return {grads[0] * wide.sigmoid()};
  }
};

/// As above, without a word about types: the product in backward meets what forward happened to get.
struct Product : torch::autograd::Function<Product> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& weight) {
    context->save_for_backward({x, weight});
    return torch::matmul(x, weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    return {torch::matmul(grads[0], saved[1].t()), torch::matmul(saved[0].t(), grads[0])};
  }
};

TEST(Guide, OwnAutogradFunctions) {
  torch::manual_seed(1);
  torch::nn::Linear layer(16, 16);
  halfstep::MixedPrecision mp(halfstep::Precision::bf16(), layer, anywhere);
  halfstep::AdamW optimizer(mp.params(), {.lr = 1e-2});
  const auto x = torch::randn({8, 16});
  const auto loss = mp.forward([&] { return Softplus::apply(layer(x)).mean(); });
  mp.backward(loss);
  EXPECT_EQ(loss.scalar_type(), torch::kFloat);
  EXPECT_EQ(layer->weight.grad().scalar_type(), torch::kBFloat16) << "autograd casts what backward returns";
  const auto grads = mp.inspect_grads();
  EXPECT_TRUE(optimizer.step(grads.unclipped()).stepped());
  mp.advance(grads);
  optimizer.zero_grad();

  // Inside forward the scope's rules hold; backward runs outside, where nothing is cast.
  const auto wide = torch::randn({8, 16}, torch::requires_grad());
  const auto output = mp.forward([&] { return Product::apply(wide, layer->weight); });
  EXPECT_EQ(output.scalar_type(), torch::kBFloat16);
  EXPECT_THROW(output.to(torch::kFloat).sum().backward(), c10::Error);
}

TEST(Guide, ActivationCheckpointing) {
  torch::manual_seed(1);
  std::vector<torch::nn::Sequential> blocks;
  torch::nn::ModuleList list;
  for (int i = 0; i < 3; ++i) {
    blocks.emplace_back(torch::nn::Linear(32, 32), torch::nn::GELU(), torch::nn::Linear(32, 32));
    list->push_back(blocks.back());
  }
  halfstep::MixedPrecision mp(halfstep::Precision::bf16(), list, anywhere);
  const auto gradients = [&](bool checkpoints) {
    mp.zero_grad();
    torch::manual_seed(2);
    const auto input = torch::randn({8, 32});
    const auto loss = mp.forward([&] {
      auto x = input;
      for (auto& block : blocks)
        x = checkpoints ? halfstep::checkpoint_activations(
                              [block](const torch::Tensor& in) mutable { return block->forward(in); }, x)
                        : block->forward(x);
      return x.square().mean();
    });
    mp.backward(loss);
    std::vector<torch::Tensor> found;
    for (const auto& parameter : list->parameters()) found.push_back(parameter.grad().clone());
    return found;
  };
  const auto plain = gradients(false), again = gradients(true);
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(bit_equal(plain[i], again[i]));

  // What a block changes besides is changed twice.
  torch::nn::BatchNorm1d norm(32);
  const auto x = torch::randn({8, 32}, torch::requires_grad());
  const auto y =
      halfstep::checkpoint_activations([norm](const torch::Tensor& in) mutable { return norm(in); }, x);
  y.sum().backward();
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 2);
}

/// Trains up to step `end`, from where the folder's last checkpoint is.
torch::Tensor run_until(int64_t end, const std::filesystem::path& folder) {
  torch::manual_seed(1);
  Classifier model;
  halfstep::MixedPrecision mp(halfstep::Precision::bf16(), model, anywhere);
  halfstep::AdamW optimizer(mp.params(), {.lr = 1e-2});
  halfstep::CheckpointFolder checkpoints(folder, {.keep_last = 2});
  int64_t step = 0;
  if (const auto saved = checkpoints.load_latest()) {
    mp.load_state_dict(saved->part("precision"));
    optimizer.load_state_dict(saved->part("optimizer"));
    halfstep::load_random_state(saved->part("random"));
    step = saved->step;
  }
  while (step < end) {
    train_step(model, mp, optimizer);
    if (++step % 10 == 0)
      checkpoints.save_async({.step = step,
                              .parts = {{"precision", mp.state_dict()},
                                        {"optimizer", optimizer.state_dict()},
                                        {"random", halfstep::random_state()}}});
  }
  checkpoints.wait();
  return halfstep::full_precision(mp.params().front());
}

TEST(Guide, SavingAndResuming) {
  const ScratchFolder scratch;
  const auto whole = run_until(40, scratch / "whole");
  run_until(25, scratch / "stopped");  // its last checkpoint is that of step 20
  EXPECT_TRUE(bit_equal(run_until(40, scratch / "stopped"), whole));
}

TEST(Guide, Deployment) {
  const ScratchFolder scratch;
  const auto folder = scratch.path();
  torch::manual_seed(1);
  Classifier model;
  halfstep::MixedPrecision mp(halfstep::Precision::bf16(), model, anywhere);
  halfstep::AdamW optimizer(mp.params(), {.lr = 1e-2});
  for (int i = 0; i < 200; ++i) train_step(model, mp, optimizer);
  mp.save_weights(folder / "model.pt", model);
  mp.save_weights(folder / "model-bf16.pt", model, at::kBFloat16);

  const Batch batch = next_batch(512);
  torch::save(batch.x, (folder / "x.pt").string());
  const auto logits_by_plain_program = [&](const std::string& weights) {
    const std::string in = " " + folder.string() + "/";
    EXPECT_EQ(std::system((PLAIN_PROGRAM + in + weights + in + "x.pt" + in + "logits.pt").c_str()), 0);
    torch::Tensor logits;
    torch::load(logits, (folder / "logits.pt").string());
    return logits;
  };
  const auto full = logits_by_plain_program("model.pt"), low = logits_by_plain_program("model-bf16.pt");

  const auto in_python = ask_python("tests/guide/read_weights.py", {{"file", folder / "model.pt"}});
  const auto bias = in_python["bias"].get<std::vector<float>>();
  EXPECT_TRUE(bit_equal(torch::tensor(bias), halfstep::full_precision(mp.params("head").back())));

  // Witness: the same model made here, from the values of the parameters one by one.
  Classifier by_hand;
  const torch::NoGradGuard no_grad;
  for (const auto& param : mp.params())
    by_hand->named_parameters()[param.name].copy_(halfstep::full_precision(param));
  for (const auto& item : model->named_buffers()) by_hand->named_buffers()[item.key()].copy_(item.value());
  by_hand->eval();
  EXPECT_TRUE(bit_equal(full, by_hand->forward(batch.x)));

  EXPECT_EQ(low.scalar_type(), torch::kBFloat16);
  const auto right = [&](const torch::Tensor& logits) {
    return logits.argmax(1).eq(batch.target).to(torch::kFloat).mean().item<double>();
  };
  model->eval();
  const double trained = mp.forward([&] { return right(model->forward(batch.x)); });
  std::printf("right: %.4f in training's precision, %.4f FP32 file, %.4f BF16 file\n", trained, right(full),
              right(low));
  EXPECT_GT(trained, 0.8);
  // Of 512, as many as two logits that differ by a few roundings may swap.
  EXPECT_NEAR(right(full), trained, 0.02);
  EXPECT_NEAR(right(low), trained, 0.02);
}

}  // namespace halfstep::testing::guide_test
