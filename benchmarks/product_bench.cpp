// Products and convolutions in a scope, forward and backward, and whole steps of a ResNet-18: by LibTorch's
// low operations, by FP32 ones of rounded operands, as a scope chooses, and without a scope in FP32. In turns
// in one run.
//
//   product_bench [--rounds N] [--threads N] [--only TEXT] [--json]
//
// Medians, quartiles of the rounds' ratios, and the bytes that a forward pass leaves alive for backward.
// Exits with 1 where gradients are off, or where a scope that is left to choose is slower by more than a
// tenth: than the faster low way, or, for convolutions and networks of them on a processor without
// instructions for the type, than FP32.
#include <halfstep/autocast.h>
#include <halfstep/memory.h>
#include <halfstep/models.h>
#include <halfstep/train_step.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "support/live_bytes.h"
#include "support/program.h"
#include "support/statistics.h"

namespace {

using at::Tensor;
using halfstep::AutocastScope;
using halfstep::OpRule;
using Json = nlohmann::ordered_json;

enum Way { kLibTorchs, kInFp32, kChosen, kPlain, kWays };
constexpr const char* kNames[] = {"libtorch", "rounded_in_fp32", "chosen", "fp32"};

halfstep::AutocastOptions options_of(Way way) {
  std::optional<bool> in_fp32;
  if (way != kChosen) in_fp32 = way == kInFp32;
  return {.allow_emulated = true, .products_in_fp32 = in_fp32};
}

/// One step, forward and backward: gradients, and what forward left alive.
struct Step {
  std::vector<Tensor> grads;
  int64_t kept_bytes = 0;
};

struct Case {
  std::string name;
  at::ScalarType low;
  bool is_of_convolutions;
  double error_limit;  // of gradients, from those of FP32
  std::function<Step()> ways[kWays]{};
  std::function<void()> timed[kWays]{};
};

struct Shape {
  const char* name;
  std::vector<int64_t> input, weight;
};

const Shape kShapes[] = {{"linear 256 x 512 -> 1536", {256, 512}, {1536, 512}},
                         {"conv2d 3 x 3, 32 -> 32, 4 of 16 x 16", {4, 32, 16, 16}, {32, 32, 3, 3}},
                         {"conv2d 3 x 3, 64 -> 64, 16 of 28 x 28", {16, 64, 28, 28}, {64, 64, 3, 3}},
                         {"conv2d 3 x 3, 512 -> 512, 16 of 4 x 4", {16, 512, 4, 4}, {512, 512, 3, 3}}};

Case operation(const Shape& shape, at::ScalarType low) {
  at::manual_seed(1);
  const bool is_linear = shape.weight.size() == 2;
  const Tensor x = at::randn(shape.input).requires_grad_(), w = at::randn(shape.weight).requires_grad_();
  const auto compute = [=](const Tensor& x, const Tensor& w) {
    return is_linear ? at::linear(x, w) : at::conv2d(x, w, {}, {1, 1}, {1, 1});
  };
  Case made{
      .name = shape.name,
      .low = low,
      .is_of_convolutions = !is_linear,
      // Operands, result and gradients are rounded once each, at random: sqrt(3) half units, and a margin.
      .error_limit = low == at::kHalf ? 0x1p-10 : 0x1p-7};
  for (int way = 0; way < kWays; ++way)
    made.ways[way] = [=] {
      Step step;
      Tensor y;
      const halfstep::testing::LiveBytes bytes;
      if (way == kPlain) {
        y = compute(x * 1, w);
      } else {
        const AutocastScope scope(low, halfstep::OpPolicy::standard(), options_of(static_cast<Way>(way)));
        y = compute(x * 1, w);
      }
      step.kept_bytes = bytes.live();
      step.grads = torch::autograd::grad({y}, {x, w}, {at::ones_like(y)});
      return step;
    };
  for (int way = 0; way < kWays; ++way) made.timed[way] = [run = made.ways[way]] { run(); };
  return made;
}

/// Each way has a model of its own. Timed are whole steps, with clipping and AdamW.
Case resnet(const char* name, halfstep::Precision low, int64_t side) {
  Case made{.name = name,
            .low = at::kBFloat16,
            .is_of_convolutions = true,
            // 20 convolutions and norms after one another, each rounding its input, and as many backward.
            .error_limit = 0.25};
  for (int way = 0; way < kWays; ++way) {
    const auto model = std::make_shared<halfstep::ResNet18>(
        halfstep::ResNet18Options{.classes = 10, .channels = 3, .small_images = true}, /*seed=*/1);
    const auto train = std::make_shared<halfstep::TrainStep<halfstep::AdamWOptions>>(
        way == kPlain ? halfstep::Precision::fp32() : low, **model, halfstep::AdamWOptions{.lr = 1e-5},
        halfstep::TrainStepOptions{.max_grad_norm = 1,
                                   .precision = {.autocast = options_of(static_cast<Way>(way))}});
    at::manual_seed(1);
    const Tensor images = at::randn({16, 3, side, side}), classes = at::randint(10, {16});
    const auto loss_of_batch = [=] { return at::cross_entropy_loss((*model)->forward(images), classes); };
    made.ways[way] = [=] {
      Step step;
      (*model)->zero_grad();
      const halfstep::testing::LiveBytes bytes;
      const Tensor loss = train->mixed_precision().forward(loss_of_batch);
      step.kept_bytes = bytes.live();
      loss.backward();
      for (const Tensor& parameter : (*model)->parameters()) step.grads.push_back(parameter.grad().clone());
      (*model)->zero_grad();
      return step;
    };
    made.timed[way] = [=] { (void)(*train)(loss_of_batch); };
  }
  return made;
}

double worst_error(const std::vector<Tensor>& grads, const std::vector<Tensor>& exact) {
  double off = 0, all = 0;
  for (std::size_t i = 0; i < grads.size(); ++i) {
    off += (grads[i].to(at::kDouble) - exact[i].to(at::kDouble)).square().sum().item<double>();
    all += exact[i].to(at::kDouble).square().sum().item<double>();
  }
  return std::sqrt(off / all);
}

/// Of `ratios`, sorted: the median between its quartiles.
Json quartiles(std::vector<double> ratios) {
  std::sort(ratios.begin(), ratios.end());
  return {ratios[ratios.size() / 4], bench::median(ratios), ratios[ratios.size() * 3 / 4]};
}

Json measured(const Case& each, int rounds, bool& good) {
  Json json;
  const auto exact = each.ways[kPlain]().grads;
  for (int way = 0; way < kWays; ++way) {
    const Step step = each.ways[way]();
    const double error = worst_error(step.grads, exact);
    json["error"][kNames[way]] = error;
    json["kept_bytes"][kNames[way]] = step.kept_bytes;
    good = good && error <= each.error_limit;
  }
  for (const auto& run : each.timed) run();
  std::vector<double> milliseconds[kWays];
  for (int round = 0; round < rounds; ++round)
    for (int i = 0; i < kWays; ++i) {
      const int way = (i + round) % kWays;
      const auto begin = std::chrono::steady_clock::now();
      each.timed[way]();
      milliseconds[way].push_back(
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
    }
  for (int way = 0; way < kWays; ++way) json["milliseconds"][kNames[way]] = bench::median(milliseconds[way]);
  for (int way = 0; way < kPlain; ++way) {
    std::vector<double> ratios;
    for (int round = 0; round < rounds; ++round)
      ratios.push_back(milliseconds[kPlain][static_cast<std::size_t>(round)] /
                       milliseconds[way][static_cast<std::size_t>(round)]);
    json["times_as_fast_as_fp32"][kNames[way]] = quartiles(ratios);
  }
  const auto of = [&](Way way) { return bench::median(milliseconds[way]); };
  const bool stays_in_fp32 =
      each.is_of_convolutions && halfstep::rule_on_this_cpu("conv2d", each.low) == OpRule::Fp32;
  good = good && of(kChosen) <= 1.1 * (stays_in_fp32 ? of(kPlain) : std::min(of(kLibTorchs), of(kInFp32)));
  return json;
}

int run(int argc, char** argv) {
  CLI::App app("Products and convolutions in a scope and without.");
  int rounds = 9, threads = 1;
  std::string only;
  bool as_json = false;
  app.add_option("--rounds", rounds, "of each, in turns")->check(CLI::PositiveNumber);
  app.add_option("--threads", threads)->check(CLI::PositiveNumber);
  app.add_option("--only", only, "cases whose name contains this text");
  app.add_flag("--json", as_json, "JSON on the standard output");
  CLI11_PARSE(app, argc, argv);
  halfstep::install_cpu_allocator();  // as `halfstep train` has it
  at::set_num_threads(threads);

  std::vector<std::function<Case()>> cases;
  for (const Shape& shape : kShapes)
    for (const at::ScalarType low : {at::kBFloat16, at::kHalf})
      cases.push_back([&shape, low] { return operation(shape, low); });
  using halfstep::Precision;
  cases.push_back([] { return resnet("ResNet-18, 16 of 28 x 28, BF16 weights", Precision::bf16(), 28); });
  cases.push_back([] {
    return resnet("ResNet-18, 16 of 28 x 28, FP32 weights", Precision::bf16(halfstep::WeightStorage::Fp32),
                  28);
  });

  Json found{{"threads", threads}, {"rounds", rounds}, {"cases", Json::object()}};
  bool all_good = true;
  if (!as_json)
    std::printf("%-42s%-10s%12s%12s%12s%12s%10s\n", "", "", "LibTorch's", "rounded", "as chosen", "FP32",
                "  FP32 over chosen");
  for (const auto& make : cases) {
    const Case each = make();
    const std::string name = each.name + (each.low == at::kHalf ? " FP16" : " BF16");
    if (name.find(only) == name.npos) continue;
    bool good = true;
    const Json json = measured(each, rounds, good);
    found["cases"][name] = json;
    all_good = all_good && good;
    const auto ms = [&](Way way) { return json["milliseconds"][kNames[way]].get<double>(); };
    const Json& ratio = json["times_as_fast_as_fp32"]["chosen"];
    std::fprintf(
        as_json ? stderr : stdout, "%-42s%-10s%9.2f ms%9.2f ms%9.2f ms%9.2f ms   %.2f (%.2f to %.2f)%s\n",
        each.name.c_str(), c10::toString(each.low), ms(kLibTorchs), ms(kInFp32), ms(kChosen), ms(kPlain),
        ratio[1].get<double>(), ratio[0].get<double>(), ratio[2].get<double>(), good ? "" : "  FALLS SHORT");
    std::fflush(nullptr);
  }
  if (as_json) std::printf("%s\n", found.dump(2).c_str());
  return all_good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return bench::exit_code_of(run, argc, argv); }
