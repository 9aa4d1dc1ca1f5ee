#include "scaling/differences.h"

#include <halfstep/scaling.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>

namespace halfstep::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// One parameter, one SGD with a learning rate of 1, one scaler.
struct Bench {
  explicit Bench(LossScaling options = {}, std::vector<double> values = {1.0},
                 at::ScalarType type = at::kFloat)
      : param(torch::tensor(values).to(type).requires_grad_()),
        sgd(std::vector<torch::Tensor>{param}, torch::optim::SGDOptions(1.0)),
        scaler(options) {}

  StepReport step(double grad) {
    param.mutable_grad() = torch::full_like(param, grad);
    const auto report = scaler.step(sgd);
    scaler.update();
    return report;
  }

  std::string param_text() const { return detail::concat("param ", param.item<float>()); }

  torch::Tensor param;
  torch::optim::SGD sgd;
  GradScaler scaler;
};

std::string collapse_after_overflows() {
  Bench bench({.max_consecutive_skips = 0});
  for (int i = 0; i < 200; ++i) (void)bench.step(kInf);
  const double scale = bench.scaler.get_scale();
  (void)bench.step(0.0);
  return detail::concat("scale 2^", std::log2(scale), ", ", bench.param_text());
}

std::string wedged_after_no_gradients() {
  Bench bench;
  const auto first = bench.scaler.step(bench.sgd);
  bench.scaler.update();
  return first.sentence() + "; then: " + bench.step(0x1p16).sentence();
}

std::string fp16_norm_overflow() {
  Bench bench({}, {0, 0, 0, 0}, at::kHalf);
  bench.param.mutable_grad() = torch::full({4}, 64000.0).to(at::kHalf);
  const double norm = clip_grad_norm_({bench.param}, 1.0).item<double>();
  return detail::concat("norm ", norm, ", every gradient ", bench.param.grad()[0].item<float>());
}

std::string senseless_options() {
  int refused = 0;
  for (const LossScaling& options :
       {LossScaling{.initial = kNan}, LossScaling{.initial = 0}, LossScaling{.initial = -1},
        LossScaling{.growth_interval = 0}, LossScaling{.growth_factor = kInf}}) {
    try {
      GradScaler scaler(options);
    } catch (const Error&) {
      ++refused;
    }
  }
  return detail::concat("refused ", refused, " of 5");
}

std::string nan_scale_loaded() {
  GradScaler scaler;
  auto saved = scaler.state_dict();
  saved.set("scale", kNan);
  try {
    scaler.load_state_dict(saved);
  } catch (const Error&) {
    return detail::concat("refused, scale still ", scaler.get_scale());
  }
  return "loaded";
}

std::string fp16_unscaling() {
  Bench bench({}, std::vector<double>(13, 0.0), at::kHalf);
  auto scaled = torch::zeros({13});
  for (int e = 18; e <= 30; ++e) scaled[e - 18] = std::ldexp(1.0, 16 - e);
  bench.param.mutable_grad() = scaled.to(at::kHalf);
  bench.scaler.unscale_(bench.sgd);
  return detail::concat("flushed ", (bench.param.grad() == 0).sum().item<int64_t>(), " of 13");
}

std::string spoiled_after_unscale() {
  Bench bench;
  bench.param.mutable_grad() = torch::ones({1});
  bench.scaler.unscale_(bench.sgd);
  bench.param.mutable_grad().div_(0);
  const bool stepped = bench.scaler.step(bench.sgd).stepped();
  return (stepped ? "stepped, " : "skipped, ") + bench.param_text();
}

std::string overflow_while_unscaling() {
  Bench bench({.initial = 0x1p-20});
  const bool stepped = bench.step(0x1p120).stepped();
  return (stepped ? "stepped, " : "skipped, ") + bench.param_text();
}

std::string sparse_rows_overflow_when_summed() {
  Bench bench({.initial = 1}, {0.0});
  bench.param.mutable_grad() =
      torch::sparse_coo_tensor(torch::tensor({{0, 0}}), torch::full({2}, 3e38f), {1});
  const bool stepped = bench.scaler.step(bench.sgd).stepped();
  return (stepped ? "stepped, " : "skipped, ") + bench.param_text();
}

std::string parameter_of_two_optimizers() {
  Bench bench;
  torch::optim::SGD second(std::vector<torch::Tensor>{bench.param}, torch::optim::SGDOptions(1.0));
  bench.param.mutable_grad() = torch::full({1}, 0x1p14);
  (void)bench.scaler.step(bench.sgd);
  (void)bench.scaler.step(second);
  return bench.param_text();
}

std::string growth_beyond_the_cap() {
  Bench bench({.initial = 0x1p120, .growth_interval = 1});
  for (int i = 0; i < 20; ++i) (void)bench.step(0.0);
  const double scale = bench.scaler.get_scale();
  at::globalContext().setFlushDenormal(true);
  (void)bench.step(0.5 * scale);
  at::globalContext().setFlushDenormal(false);
  return detail::concat("scale 2^", std::log2(scale), ", with subnormals flushed ", bench.param_text());
}

}  // namespace

std::vector<Difference> run_differences() {
  return {
      {"collapse_after_overflows", "200 overflows in a row, then a clean gradient of 0",
       R"({"param":"nan","scale":0.0})", "scale 2^-24, param 1", collapse_after_overflows()},
      {"wedged_after_no_gradients", "a step in which no parameter has a gradient, then an ordinary one",
       R"({"errors":["No inf checks were recorded for this optimizer.","No inf checks were recorded for this optimizer."]})",
       "skipped: no parameter of this optimizer has a gradient; then: stepped", wedged_after_no_gradients()},
      {"fp16_norm_overflow", "clipping four FP16 gradients of 64000 to a norm of 1",
       R"({"grad":[0.0,0.0,0.0,0.0],"norm":"inf"})", "norm 128000, every gradient 0.5", fp16_norm_overflow()},
      {"senseless_options", "a NaN, 0 or -1 as scale, an interval of 0, growth by Inf",
       R"({"accepted":["init_scale nan","init_scale 0","init_scale -1","growth_interval 0","growth_factor inf"]})",
       "refused 5 of 5", senseless_options()},
      {"nan_scale_loaded", "a saved scale of NaN", R"({"scale":"nan"})", "refused, scale still 65536",
       nan_scale_loaded()},
      {"fp16_unscaling", "true gradients 2^-18 to 2^-30 in FP16, scaled by 2^16, un-scaled",
       R"({"flushed_by_the_primitive":6,"refused":"Attempting to unscale FP16 gradients."})",
       "flushed 0 of 13", fp16_unscaling()},
      {"spoiled_after_unscale", "a gradient that becomes Inf between unscale_ and step",
       R"({"param":"-inf"})", "skipped, param 1", spoiled_after_unscale()},
      {"overflow_while_unscaling", "a finite gradient that overflows when divided by a scale of 2^-20",
       R"({"param":"-inf"})", "skipped, param 1", overflow_while_unscaling()},
      {"sparse_rows_overflow_when_summed", "a sparse gradient with one row twice, 3e38 each",
       R"({"param":"-inf"})", "skipped, param 0", sparse_rows_overflow_when_summed()},
      {"parameter_of_two_optimizers",
       "one parameter in two optimizers, true gradient 0.25 (right: 1 - 0.25 - 0.25)",
       R"({"param":0.7499961853027344})", "param 0.5", parameter_of_two_optimizers()},
      {"growth_beyond_the_cap",
       "20 growths from 2^120, then a true gradient of 0.5 with subnormals flushed to zero",
       R"({"param_with_flushed_subnormals":1.0,"scale_exponent":127.0})",
       "scale 2^126, with subnormals flushed param 0.5", growth_beyond_the_cap()},
  };
}

}  // namespace halfstep::testing
