// Oracle throughout: a plain call from the same seed, bit for bit, or the mask that forward left in its
// output.
#include <gtest/gtest.h>
#include <halfstep/activations.h>
#include <halfstep/autocast.h>
#include <torch/torch.h>

#include <atomic>
#include <barrier>
#include <set>
#include <thread>

#include "support/any_machine.h"

namespace halfstep::testing {
namespace {

using Function = std::function<at::Tensor(const at::Tensor&)>;

struct RandomOp {
  const char* name;
  Function run;
};

/// Each multiplies by random numbers, so that the gradient shows which ones backward used. Those without a
/// generator in their signature must reach one that has.
const RandomOp kOps[] = {
    {"dropout", [](auto& x) { return at::dropout(x, 0.5, true); }},
    {"dropout_",
     [](auto& x) {
       at::Tensor y = x * 1;
       return at::dropout_(y, 0.5, true);
     }},
    {"native_dropout", [](auto& x) { return std::get<0>(at::native_dropout(x, 0.5, true)); }},
    {"alpha_dropout", [](auto& x) { return at::alpha_dropout(x, 0.5, true); }},
    {"feature_dropout", [](auto& x) { return at::feature_dropout(x, 0.5, true); }},
    {"feature_alpha_dropout", [](auto& x) { return at::feature_alpha_dropout(x, 0.5, true); }},
    {"functional::dropout2d",
     [](auto& x) {
       return torch::nn::functional::dropout2d(x.view({8, 8, 4, 4}),
                                               torch::nn::functional::Dropout2dFuncOptions());
     }},
    {"rand", [](auto& x) { return x * at::rand(x.sizes()); }},
    {"rand_like", [](auto& x) { return x * at::rand_like(x); }},
    {"randn", [](auto& x) { return x * at::randn(x.sizes()); }},
    {"randn of few", [](auto& x) { return x * at::randn({1}) * at::randn({3}).sum(); }},
    {"randn_like", [](auto& x) { return x * at::randn_like(x); }},
    {"randint", [](auto& x) { return x * at::randint(100, x.sizes()); }},
    {"randint_like", [](auto& x) { return x * at::randint_like(x.detach(), 100); }},
    {"randperm", [](auto& x) { return x * at::randperm(x.size(1)); }},
    {"normal", [](auto& x) { return x * at::normal(at::zeros_like(x), 1.0); }},
    {"normal of numbers", [](auto& x) { return x * at::normal(0.0, 1.0, x.sizes()); }},
    {"bernoulli", [](auto& x) { return x * at::bernoulli(at::full_like(x, 0.5)); }},
    {"uniform_", [](auto& x) { return x * at::empty_like(x).uniform_(); }},
    {"exponential_", [](auto& x) { return x * at::empty_like(x).exponential_(); }},
    {"geometric_", [](auto& x) { return x * at::empty_like(x).geometric_(0.1); }},
    {"cauchy_", [](auto& x) { return x * at::empty_like(x).cauchy_(); }},
    {"log_normal_", [](auto& x) { return x * at::empty_like(x).log_normal_(); }},
    {"random_", [](auto& x) { return x * at::empty_like(x).random_(100); }},
    {"multinomial", [](auto& x) { return x * at::multinomial(at::ones({64}), 64); }},
    {"multinomial with replacement", [](auto& x) { return x * at::multinomial(at::ones({64}), 64, true); }},
    {"poisson", [](auto& x) { return x * at::poisson(at::full_like(x, 20)); }},
    {"binomial", [](auto& x) { return x * at::binomial(at::full_like(x, 50), at::full_like(x, 0.5)); }},
    {"_standard_gamma", [](auto& x) { return x * at::_standard_gamma(at::full_like(x, 2)); }},
    {"_sample_dirichlet", [](auto& x) { return x * at::_sample_dirichlet(at::full_like(x, 2)); }},
    {"rrelu", [](auto& x) { return at::rrelu(-x, 0.1, 0.9, true); }},
    {"gumbel_softmax", [](auto& x) { return x * torch::nn::functional::gumbel_softmax(at::zeros_like(x)); }},
    {"attention",
     [](auto& x) {
       const at::Tensor heads = x.view({1, 2, 32, 16});
       return at::scaled_dot_product_attention(heads, heads, heads, {}, 0.5);
     }},
    {"an explicit default generator",
     [](auto& x) { return x * at::empty_like(x).uniform_(0, 1, at::detail::getDefaultCPUGenerator()); }},
};

const at::Tensor& ones() {
  static const at::Tensor made = at::linspace(1, 2, 16 * 64).view({16, 64});
  return made;
}

/// Output, gradient, and the next random number of the program.
std::vector<at::Tensor> results(
    const Function& run, bool checkpoint, const std::function<void()>& before_backward = [] {}) {
  at::manual_seed(11);
  const at::Tensor x = ones().clone().requires_grad_();
  const auto twice = [run](const at::Tensor& x) { return run(run(x * 1.5).reshape({16, 64}) * 2); };
  const at::Tensor y = checkpoint ? checkpoint_activations(twice, x) : twice(x);
  const at::Tensor next = at::rand(3);
  before_backward();
  y.sum().backward();
  return {y.detach(), x.grad(), next};
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b, const char* what) {
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << what << ", result " << i;
}

TEST(RegionRandom, EveryOperatorHasTheNumbersOfAPlainCallInBothRuns) {
  for (const auto& [name, run] : kOps) {
    expect_equal(results(run, true), results(run, false), name);
    expect_equal(results(run, true, [] { at::manual_seed(99); }), results(run, false), name);
  }
}

/// Draws from the default generator all the time.
class BusyThread {
 public:
  BusyThread() {
    while (!drew_) std::this_thread::yield();
  }
  ~BusyThread() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_ = false, drew_ = false;
  std::thread thread_{[this] {
    while (!stop_) {
      (void)at::rand(64);
      drew_ = true;
    }
  }};
};

TEST(RegionRandom, EveryOperatorHasTheNumbersOfForwardWhileAnotherThreadDraws) {
  const BusyThread busy;
  for (const RandomOp& op : kOps) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      at::Tensor forward_output;
      int runs = 0;
      const at::Tensor x = ones().clone().requires_grad_();
      const auto function = [&, name = op.name, run = op.run](const at::Tensor& x) {
        const at::Tensor y = run(x.exp()).reshape({16, 64}).sin();
        if (runs++ == 0) forward_output = y.detach().clone();
        EXPECT_TRUE(at::equal(y, forward_output)) << name << ", run " << runs;
        return y;
      };
      checkpoint_activations(function, x).sum().backward();
      EXPECT_EQ(runs, 2) << op.name;
    }
  }
}

TEST(RegionRandom, DropoutMasksOfForwardAndBackwardAgreeWhileAnotherThreadDraws) {
  const BusyThread busy;
  for (int i = 0; i < 200; ++i) {
    const at::Tensor x = at::ones(4096).requires_grad_();
    const at::Tensor y = checkpoint_activations(
        [](const at::Tensor& x) { return at::dropout(at::dropout(x * 1.5, 0.5, true) * 2, 0.5, true); }, x);
    y.sum().backward();
    ASSERT_TRUE(at::equal(x.grad().ne(0), y.detach().ne(0))) << i;
  }
}

// Were the generator left where the other thread put it, the second region would draw most of the first one's
// numbers again.
TEST(RegionRandom, RegionsOfTwoThreadsDrawDifferentNumbers) {
  constexpr int kRounds = 50;
  std::barrier together(2);
  std::vector<at::Tensor> drawn[2];
  const auto work = [&](int which) {
    for (int round = 0; round < kRounds; ++round) {
      const at::Tensor x = at::ones({64}).requires_grad_();
      together.arrive_and_wait();
      (void)checkpoint_activations(
          [&](const at::Tensor& input) {
            together.arrive_and_wait();
            drawn[which].push_back(at::rand({64}));
            together.arrive_and_wait();
            return input * 2;
          },
          x);
    }
  };
  std::thread other(work, 1);
  work(0);
  other.join();
  for (int a = 0; a < kRounds; ++a)
    for (int b = 0; b < kRounds; ++b) EXPECT_FALSE(at::equal(drawn[0][a], drawn[1][b])) << a << " " << b;
}

TEST(RegionRandom, AnotherThreadDrawsNoneOfTheRegionsNumbers) {
  std::set<double> inside, outside;
  std::barrier together(2);
  constexpr int kRounds = 50;
  const auto note = [](const at::Tensor& numbers, std::set<double>& into) {
    const double* first = numbers.const_data_ptr<double>();
    into.insert(first, first + numbers.numel());
  };
  std::thread other([&] {
    for (int round = 0; round < kRounds; ++round) {
      together.arrive_and_wait();
      note(at::rand({100}, at::kDouble), outside);
      together.arrive_and_wait();
    }
  });
  for (int round = 0; round < kRounds; ++round) {
    (void)checkpoint_activations(
        [&](const at::Tensor& input) {
          note(at::rand({50}, at::kDouble), inside);
          together.arrive_and_wait();
          together.arrive_and_wait();
          note(at::rand({50}, at::kDouble), inside);
          return input * 2;
        },
        at::ones({4}).requires_grad_());
  }
  other.join();
  EXPECT_EQ(inside.size(), 100u * kRounds);
  for (const double number : outside) EXPECT_FALSE(inside.contains(number));
}

TEST(RegionRandom, RegionsDrawOtherNumbersThanTheOnesBeforeWhileAnotherThreadDraws) {
  const auto numbers = [] {
    const at::Tensor x = at::ones(5000).requires_grad_();
    const auto draw = [](const at::Tensor& x) {
      (void)at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>()->random();  // as another thread
      return x * at::rand(5000, at::kDouble);
    };
    return checkpoint_activations(draw, x).detach();
  };
  at::manual_seed(3);
  const at::Tensor first = numbers(), second = numbers();
  // 5,000 doubles of 53 random bits: two equal ones would be chance at 2.5e7 / 2^53.
  EXPECT_EQ(at::isin(second, first).sum().item<int64_t>(), 0);
  // In all both drew twice: after as many draws of a plain program the generator is at the same number.
  const at::Tensor next = at::rand(3, at::kDouble);
  at::manual_seed(3);
  for (int i = 0; i < 2; ++i) {
    (void)at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>()->random();
    (void)at::rand(5000, at::kDouble);
  }
  EXPECT_TRUE(at::equal(next, at::rand(3, at::kDouble)));
}

TEST(RegionRandom, RegionsInsideRegionsHaveTheNumbersOfAPlainCall) {
  const auto run = [](bool checkpoint) {
    at::manual_seed(4);
    const at::Tensor x = ones().clone().requires_grad_();
    const Function inner = [](const at::Tensor& x) { return at::dropout(x.exp(), 0.5, true).sin(); };
    const Function outer = [=](const at::Tensor& x) {
      const at::Tensor y = at::dropout(x, 0.5, true);
      const at::Tensor z = checkpoint ? checkpoint_activations(inner, y) : inner(y);
      return at::dropout(checkpoint ? checkpoint_activations(inner, z) : inner(z), 0.5, true).tanh();
    };
    const at::Tensor y = checkpoint ? checkpoint_activations(outer, x) : outer(x);
    y.sum().backward();
    return std::vector<at::Tensor>{y.detach(), x.grad(), at::rand(3)};
  };
  expect_equal(run(true), run(false), "nested");
  {
    std::vector<at::Tensor> plain = run(false);
    const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
    expect_equal(run(true), run(false), "in a scope");
  }
}

TEST(RegionRandom, AGivenGeneratorIsDrawnFromOnce) {
  const auto run = [](bool checkpoint) {
    auto generator = at::detail::createCPUGenerator(17);
    const at::Tensor x = ones().clone().requires_grad_();
    const Function inner = [generator](const at::Tensor& x) {
      return (x * at::empty_like(x).uniform_(0, 1, generator)).exp();
    };
    const Function outer = [=](const at::Tensor& x) {
      return (checkpoint ? checkpoint_activations(inner, inner(x)) : inner(inner(x))).sin();
    };
    const at::Tensor y = checkpoint ? checkpoint_activations(outer, x) : outer(x);
    y.sum().backward();
    return std::vector<at::Tensor>{y.detach(), x.grad(), at::empty(3).uniform_(0, 1, generator)};
  };
  expect_equal(run(true), run(false), "a generator of the caller's own");
}

TEST(RegionRandom, OutsideRegionsTheDefaultGeneratorServesAsBefore) {
  at::manual_seed(5);
  const at::Tensor x = ones().clone().requires_grad_();
  checkpoint_activations([](const at::Tensor& x) { return at::dropout(x, 0.5, true); }, x).sum().backward();
  EXPECT_FALSE(c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::TESTING_ONLY_GenericMode));
  at::manual_seed(6);
  const at::Tensor a = at::rand(3);
  at::manual_seed(6);
  EXPECT_TRUE(at::equal(a, at::rand(3)));
}

}  // namespace
}  // namespace halfstep::testing
