// A program run through Halfstep. The interface knows only LibTorch, so that what compares does not see
// Halfstep.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "usage/oracle.h"

namespace usage {

/// What a step reported, and the gradients that it used.
struct StepResult {
  bool any = false, finite = true, stepped = false;
  std::string first_bad, reported_parameter;
  int64_t micro_batch = -1;
  double norm = 0;
  double loss_scale = 1;          ///< that the gradients carry
  double next_loss_scale = 1;     ///< after advance
  std::vector<at::Tensor> grads;  ///< scaled, as .grad was after inspect_grads; undefined without one
};

/// Thrown by the program itself, to be caught by it.
struct IntendedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Subject {
 public:
  explicit Subject(const Program& program);
  ~Subject();
  Subject(const Subject&) = delete;
  Subject& operator=(const Subject&) = delete;

  std::vector<std::string> parameter_names() const;
  Snapshot snapshot() const;
  /// Masters, moments, buffers: everything that a skipped step leaves alone.
  std::map<std::string, at::Tensor> state() const;

  /// An edit of one weight through the door of the event. Returns the parameters it wrote.
  struct Edited {
    std::vector<size_t> parameters;
    /// Values that were handed over in FP32, for doors that take them; else undefined, and the edit is what
    /// the model's tensor holds afterwards.
    std::vector<at::Tensor> given;
    bool kept = true;  ///< what was written in between was there to read
  };
  Edited edit(const Event& event, const std::string& scratch_file);
  void save_for_later(Action action, const std::string& scratch_file);
  Edited load_saved(Action action, const std::string& scratch_file);

  void set_trained(size_t parameter, bool trained);
  /// State into a fresh model, MixedPrecision and optimizer, which take the place of the old ones.
  void resume(bool module_state_last);
  at::Tensor evaluate(const Batch& batch);

  /// Runs the forward of a micro-batch, and backward in the scope where the program says so.
  void forward(const MicroBatch& micro_batch);
  /// Of the last forward.
  std::map<int, at::Tensor> masks() const;
  void backward(int bad_parameter = -1);  ///< a NaN from a hook of this parameter
  /// A forward (and backward) that throws inside layer `layer`; the exception is caught, gradients dropped.
  void throw_inside(const MicroBatch& micro_batch, int layer, bool in_backward);

  void write_grad(size_t parameter, double value);
  StepResult finish_step();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace usage
