#include "optim/optimizer_state.h"

#include <halfstep/error.h>

#include "optim/device_update.h"
#include "optim/rules.h"
#include "tensor/dense.h"
#include "tensor/faults.h"
#include "tensor/param_checks.h"
#include "tensor/transfers.h"
#include "tensor/update_path.h"

namespace halfstep::optim {
namespace {

// Each name is written once, for both directions: visit(name, field).
template <typename Options, typename Visit>
void for_each_rate(Options& options, Visit visit) {
  visit("lr", options.lr);
  visit("weight_decay", options.weight_decay);
  if constexpr (requires { options.betas; }) {
    visit("beta1", options.betas[0]);
    visit("beta2", options.betas[1]);
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
  if constexpr (requires { options.nesterov; }) visit("nesterov", options.nesterov);
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

/// Of a part of a parameter with the elements that it has.
std::string tensor_name(const Slot& slot, const char* field) {
  const bool is_of_blocks = std::string_view(field).ends_with("_scales");
  return saved_name(param_name(slot, field), slot.param, is_of_blocks ? kMomentBlockElements : 1);
}

/// A rank's part of a parameter may have no elements: there is nothing to save.
bool is_saved(const Slot& slot, const at::Tensor& tensor) {
  return tensor.defined() && !(slot.param.is_part() && slot.param.working.numel() == 0);
}

}  // namespace

namespace {

/// With the tensors themselves.
template <typename Options>
StateDict live_form(const OptimizerState<Options>& state) {
  StateDict saved;
  saved.set("optimizer", std::string(Rule<Options>::kName));
  saved.set("steps", state.steps);
  saved.set("seed", static_cast<int64_t>(state.seed));
  for (std::size_t group = 0; group < state.groups.size(); ++group) {
    const auto save = [&](const char* name, auto field) { saved.set(group_name(group, name), field); };
    for_each_rate(state.groups[group], save);
    for_each_count(state.groups[group], [&](const char* name, int64_t field) { save(name, field); });
    save("moments", std::string(to_string(state.groups[group].moments)));
    save("schedule.shape", std::string(to_string(state.groups[group].schedule.shape)));
  }
  for (const Slot& slot : state.slots) {
    saved.set(param_name(slot, "steps"), slot.steps);
    saved.set(param_name(slot, "group"), static_cast<int64_t>(slot.group));
    if (slot.param.is_part()) saved.set(param_name(slot, "part"), saved_name("", slot.param));
    for_each_tensor(slot, [&](const char* name, const at::Tensor& tensor) {
      if (is_saved(slot, tensor)) saved.set(tensor_name(slot, name), tensor);
    });
  }
  return saved;
}

/// The slots as the saved form has them: a parameter that was never updated, because it was frozen, may have
/// no moments here and some there, or the other way round.
template <typename Options>
std::vector<Slot> slots_as_saved(const StateDict& saved, const OptimizerState<Options>& state) {
  std::vector<Slot> slots = state.slots;
  for (Slot& slot : slots) {
    if (slot.param.is_part() && slot.param.working.numel() == 0) continue;
    const int moments = Rule<Options>::moment_count(state.groups[slot.group]);
    int which = 0;
    for (const auto& [name, moment] :
         {std::pair{"first_moment", &slot.first}, std::pair{"second_moment", &slot.second}}) {
      const bool kept = saved.contains(tensor_name(slot, name)), wanted = which++ < moments;
      if (kept && wanted && !moment->values.defined()) *moment = make_moment(slot.param, slot.storage);
      const std::string steps = param_name(slot, "steps");
      if (!kept && saved.contains(steps) && saved.integer(steps) == 0) *moment = {};
    }
  }
  return slots;
}

}  // namespace

// Copies: a state that is written to disk while training goes on must not change under the writer.
template <typename Options>
StateDict saved_form(const OptimizerState<Options>& state) {
  return on_host(live_form(state));
}

template <typename Options>
void load(const StateDict& saved, OptimizerState<Options>& state) {
  constexpr const char* whose = Rule<Options>::kName;
  // First: another optimizer has other names, and the list of those would not say why.
  HALFSTEP_CHECK(!saved.contains("optimizer") || saved.text("optimizer") == whose, whose,
                 ": the saved state is of ", saved.text("optimizer"), ". Build the same optimizer.");
  OptimizerState<Options> as_saved = state;
  as_saved.slots = slots_as_saved(saved, state);
  std::vector<std::string> expected;
  for (const auto& [name, value] : live_form(as_saved)) expected.push_back(name);
  saved.expect_exactly(whose, {expected.begin(), expected.end()});

  Faults faults;
  std::vector<Options> groups = state.groups;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for_each_rate(groups[group],
                  [&](const char* name, double& field) { field = saved.real(group_name(group, name)); });
    for_each_count(groups[group],
                   [&](const char* name, auto& field) { field = saved.integer(group_name(group, name)); });
    const std::string& shape = saved.text(group_name(group, "schedule.shape"));
    if (const auto known = schedule_shape(shape))
      groups[group].schedule.shape = *known;
    else
      faults.expect(false, "'", group_name(group, "schedule.shape"), "' is '", shape,
                    "', which is no schedule");
    const std::string& moments = saved.text(group_name(group, "moments"));
    faults.expect(moments == to_string(groups[group].moments), "'", group_name(group, "moments"), "' is ",
                  moments, ", expected ", to_string(groups[group].moments),
                  ": build the optimizer with the same");
  }
  if (!kernels_serve(state.slots.front().param.working))
    for (const Options& options : groups) check_options_for_device(options);
  faults.expect(saved.integer("steps") >= 0, "'steps' is ", saved.integer("steps"), ", expected a count");
  for (const Slot& slot : as_saved.slots) {
    const int64_t steps = saved.integer(param_name(slot, "steps"));
    faults.expect(steps >= 0, "'", param_name(slot, "steps"), "' is ", steps, ", expected a count");
    const int64_t group = saved.integer(param_name(slot, "group"));
    faults.expect(group == static_cast<int64_t>(slot.group), "'", slot.param.name, "' was in group ", group,
                  " and is in group ", slot.group);
    for_each_tensor(slot, [&](const char* name, const at::Tensor& tensor) {
      if (is_saved(slot, tensor))
        faults.expect_like(tensor_name(slot, name), saved.tensor(tensor_name(slot, name)), tensor);
    });
    // Blocks of 8-bit codes follow memory, not indices: under other strides a copy would part them from their
    // scales.
    for (const auto& [name, moment] :
         {std::pair{"first_moment", &slot.first}, std::pair{"second_moment", &slot.second}}) {
      if (!is_saved(slot, moment->scales)) continue;
      faults.expect(same_layout(saved.tensor(tensor_name(slot, name)), moment->values), "'",
                    tensor_name(slot, name), "' was saved with other strides than the ",
                    moment->values.strides(), " of this model");
    }
  }
  faults.throw_if_any(whose);
  for (const Options& options : groups) options.check();

  state.steps = saved.integer("steps");
  state.seed = static_cast<uint64_t>(saved.integer("seed"));
  state.groups = std::move(groups);
  state.slots = std::move(as_saved.slots);
  for (Slot& slot : state.slots) {
    slot.steps = saved.integer(param_name(slot, "steps"));
    for_each_tensor(slot, [&](const char* name, at::Tensor& tensor) {
      if (is_saved(slot, tensor)) tensor.copy_(saved.tensor(tensor_name(slot, name)));
    });
  }
}

template StateDict saved_form(const OptimizerState<AdamWOptions>&);
template StateDict saved_form(const OptimizerState<SgdOptions>&);
template void load(const StateDict&, OptimizerState<AdamWOptions>&);
template void load(const StateDict&, OptimizerState<SgdOptions>&);

}  // namespace halfstep::optim
