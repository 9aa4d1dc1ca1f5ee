// What AutocastScope costs beside a bare at::autocast region: whole training steps (forward, backward, SGD)
// of two models, interleaved in one run, and the opening and closing of a scope.
//
//   scope_bench [--json] [--rounds N]      N >= 15
//
// Exits with 1 when the `stock` policy costs more than 1.05 of the bare step, or a scope more than 1.75 of
// the calls to LibTorch that such a region needs.
#include <halfstep/autocast.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/torch.h>

#include <malloc.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iomanip>
#include <iostream>

#include "support/run_case.h"
#include "support/small_models.h"

namespace {

using halfstep::AutocastScope;
using halfstep::OpPolicy;
using halfstep::testing::BareAutocast;
using halfstep::testing::Mlp;
using halfstep::testing::Transformer;

constexpr double kStockRatioLimit = 1.05;
// Measured 1.44 (1.25 to 1.65), on a host where the same scope takes 1,075 ns in one minute and 2,700 in
// another: nanoseconds say more about the host.
constexpr double kScopeRatioLimit = 1.75;
// On a busy machine rounds go on until the median is known this well or lies so many standard errors from the
// limit, at most so many times what was asked for.
constexpr double kEnough = 0.005;
constexpr double kDecisiveErrors = 3;
constexpr int kMostRounds = 40;
constexpr at::ScalarType kLow = at::kBFloat16;

double thread_ns() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1) + 0.5)];
}

/// From the quartiles, as for a normal distribution: 1.2533 sigma / sqrt(n), and sigma = spread / 1.349.
double standard_error_of_median(const std::vector<double>& values) {
  const double spread = quantile(values, 0.75) - quantile(values, 0.25);
  return 1.2533 / 1.349 * spread / std::sqrt(static_cast<double>(values.size()));
}

// The three ways to run a step. `allow_emulated`, so that the cost can be measured on any machine.
const auto open_bare = [] { return BareAutocast(kLow); };
const auto open_stock = [] { return AutocastScope(kLow, OpPolicy::stock(), {.allow_emulated = true}); };
const auto open_standard = [] { return AutocastScope(kLow, OpPolicy::standard(), {.allow_emulated = true}); };

/// One model with its data and optimizer, and one way to open a region around its forward.
template <typename Model, typename OpenRegion>
class Trainer {
 public:
  Trainer(std::shared_ptr<Model> model, at::Tensor x, at::Tensor y, OpenRegion open_region)
      : model_(std::move(model)),
        x_(std::move(x)),
        y_(std::move(y)),
        open_region_(open_region),
        optimizer_(model_->parameters(), torch::optim::SGDOptions(0.01)) {}

  void step() {
    optimizer_.zero_grad();
    at::Tensor loss;
    {
      const auto region = open_region_();
      loss = model_->loss(x_, y_);
    }
    loss.backward();
    optimizer_.step();
  }

  double sample_ns(int steps) {
    const double start = thread_ns();
    for (int i = 0; i < steps; ++i) step();
    return (thread_ns() - start) / steps;
  }

  std::vector<at::Tensor> parameters() const { return model_->parameters(); }

 private:
  std::shared_ptr<Model> model_;
  at::Tensor x_, y_;
  OpenRegion open_region_;
  torch::optim::SGD optimizer_;
};

struct Comparison {
  std::string model;
  int rounds;
  double bare_us;         // one step, the median
  double stock_ratio;     // to bare, the median over rounds
  double stock_error;     // standard error of that median
  double standard_ratio;  // to bare, the median over rounds
  bool same_bits;
};

bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](auto& x, auto& y) { return at::equal(x, y); });
}

/// `make_model` must build the same weights each time.
template <typename MakeModel>
Comparison compare(std::string name, MakeModel make_model, const at::Tensor& x, const at::Tensor& y,
                   int rounds) {
  constexpr int kWarmUpSteps = 5;
  const auto weights_after = [&](auto open_region) {
    Trainer trainer(make_model(), x, y, open_region);
    trainer.sample_ns(kWarmUpSteps);
    return trainer.parameters();
  };
  const bool same_bits = equal(weights_after(open_bare), weights_after(open_stock));

  // One model for all three, so that where its weights lie in memory does not enter.
  const auto model = make_model();
  Trainer bare(model, x, y, open_bare);
  Trainer stock(model, x, y, open_stock);
  Trainer standard(model, x, y, open_standard);
  bare.sample_ns(kWarmUpSteps);

  // Samples of 5 ms: long beside the clock, short enough that neighbours in time meet the same machine. Four
  // steps at least: the first of a sample pays for the memory that another way of running has left behind.
  const int steps = std::max(4, static_cast<int>(5e6 / bare.sample_ns(kWarmUpSteps)));
  double bare_ns = 0, stock_ns = 0, standard_ns = 0;
  const std::function<void()> samples[] = {
      [&] { bare_ns = bare.sample_ns(steps); },
      [&] { stock_ns = stock.sample_ns(steps); },
      [&] { standard_ns = standard.sample_ns(steps); },
  };
  std::vector<double> bare_all, stock_ratios, standard_ratios;
  const auto settled = [&](int round) {
    if (round < rounds) return false;
    const double error = standard_error_of_median(stock_ratios);
    const double from_limit = std::abs(quantile(stock_ratios, 0.5) - kStockRatioLimit);
    return error < kEnough || from_limit > kDecisiveErrors * error || round >= kMostRounds * rounds;
  };
  for (int round = 0; !settled(round); ++round) {
    for (int i = 0; i < 3; ++i) samples[(round + i) % 3]();  // nobody is always first
    bare_all.push_back(bare_ns);
    stock_ratios.push_back(stock_ns / bare_ns);
    standard_ratios.push_back(standard_ns / bare_ns);
  }
  return {.model = name,
          .rounds = static_cast<int>(bare_all.size()),
          .bare_us = quantile(bare_all, 0.5) / 1e3,
          .stock_ratio = quantile(stock_ratios, 0.5),
          .stock_error = standard_error_of_median(stock_ratios),
          .standard_ratio = quantile(standard_ratios, 0.5),
          .same_bits = same_bits};
}

/// One opening and closing.
struct ScopeCost {
  double ns;     // of the fastest tenth of many short batches
  double ratio;  // beside the same calls to LibTorch without a scope, batch by batch
};

ScopeCost scope_cost() {
  constexpr int kBatches = 1001, kScopes = 100;
  const OpPolicy policy = OpPolicy::standard();
  const auto batch_ns = [](auto open_and_close) {
    const double start = thread_ns();
    for (int i = 0; i < kScopes; ++i) open_and_close();
    return (thread_ns() - start) / kScopes;
  };
  std::vector<double> scopes, ratios;
  for (int batch = 0; batch < kBatches; ++batch) {
    scopes.push_back(batch_ns([&] { AutocastScope scope(kLow, policy, {.allow_emulated = true}); }));
    ratios.push_back(scopes.back() / batch_ns([] {
                       const torch::jit::GraphOptimizerEnabledGuard no_optimizer(false);
                       const BareAutocast region(kLow);
                     }));
  }
  return {.ns = quantile(scopes, 0.1), .ratio = quantile(ratios, 0.5)};
}

/// Bytes that are alive because of what this thread did since it was constructed.
struct LiveBytes : c10::MemoryReportingInfoBase {
  int64_t live = 0;
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override { live += bytes; }
  bool memoryProfilingEnabled() const override { return true; }
};

struct ReusedWeight {
  int uses;
  double ratio;       // forward and backward, `stock` without a cache beside bare autocast with one
  double bare_bytes;  // alive between forward and backward
  double stock_bytes;
};

/// The price of casting a weight at each use: one GRU cell over a sequence.
ReusedWeight reused_weight(int uses, int rounds) {
  constexpr int64_t kWidth = 256, kBatch = 16;
  torch::nn::GRUCell cell(kWidth, kWidth);
  const at::Tensor x = at::randn({kBatch, kWidth});
  const auto forward = [&](auto open_region) {
    const auto region = open_region();
    at::Tensor state = at::zeros({kBatch, kWidth});
    for (int i = 0; i < uses; ++i) state = cell(x, state);
    return state.sum();
  };
  const auto sample_ns = [&](auto open_region) {
    const double start = thread_ns();
    forward(open_region).backward();
    return thread_ns() - start;
  };
  const auto live_bytes = [&](auto open_region) {
    const auto report = std::make_shared<LiveBytes>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, report);
    const at::Tensor loss = forward(open_region);
    return static_cast<double>(report->live);
  };
  std::vector<double> bare, stock;
  for (int round = 0; round < rounds; ++round) {
    bare.push_back(sample_ns(open_bare));
    stock.push_back(sample_ns(open_stock));
  }
  return {uses, quantile(stock, 0.5) / quantile(bare, 0.5), live_bytes(open_bare), live_bytes(open_stock)};
}

struct Report {
  std::vector<Comparison> models;
  std::vector<ReusedWeight> reused;
  ScopeCost scope;

  double stock_ratio() const { return worst(&Comparison::stock_ratio); }
  double standard_ratio() const { return worst(&Comparison::standard_ratio); }
  bool same_bits() const {
    return std::all_of(models.begin(), models.end(), [](const auto& m) { return m.same_bits; });
  }
  bool good() const {
    return same_bits() && stock_ratio() <= kStockRatioLimit && scope.ratio <= kScopeRatioLimit;
  }

 private:
  double worst(double Comparison::* ratio) const {
    double found = 0;
    for (const auto& model : models) found = std::max(found, model.*ratio);
    return found;
  }
};

void print_json(const Report& report) {
  std::cout << "{\"stock_ratio\": " << report.stock_ratio()
            << ", \"standard_ratio\": " << report.standard_ratio() << ", \"scope_ns\": " << report.scope.ns
            << ", \"scope_ratio\": " << report.scope.ratio << ", \"same_bits\": " << std::boolalpha
            << report.same_bits() << ", \"models\": [";
  const char* comma = "";
  for (const auto& m : report.models) {
    std::cout << comma << "{\"model\": \"" << m.model << "\", \"rounds\": " << m.rounds
              << ", \"bare_us\": " << m.bare_us << ", \"stock_ratio\": " << m.stock_ratio
              << ", \"stock_ratio_standard_error\": " << m.stock_error
              << ", \"standard_ratio\": " << m.standard_ratio << "}";
    comma = ", ";
  }
  std::cout << "], \"reused_weight\": [";
  comma = "";
  for (const auto& r : report.reused) {
    std::cout << comma << "{\"uses\": " << r.uses << ", \"ratio\": " << r.ratio
              << ", \"bare_bytes\": " << r.bare_bytes << ", \"stock_bytes\": " << r.stock_bytes << "}";
    comma = ", ";
  }
  std::cout << "], \"good\": " << report.good() << "}\n";
}

void print_text(const Report& report) {
  std::cout << std::fixed << std::setprecision(3);
  for (const auto& m : report.models) {
    std::cout << m.model << ": bare " << m.bare_us << " us a step; stock x" << m.stock_ratio << " (+-"
              << m.stock_error << ", " << m.rounds << " rounds), standard x" << m.standard_ratio
              << (m.same_bits ? "; stock and bare agree bit for bit\n" : "; STOCK AND BARE DIFFER\n");
  }
  for (const auto& r : report.reused) {
    std::cout << "one GRU cell used " << r.uses << " times: x" << r.ratio << "; " << r.stock_bytes / 1e6
              << " MB alive before backward, " << r.bare_bytes / 1e6 << " with the stock's cache\n";
  }
  std::cout << "scope: " << report.scope.ns << " ns, x" << report.scope.ratio << "\n"
            << (report.good() ? "good: stock at most 1.05, scope at most 1.75\n" : "FALLS SHORT\n");
}

Report measure(int rounds) {
  const auto seeded = [](auto make) {
    return [make] {
      at::manual_seed(1);
      return make();
    };
  };
  Report report;
  report.scope = scope_cost();
  report.models.push_back(compare("mlp_1m", seeded([] { return std::make_shared<Mlp>(784, 700, 10); }),
                                  at::randn({64, 784}), at::randint(10, {64}), rounds));
  report.models.push_back(compare("transformer_2",
                                  seeded([] { return std::make_shared<Transformer>(256, 128, 4, 2); }),
                                  at::randint(256, {4, 64}), at::randint(256, {4, 64}), rounds));
  for (const int uses : {1, 16, 64}) report.reused.push_back(reused_weight(uses, rounds));
  return report;
}

}  // namespace

int main(int argc, char** argv) {
  // Memory stays with the process: which of the two ways pays for pages that malloc gave back and takes again
  // is chance, and more than all that a scope costs.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 64 << 20);
  constexpr int kFewestRounds = 15;
  bool json = false;
  int rounds = 101;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) {
      json = true;
    } else if (std::strcmp(argv[i], "--rounds") == 0 && i + 1 < argc) {
      rounds = std::atoi(argv[++i]);
    } else {
      std::cerr << "usage: scope_bench [--json] [--rounds N]\n";
      return 2;
    }
  }
  if (rounds < kFewestRounds) {
    std::cerr << "scope_bench: " << rounds << " rounds give no steady median; use at least " << kFewestRounds
              << "\n";
    return 2;
  }
  at::set_num_threads(1);
  const Report report = measure(rounds);
  json ? print_json(report) : print_text(report);
  return report.good() ? 0 : 1;
}
