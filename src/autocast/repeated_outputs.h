// Outputs that cost less to compute again than to keep, and what backward keeps of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/own_ops.h"
#include "tensor/saved_tensors.h"

namespace halfstep {

/// Operations of LibTorch's that are one pass over the elements and give the same bits each time: GELU, SiLU,
/// layer norm, RMS norm. Each keeps its own input for backward, so to compute its output again holds nothing
/// that is not held already.
bool is_cheap_to_repeat(std::string_view op);

/// How an output is made from its inputs. Holds no activation.
struct OutputRecipe {
  std::function<at::Tensor(OpArguments arguments)> run;
  c10::DispatchKey autocast_key;    // off while it runs
  std::vector<c10::IValue> others;  // arguments after the inputs
};

/// LibTorch's operation on an input of this type, for OutputRecipe::run.
std::function<at::Tensor(OpArguments arguments)> stock_run(const c10::OperatorHandle& op,
                                                           at::ScalarType input_type);

/// An output that backward computes again.
class RepeatableOutput {
 public:
  /// What some products take of it: all, or a view such as one time step.
  struct Part {
    int64_t users = 0, asked = 0;
    at::Tensor kept;
  };

  explicit RepeatableOutput(OutputRecipe recipe) : recipe_(std::move(recipe)) {}

  /// Somebody will ask for what lies at a place of the output, in this type. The part lives as long as this.
  Part& add_user(const StoragePlace& place, at::ScalarType type);

  /// The first who asks has the output computed; the parts of all are kept until the last of their users has
  /// asked. That is no more than forward would have kept, and T products of T views compute it once, not T
  /// times.
  at::Tensor compute(const std::vector<at::Tensor>& inputs, Part& part);

 private:
  at::Tensor whole(const std::vector<at::Tensor>& inputs) const;

  OutputRecipe recipe_;
  std::mutex mutex_;
  std::map<std::pair<StoragePlace, at::ScalarType>, Part> parts_;
};

/// Notes the last such output of this thread; a later one takes its place. Nothing is noted where nothing
/// would be kept, where an input is a parameter, which an optimizer may change unseen, or where no
/// AutocastScope was opened by this thread, as in a second run within backward: nobody would end the note.
/// `inputs` are as the caller gave them.
void note_output(OutputRecipe recipe, std::vector<at::Tensor> inputs, const at::Tensor& output);

/// Called by each AutocastScope. Ending one forgets what was noted.
void begin_notes();
void end_notes();

/// An argument that is the noted output, or a view of it, unchanged since.
struct NotedArgument {
  std::size_t index;
  at::Tensor given;                // before the policy cast it
  std::vector<at::Tensor> inputs;  // of the operation that made it
  std::shared_ptr<RepeatableOutput> output;
};

std::optional<NotedArgument> noted_argument(OpArguments arguments);

/// While it lives, backward keeps those inputs where it would keep the argument or its cast copy. Does
/// nothing in a region that will be replayed.
class RepeatedOutput {
 public:
  RepeatedOutput(std::optional<NotedArgument> argument, OpArguments cast_arguments);

 private:
  std::optional<SavedTensorScope> scope_;
};

}  // namespace halfstep
