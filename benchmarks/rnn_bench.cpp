// LSTM and GRU layers in BF16, forward and backward, beside stock autocast: one thread, thread processor
// time, interleaved in one run.
//
//   rnn_bench [--rounds N] [--limit R]
//
// Before it measures, it compares the gradients with those of FP32. Exits with 1 when they are off, or when a
// median ratio to stock is above the limit (1.05).
#include <halfstep/mixed_precision.h>
#include <time.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <iostream>
#include <memory>
#include <optional>
#include <vector>

#include "support/run_case.h"
#include "support/statistics.h"

namespace {

namespace nn = torch::nn;
using halfstep::MixedPrecision;
using halfstep::Precision;
using halfstep::WeightStorage;
using halfstep::testing::BareAutocast;

struct Shape {
  int64_t width, steps, batch;
};

constexpr Shape kShapes[] = {{.width = 512, .steps = 64, .batch = 32},
                             {.width = 128, .steps = 32, .batch = 16}};

/// Roundings of at most 2^-8 in input, weights, h and gates, and in each of the sums of a weight's gradient
/// over the steps, of which there are at most 64 here. They point anywhere: sqrt(64) x 2^-8.
constexpr double kErrorLimit = 0x1p-5;

double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

enum class Region { None, Stock, Halfstep };

/// One layer of one kind with its data, and how its steps are run.
template <typename Layer>
class Runner {
 public:
  Runner(const Shape& shape, Region region, std::optional<Precision> precision = {}) : region_(region) {
    at::manual_seed(1);
    layer_ = Layer(shape.width, shape.width);
    x_ = at::randn({shape.steps, shape.batch, shape.width});
    if (precision) {
      mixed_ = std::make_unique<MixedPrecision>(
          *precision, *layer_, halfstep::MixedPrecisionOptions{.autocast = {.allow_emulated = true}});
    }
  }

  double step_seconds() {
    layer_->zero_grad();
    const double start = thread_seconds();
    const auto loss = [this] { return std::get<0>(layer_->forward(x_)).to(at::kFloat).pow(2).mean(); };
    at::Tensor value;
    if (region_ == Region::Halfstep) {
      value = mixed_->forward(loss);
    } else {
      std::optional<BareAutocast> stock;
      if (region_ == Region::Stock) stock.emplace(at::kBFloat16);
      value = loss();
    }
    value.backward();
    return thread_seconds() - start;
  }

  std::vector<at::Tensor> gradients() {
    step_seconds();
    std::vector<at::Tensor> found;
    for (const at::Tensor& parameter : layer_->parameters())
      found.push_back(parameter.grad().to(at::kDouble));
    return found;
  }

 private:
  Region region_;
  Layer layer_{nullptr};
  at::Tensor x_;
  std::unique_ptr<MixedPrecision> mixed_;
};

double worst_error(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& reference) {
  double worst = 0;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const double error = (gradients[i] - reference[i]).norm().item<double>();
    worst = std::max(worst, error / reference[i].norm().item<double>());
  }
  return worst;
}

/// True when gradients and time are as they should be.
template <typename Layer>
bool compare(const char* kind, const Shape& shape, const char* storage, const Precision& precision,
             int rounds, double limit) {
  const auto reference = Runner<Layer>(shape, Region::None).gradients();
  Runner<Layer> stock(shape, Region::Stock), ours(shape, Region::Halfstep, precision);
  const double stock_error = worst_error(stock.gradients(), reference);
  const double our_error = worst_error(ours.gradients(), reference);

  std::vector<double> stock_seconds, our_seconds, ratios;
  for (int round = 0; round < rounds; ++round) {
    const bool stock_first = round % 2 == 0;
    if (stock_first) stock_seconds.push_back(stock.step_seconds());
    our_seconds.push_back(ours.step_seconds());
    if (!stock_first) stock_seconds.push_back(stock.step_seconds());
    ratios.push_back(our_seconds.back() / stock_seconds.back());
  }
  const double ratio = bench::median(ratios);
  const bool good = our_error <= kErrorLimit && ratio <= limit;
  std::cout << kind << ' ' << shape.width << " wide, " << shape.steps << " x " << shape.batch << ", weights "
            << storage << ": " << std::setprecision(3) << bench::median(our_seconds) * 1e3 << " ms, stock "
            << bench::median(stock_seconds) * 1e3 << " ms, ratio " << std::fixed << ratio << " +- "
            << bench::standard_error_of_median(ratios) << " (" << rounds << " rounds); gradients off by "
            << our_error << ", stock's by " << stock_error << std::defaultfloat
            << (good ? "\n" : "  FALLS SHORT\n");
  return good;
}

template <typename Layer>
bool compare_all(const char* kind, int rounds, double limit) {
  bool good = true;
  for (const Shape& shape : kShapes) {
    good &= compare<Layer>(kind, shape, "FP32", Precision::bf16(WeightStorage::Fp32), rounds, limit);
    good &= compare<Layer>(kind, shape, "BF16", Precision::bf16(), rounds, limit);
  }
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  int rounds = 41;
  double limit = 1.05;
  for (int i = 1; i < argc; i += 2) {
    const bool has_value = i + 1 < argc;
    if (has_value && std::strcmp(argv[i], "--rounds") == 0 && std::atoi(argv[i + 1]) >= 3) {
      rounds = std::atoi(argv[i + 1]);
    } else if (has_value && std::strcmp(argv[i], "--limit") == 0) {
      limit = std::atof(argv[i + 1]);
    } else {
      std::cerr << "usage: rnn_bench [--rounds N] [--limit R]      N >= 3\n";
      return 2;
    }
  }
  at::set_num_threads(1);
  const bool lstm = compare_all<nn::LSTM>("LSTM", rounds, limit);
  const bool gru = compare_all<nn::GRU>("GRU", rounds, limit);
  return lstm && gru ? 0 : 1;
}
