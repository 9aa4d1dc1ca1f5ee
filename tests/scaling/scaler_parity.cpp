// scaler_parity [--schedules N] [--json]: GradScaler beside Python's torch.amp.
//
// Random schedules must give the same scale, growth count, decisions and SGD parameters, bit for bit. Then
// the listed differences: torch.amp must do what we say it does, and Halfstep what it promises. Exits 1 when
// anything falls short.
#include <halfstep/scaling.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>

#include "scaling/differences.h"
#include "scaling/schedule.h"
#include "support/python.h"

namespace halfstep::testing {
namespace {

constexpr int kBatch = 200;  // schedules a question to Python: some megabytes

torch::Tensor tensor_of(const std::vector<double>& values, at::ScalarType type) {
  return torch::tensor(values, at::kDouble).to(type);
}

at::ScalarType type_of(const std::string& name) {
  return name == "float" ? at::kFloat : name == "double" ? at::kDouble : at::kBFloat16;
}

torch::Tensor grad_of(const GradSpec& spec, const torch::Tensor& param) {
  const auto values = tensor_of(spec.values, param.scalar_type());
  if (!spec.rows) return values.reshape(param.sizes());
  return torch::sparse_coo_tensor(torch::tensor(*spec.rows).unsqueeze(0), values, param.sizes());
}

nlohmann::json bits_of_tensor(const torch::Tensor& tensor) {
  auto bits = nlohmann::json::array();
  const auto flat = tensor.detach().to(at::kDouble).contiguous();
  for (int64_t i = 0; i < flat.numel(); ++i) bits.push_back(bits_of(flat.const_data_ptr<double>()[i]));
  return bits;
}

torch::optim::SGD make_optimizer(const OptimizerSpec& spec) {
  std::vector<torch::Tensor> params;
  for (const auto& param : spec.params)
    params.push_back(tensor_of(param.values, type_of(param.dtype)).requires_grad_());
  return torch::optim::SGD(
      params, torch::optim::SGDOptions(spec.lr).momentum(spec.momentum).weight_decay(spec.weight_decay));
}

/// The same trace as tools/torch_amp_oracle.py gives.
nlohmann::json run(const Schedule& schedule) {
  // The floor as low as it goes and no skip limit: torch.amp has neither, and they are listed differences.
  GradScaler scaler({.initial = schedule.initial,
                     .growth_factor = schedule.growth_factor,
                     .backoff_factor = schedule.backoff_factor,
                     .growth_interval = schedule.growth_interval,
                     .floor = 0x1p-126,
                     .max_consecutive_skips = 0});
  std::vector<torch::optim::SGD> optimizers;
  for (const auto& spec : schedule.optimizers) optimizers.push_back(make_optimizer(spec));

  auto trace = nlohmann::json::array();
  for (const auto& step : schedule.steps) {
    if (step.restart) {
      const auto saved = scaler.state_dict();
      scaler = GradScaler();
      scaler.load_state_dict(saved);
    }
    auto stepped = nlohmann::json::array(), all_params = nlohmann::json::array();
    for (size_t i = 0; i < optimizers.size(); ++i) {
      const auto& work = step.optimizers[i];
      auto& params = optimizers[i].param_groups()[0].params();
      for (size_t p = 0; p < params.size(); ++p)
        params[p].mutable_grad() = work.grads[p] ? grad_of(*work.grads[p], params[p]) : torch::Tensor();
      if (work.unscale) scaler.unscale_(optimizers[i]);
      stepped.push_back(work.step && scaler.step(optimizers[i]).stepped());
    }
    scaler.update();
    for (auto& optimizer : optimizers) {
      auto bits = nlohmann::json::array();
      for (const auto& param : optimizer.param_groups()[0].params()) bits.push_back(bits_of_tensor(param));
      all_params.push_back(bits);
    }
    trace.push_back({{"scale", bits_of(scaler.get_scale())},
                     {"tracker", scaler.state().clean_steps},
                     {"stepped", stepped},
                     {"params", all_params}});
  }
  return trace;
}

struct Tally {
  int schedules = 0, steps = 0, decisions = 0, skipped = 0, restarts = 0, disagreements = 0;
};

void compare(int number, const Schedule& schedule, const nlohmann::json& torch_amp, Tally& tally) {
  const auto ours = run(schedule);
  ++tally.schedules;
  for (size_t step = 0; step < ours.size(); ++step) {
    ++tally.steps;
    tally.restarts += schedule.steps[step].restart;
    for (size_t o = 0; o < schedule.optimizers.size(); ++o) {
      if (!schedule.steps[step].optimizers[o].step) continue;
      ++tally.decisions;
      tally.skipped += !ours[step]["stepped"][o].get<bool>();
    }
  }
  if (ours == torch_amp) return;
  if (++tally.disagreements > 5) return;
  for (size_t step = 0; step < ours.size(); ++step) {
    if (ours[step] == torch_amp[step]) continue;
    std::fprintf(stderr, "schedule %d, step %zu:\n  torch.amp %s\n  Halfstep  %s\n", number, step,
                 torch_amp[step].dump().c_str(), ours[step].dump().c_str());
    return;
  }
}

Tally run_schedules(int count, bool show_progress) {
  Tally tally;
  for (int first = 0; first < count; first += kBatch) {
    const int last = std::min(first + kBatch, count);
    std::vector<Schedule> batch;
    nlohmann::json question;
    for (int number = first; number < last; ++number) {
      batch.push_back(random_schedule(number));
      question["schedules"].push_back(to_json(batch.back()));
    }
    const auto answer = ask_python("tools/torch_amp_oracle.py", question);
    for (int number = first; number < last; ++number)
      compare(number, batch[number - first], answer["traces"][number - first], tally);
    if (show_progress) std::fprintf(stderr, "\rscaler_parity: %d of %d schedules", last, count);
  }
  if (show_progress) std::fputc('\n', stderr);
  return tally;
}

nlohmann::json as_json(const Tally& tally) {
  return {{"schedules", tally.schedules}, {"steps", tally.steps},
          {"decisions", tally.decisions}, {"skipped", tally.skipped},
          {"restarts", tally.restarts},   {"disagreements", tally.disagreements}};
}

int main(int argc, char** argv) {
  CLI::App app("GradScaler beside Python's torch.amp");
  int schedules = 2400;
  bool json = false;
  app.add_option("--schedules", schedules, "how many random schedules")->capture_default_str();
  app.add_flag("--json", json, "print the figures as JSON");
  CLI11_PARSE(app, argc, argv);

  torch::set_num_threads(1);
  const Tally tally = run_schedules(schedules, !json && isatty(STDERR_FILENO));
  const auto answer = ask_python("tools/torch_amp_oracle.py", {{"differences", true}});
  bool ok = tally.disagreements == 0;
  auto differences = nlohmann::json::array();
  for (const auto& d : run_differences()) {
    const std::string torch_amp = answer["differences"][d.name].dump();
    const bool as_listed = torch_amp == d.torch_amp && d.halfstep == d.expected;
    ok &= as_listed;
    differences.push_back({{"name", d.name},
                           {"situation", d.situation},
                           {"torch_amp", torch_amp},
                           {"halfstep", d.halfstep},
                           {"as_listed", as_listed}});
    if (!as_listed)
      std::fprintf(
          stderr, "%s is not as listed:\n  torch.amp %s\n  listed    %s\n  Halfstep  %s\n  promised  %s\n",
          d.name.c_str(), torch_amp.c_str(), d.torch_amp.c_str(), d.halfstep.c_str(), d.expected.c_str());
  }

  if (json) {
    std::puts(nlohmann::json{
        {"torch", answer["torch"]}, {"random", as_json(tally)}, {"differences", differences}, {"ok", ok}}
                  .dump(2)
                  .c_str());
    return ok ? 0 : 1;
  }
  std::printf(
      "%d random schedules, %d steps, %d restarts, %d decisions of which %d skips: %d disagreements with "
      "torch.amp %s\n",
      tally.schedules, tally.steps, tally.restarts, tally.decisions, tally.skipped, tally.disagreements,
      answer["torch"].get<std::string>().c_str());
  std::printf("\n%zu listed differences:\n", differences.size());
  for (const auto& d : differences)
    std::printf("  %s\n    torch.amp: %s\n    Halfstep:  %s\n", d["situation"].get<std::string>().c_str(),
                d["torch_amp"].get<std::string>().c_str(), d["halfstep"].get<std::string>().c_str());
  std::puts(ok ? "\nall as promised" : "\nFELL SHORT: see above");
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace halfstep::testing

int main(int argc, char** argv) { return halfstep::testing::main(argc, argv); }
