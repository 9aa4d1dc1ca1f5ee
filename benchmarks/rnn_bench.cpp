// LSTM, GRU and RNN layers in BF16, forward and backward, beside stock autocast and FP32: interleaved in one
// run. Of one thread the processor's time, of several the clock's.
//
//   rnn_bench [--rounds N] [--threads N] [--limit R] [--json]
//
// Before it measures, it compares the gradients with those of FP32. Exits with 1 when they are off, or when
// the median ratio to stock's time, or, on a processor without BF16 instructions, to FP32's, is above the
// limit (1.05).
#include <halfstep/mixed_precision.h>
#include <time.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "support/program.h"
#include "support/run_case.h"
#include "support/statistics.h"

namespace {

namespace nn = torch::nn;
using Json = nlohmann::ordered_json;
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

double seconds() {
  timespec now;
  clock_gettime(at::get_num_threads() == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
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
    const double start = seconds();
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
    return seconds() - start;
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

/// `ratios`: the median between its quartiles.
Json quartiles(std::vector<double> ratios) {
  std::sort(ratios.begin(), ratios.end());
  return {ratios[ratios.size() / 4], bench::median(ratios), ratios[ratios.size() * 3 / 4]};
}

struct Settings {
  int rounds;
  double limit;
  bool as_json;
};

/// True when gradients and time are as they should be.
template <typename Layer>
bool compare(const char* kind, const Shape& shape, const char* storage, const Precision& precision,
             const Settings& settings, Json& found) {
  Runner<Layer> plain(shape, Region::None), stock(shape, Region::Stock),
      ours(shape, Region::Halfstep, precision);
  const auto reference = plain.gradients();
  const double stock_error = worst_error(stock.gradients(), reference);
  const double our_error = worst_error(ours.gradients(), reference);

  Runner<Layer>* const runners[] = {&ours, &stock, &plain};
  std::vector<double> times[3], to_stock, to_fp32;
  for (int round = 0; round < settings.rounds; ++round) {
    for (int i = 0; i < 3; ++i) {
      const int which = (i + round) % 3;
      times[which].push_back(runners[which]->step_seconds());
    }
    to_stock.push_back(times[0].back() / times[1].back());
    to_fp32.push_back(times[0].back() / times[2].back());
  }
  const double stock_ratio = bench::median(to_stock), fp32_ratio = bench::median(to_fp32);
  const bool stays_in_fp32 =
      halfstep::rule_on_this_cpu("mkldnn_rnn_layer", at::kBFloat16) == halfstep::OpRule::Fp32;
  const bool good = our_error <= kErrorLimit && stock_ratio <= settings.limit &&
                    (!stays_in_fp32 || fp32_ratio <= settings.limit);
  const std::string name = std::string(kind) + ", " + std::to_string(shape.width) + " wide, " +
                           std::to_string(shape.steps) + " steps of " + std::to_string(shape.batch) + ", " +
                           storage + " weights";
  found[name] = {{"milliseconds",
                  {{"halfstep", bench::median(times[0]) * 1e3},
                   {"stock", bench::median(times[1]) * 1e3},
                   {"fp32", bench::median(times[2]) * 1e3}}},
                 {"time_over_stock", quartiles(to_stock)},
                 {"time_over_fp32", quartiles(to_fp32)},
                 {"error", our_error},
                 {"stock_error", stock_error}};
  std::fprintf(settings.as_json ? stderr : stdout,
               "%-52s%8.1f ms, stock %8.1f, FP32 %8.1f; over stock %.3f +- %.3f, over FP32 %.3f +- %.3f; "
               "gradients off by %.4f, stock's by %.4f%s\n",
               name.c_str(), bench::median(times[0]) * 1e3, bench::median(times[1]) * 1e3,
               bench::median(times[2]) * 1e3, stock_ratio, bench::standard_error_of_median(to_stock),
               fp32_ratio, bench::standard_error_of_median(to_fp32), our_error, stock_error,
               good ? "" : "  FALLS SHORT");
  std::fflush(nullptr);
  return good;
}

template <typename Layer>
bool compare_all(const char* kind, const Settings& settings, Json& found) {
  bool good = true;
  for (const Shape& shape : kShapes) {
    good &= compare<Layer>(kind, shape, "FP32", Precision::bf16(WeightStorage::Fp32), settings, found);
    good &= compare<Layer>(kind, shape, "BF16", Precision::bf16(), settings, found);
  }
  return good;
}

int run(int argc, char** argv) {
  CLI::App app("Recurrent layers in BF16, beside stock autocast and FP32.");
  Settings settings{.rounds = 41, .limit = 1.05, .as_json = false};
  int threads = 1;
  std::string only;
  app.add_option("--rounds", settings.rounds, "of each, in turns")->check(CLI::Range(3, 100000));
  app.add_option("--threads", threads)->check(CLI::PositiveNumber);
  app.add_option("--limit", settings.limit, "of the median ratios of times");
  app.add_option("--only", only, "LSTM, GRU or RNN")->check(CLI::IsMember({"LSTM", "GRU", "RNN"}));
  app.add_flag("--json", settings.as_json, "JSON on the standard output");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(threads);
  Json cases = Json::object();
  bool good = true;
  const auto is_asked_for = [&](const char* kind) { return only.empty() || only == kind; };
  if (is_asked_for("LSTM")) good &= compare_all<nn::LSTM>("LSTM", settings, cases);
  if (is_asked_for("GRU")) good &= compare_all<nn::GRU>("GRU", settings, cases);
  if (is_asked_for("RNN")) good &= compare_all<nn::RNN>("RNN", settings, cases);
  if (settings.as_json)
    std::printf("%s\n",
                Json{{"threads", threads}, {"rounds", settings.rounds}, {"cases", cases}}.dump(2).c_str());
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return bench::exit_code_of(run, argc, argv); }
