#include "optim/optimizer_state.h"

#include <halfstep/error.h>

#include "optim/rules.h"
#include "tensor/faults.h"

namespace halfstep::optim {
namespace {

// Each name is written once, for both directions: visit(name, field).
template <typename Options, typename Visit>
void for_each_rate(Options& options, Visit visit) {
  visit("lr", options.lr);
  visit("weight_decay", options.weight_decay);
  if constexpr (requires { options.beta1; }) {
    visit("beta1", options.beta1);
    visit("beta2", options.beta2);
    visit("eps", options.eps);
  } else {
    visit("momentum", options.momentum);
    visit("dampening", options.dampening);
  }
  visit("schedule.final_fraction", options.schedule.spans.final_fraction);
}

template <typename Options, typename Visit>
void for_each_count(Options& options, Visit visit) {
  visit("schedule.warmup_steps", options.schedule.spans.warmup_steps);
  visit("schedule.total_steps", options.schedule.spans.total_steps);
  visit("schedule.decay_steps", options.schedule.spans.decay_steps);
}

/// Enumerations and flags: visit(name, the field as a number, set(number)), number below `limit`.
template <typename Options, typename Visit>
void for_each_choice(Options& options, Visit visit) {
  visit("moments", options.moments, int64_t{3});
  visit("schedule.shape", options.schedule.shape, int64_t{4});
  if constexpr (requires { options.nesterov; }) visit("nesterov", options.nesterov, int64_t{2});
}

template <typename S, typename Visit>
void for_each_tensor(S& slot, Visit visit) {
  visit("first_moment", slot.first.values);
  visit("first_moment_scales", slot.first.scales);
  visit("second_moment", slot.second.values);
  visit("second_moment_scales", slot.second.scales);
}

std::string group_name(std::size_t group, const char* field) {
  return detail::concat("group.", group, ".", field);
}
std::string param_name(const Slot& slot, const char* field) {
  return "param." + slot.param.name + "." + field;
}

}  // namespace

template <typename Options>
StateDict saved_form(const OptimizerState<Options>& state) {
  StateDict saved;
  saved.set("optimizer", std::string(Rule<Options>::kName));
  saved.set("steps", state.steps);
  saved.set("seed", static_cast<int64_t>(state.seed));
  for (std::size_t group = 0; group < state.groups.size(); ++group) {
    const auto save = [&](const char* name, auto field) { saved.set(group_name(group, name), field); };
    for_each_rate(state.groups[group], save);
    for_each_count(state.groups[group], save);
    for_each_choice(state.groups[group], [&](const char* name, auto field, int64_t) {
      saved.set(group_name(group, name), static_cast<int64_t>(field));
    });
  }
  for (const Slot& slot : state.slots) {
    saved.set(param_name(slot, "steps"), slot.steps);
    saved.set(param_name(slot, "group"), static_cast<int64_t>(slot.group));
    // Copies: a state that is written to disk while training goes on must not change under the writer.
    for_each_tensor(slot, [&](const char* name, const at::Tensor& tensor) {
      if (tensor.defined()) saved.set(param_name(slot, name), tensor.clone());
    });
  }
  return saved;
}

template <typename Options>
void load(const StateDict& saved, OptimizerState<Options>& state) {
  constexpr const char* whose = Rule<Options>::kName;
  std::vector<std::string> expected;
  for (const auto& [name, value] : saved_form(state)) expected.push_back(name);
  saved.expect_exactly(whose, {expected.begin(), expected.end()});

  Faults faults;
  faults.expect(saved.text("optimizer") == whose, "'optimizer' is '", saved.text("optimizer"), "'");
  std::vector<Options> groups = state.groups;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for_each_rate(groups[group],
                  [&](const char* name, double& field) { field = saved.real(group_name(group, name)); });
    for_each_count(groups[group],
                   [&](const char* name, int64_t& field) { field = saved.integer(group_name(group, name)); });
    for_each_choice(groups[group], [&](const char* name, auto& field, int64_t limit) {
      const int64_t number = saved.integer(group_name(group, name));
      faults.expect(number >= 0 && number < limit, "'", group_name(group, name), "' is ", number,
                    ", expected a number from 0 to ", limit - 1);
      field = static_cast<std::remove_reference_t<decltype(field)>>(number);
    });
    faults.expect(groups[group].moments == state.groups[group].moments, "'", group_name(group, "moments"),
                  "': moments of another storage; build the optimizer with the same one");
  }
  faults.expect(saved.integer("steps") >= 0, "'steps' is ", saved.integer("steps"), ", expected a count");
  for (const Slot& slot : state.slots) {
    const int64_t steps = saved.integer(param_name(slot, "steps"));
    faults.expect(steps >= 0, "'", param_name(slot, "steps"), "' is ", steps, ", expected a count");
    const int64_t group = saved.integer(param_name(slot, "group"));
    faults.expect(group == static_cast<int64_t>(slot.group), "'", slot.param.name, "' was in group ", group,
                  " and is in group ", slot.group);
    for_each_tensor(slot, [&](const char* name, const at::Tensor& tensor) {
      if (tensor.defined())
        faults.expect_like(param_name(slot, name), saved.tensor(param_name(slot, name)), tensor);
    });
  }
  faults.throw_if_any(whose);
  for (const Options& options : groups) options.check();

  state.steps = saved.integer("steps");
  state.seed = static_cast<uint64_t>(saved.integer("seed"));
  state.groups = std::move(groups);
  for (Slot& slot : state.slots) {
    slot.steps = saved.integer(param_name(slot, "steps"));
    for_each_tensor(slot, [&](const char* name, at::Tensor& tensor) {
      if (tensor.defined()) tensor.copy_(saved.tensor(param_name(slot, name)));
    });
  }
}

template StateDict saved_form(const OptimizerState<AdamWOptions>&);
template StateDict saved_form(const OptimizerState<SgdOptions>&);
template void load(const StateDict&, OptimizerState<AdamWOptions>&);
template void load(const StateDict&, OptimizerState<SgdOptions>&);

}  // namespace halfstep::optim
