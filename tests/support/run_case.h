// Runs an OpCase forward inside some region and backward outside it.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>

#include <optional>
#include <string>

#include "support/op_cases.h"

namespace halfstep::testing {

/// A stock autocast region as C++ users write it by hand.
class BareAutocast {
 public:
  explicit BareAutocast(at::ScalarType low)
      : outer_enabled_(at::autocast::is_autocast_enabled(at::kCPU)),
        outer_low_(at::autocast::get_autocast_dtype(at::kCPU)) {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, low);
  }
  ~BareAutocast() {
    at::autocast::set_autocast_enabled(at::kCPU, outer_enabled_);
    at::autocast::set_autocast_dtype(at::kCPU, outer_low_);
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  }
  BareAutocast(const BareAutocast&) = delete;

 private:
  bool outer_enabled_;
  at::ScalarType outer_low_;
};

struct Outcome {
  at::Tensor output;
  std::vector<at::Tensor> leaves;  // with their gradients
  std::string error;               // first line; empty when all went well

  /// Complex numbers have the type of their parts.
  at::ScalarType output_type() const { return c10::toRealValueType(output.scalar_type()); }
};

inline std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

/// `open_region` returns a guard that lives during forward. The same seed gives the same inputs.
template <typename OpenRegion>
Outcome run_case(const OpCase& op_case, const std::vector<at::ScalarType>& types, OpenRegion open_region,
                 at::Device device = at::kCPU) {
  at::manual_seed(7);
  Inputs inputs(types, /*as_activations=*/false, device);
  Outcome outcome;
  try {
    {
      [[maybe_unused]] const auto region = open_region();
      const std::optional<at::NoGradGuard> no_grad =
          op_case.differentiable ? std::nullopt : std::make_optional<at::NoGradGuard>();
      outcome.output = op_case.call(inputs);
    }
    if (op_case.differentiable) torch::autograd::backward({outcome.output}, {at::ones_like(outcome.output)});
  } catch (const std::exception& error) {
    outcome.error = first_line(error.what());
  }
  outcome.leaves = inputs.leaves();
  return outcome;
}

/// Runs `body` and returns the full names of the ATen operations that the dispatcher saw.
template <typename Body>
std::vector<std::string> operations_called_by(Body body) {
  thread_local std::vector<std::string>* names = nullptr;
  std::vector<std::string> seen;
  names = &seen;
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        if (const auto name = function.operator_name()) {
          names->push_back(name->name.substr(6) +
                           (name->overload_name.empty() ? "" : "." + name->overload_name));
        }
        return nullptr;
      }));
  body();
  at::removeCallback(handle);
  return seen;
}

}  // namespace halfstep::testing
