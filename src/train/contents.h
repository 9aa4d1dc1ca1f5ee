// Puts a model's buffers back when a step is skipped.
#pragma once

#include <halfstep/mixed_precision.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace halfstep::train {

using NamedBuffers = std::vector<std::pair<std::string, at::Tensor>>;

/// Forward changes buffers, such as a batch norm's running statistics, before anybody knows that the step
/// will be skipped: an overflow would stay in them for ever.
///
/// A copy of each buffer is kept. One of more than 65,536 elements that has not changed in the first step,
/// such as a mask, has none from then on, and is not put back if it changes later; on a device all have one.
class BufferGuard {
 public:
  /// `present`, if given, tells the tensors that the model has now: TorchScript assigns new ones.
  explicit BufferGuard(NamedBuffers buffers, std::function<NamedBuffers()> present = {});

  /// Before the first forward of a step: what the user changed since the last one is kept. Later calls in the
  /// same step do nothing. Without this call, in a loop that opens scopes of its own, a step begins where the
  /// last one ended.
  void begin_step();

  /// Puts back what changed since the step began if it was skipped.
  void end_step(bool skipped);
  /// The same where only the device knows; nothing is waited for, but for a buffer of another shape.
  void end_step_on_device(const GradSummary& grads);

  /// What was computed since the step began is thrown away, as by zero_grad, and the step goes on from its
  /// beginning: buffers that are not finite any more are put back at its end, even if it is not skipped.
  void abandon() { abandoned_ = step_begun_; }

  /// The next step begins here.
  void restart();

  /// What each buffer was when the step began; an undefined tensor for one that is not put back.
  at::Tensor at_start_of_step(std::size_t buffer) const { return copies_[buffer].values; }
  /// Goes on in a step that began with these values.
  void resume_step(const std::vector<at::Tensor>& at_start);

  const NamedBuffers& buffers() {
    find_present();
    return buffers_;
  }

 private:
  void find_present();
  void copy_buffers();

  struct Copy {
    at::Tensor values{};
    bool wanted = true;
  };

  NamedBuffers buffers_;
  std::function<NamedBuffers()> present_;
  std::vector<Copy> copies_;
  bool first_step_ = true, step_begun_ = false, abandoned_ = false;
};

/// A tensor under two names is one, under the first.
struct Contents {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  NamedBuffers buffers;
  std::vector<std::string> embeddings{};            // parameters of torch::nn::Embedding and its relatives
  std::function<NamedBuffers()> present_buffers{};  // where forward may put others in their place
};

/// An Error where there is no parameter, where two tensors have one name, and for gradients that will be
/// sparse.
Contents contents_of(const std::vector<NamedModel>& models);
Contents contents_of(const torch::jit::Module& model);
Contents contents_of(const std::vector<NamedParameter>& parameters);

}  // namespace halfstep::train
