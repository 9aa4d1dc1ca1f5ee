// Sums the gradients of micro-batches beside the parameters.
#pragma once

#include <halfstep/mixed_precision.h>

#include <memory>
#include <string>
#include <vector>

#include "distributed/grad_reducer.h"
#include "tensor/grad_squares.h"

namespace halfstep::train {

class GradAccumulator {
 public:
  /// With a reducer, sums are in its memory, and close() makes them those of all ranks.
  explicit GradAccumulator(Accumulation kind, std::shared_ptr<GradReducer> reducer = nullptr)
      : kind_(kind), reducer_(std::move(reducer)) {}

  /// Before each backward; on an accelerator with ranks only.
  void begin_backward(const std::vector<Param>& params);
  /// Checks the gradients that backward left, adds them to the sums and drops them. Those of a micro-batch
  /// that is not finite are dropped without being added.
  void add_micro_batch(const std::vector<Param>& params, double loss_scale);
  /// The same on an accelerator, without waiting: there they are added whatever they are, and the sum shows
  /// it.
  void add_micro_batch_on_device(const std::vector<Param>& params, const at::Tensor& loss_scale);

  /// With ranks: gradients may leave from here on.
  void begin_pieces() {
    reducer_->begin_pieces([this] { return begun(); });
  }
  /// With ranks: the gradient of parameter `i` is complete, in what may be the last micro-batch. It is added
  /// and dropped, and may travel while backward goes on.
  void add_last_of(const std::vector<Param>& params, std::size_t i, double loss_scale);

  /// Ends the step's micro-batches: the sums become the gradients of `updated`, to be read and dropped as
  /// any. Those are `params`, or this rank's parts of them. `largest`, with ranks: numbers of which each
  /// becomes the largest of all ranks'.
  void close(const std::vector<Param>& params, const std::vector<Param>& updated,
             std::vector<int32_t>* largest = nullptr);
  bool closed() const { return closed_; }
  /// Of this step, so far.
  int64_t micro_batches() const { return micro_batches_; }

  /// Of the closed sums. It says which micro-batch was bad, if one was. Of parts of parameters, all ranks
  /// ask.
  GradSummary summary(const std::vector<Param>& updated, double loss_scale, GradDetail detail) const;
  GradSummary summary_on_device(const std::vector<Param>& params, const at::Tensor& loss_scale,
                                GradDetail detail) const;
  /// What an accelerator knows of this step's micro-batches. Waits.
  void read_micro_batches();
  /// Whether a bad micro-batch is known to the host: the step will be skipped.
  bool has_bad_micro_batch() const { return bad_micro_batch_ >= 0; }
  GradSummary bad_summary(double loss_scale) const;

  /// The next micro-batch starts a new sum.
  void begin_step();

  /// The sum so far; empty between steps, and once the sum is closed.
  StateDict live_form(const std::vector<Param>& params) const;
  /// Goes on from a saved sum, or throws an Error that lists all that does not fit and changes nothing.
  void load(const StateDict& saved, const std::vector<Param>& params);

 private:
  struct Sum {
    at::Tensor values;           // FP32, or BF16
    at::Tensor compensation;     // BF16, with Accumulation::Bf16Kahan
    bool begun = false;          // in this step; in a tree, in this micro-batch,
    bool begun_in_step = false;  // and in an earlier one
  };

  /// Which parameters have a gradient to add; of sums that have left, it is added later.
  std::vector<std::size_t> to_add_of(const std::vector<Param>& params);
  void add(const std::vector<Param>& params, const std::vector<std::size_t>& which);
  void add_on_device(const std::vector<Param>& params, const std::vector<std::size_t>& which);
  void end_micro_batch(const std::vector<Param>& params);
  void agree_on_device(at::Device device);
  void sum_over_ranks(const std::vector<Param>& params, std::vector<int32_t>* largest);
  void note_bad(const GradSummary& micro_batch);
  void make_sum(std::size_t i, const Param& param);
  std::vector<char> begun() const;
  GradSquares squares_of_parts(const std::vector<Param>& updated) const;

  Accumulation kind_;
  std::shared_ptr<GradReducer> reducer_;
  std::vector<Sum> sums_;  // one for each parameter, made when it first has a gradient
  int64_t micro_batches_ = 0;
  int64_t bad_micro_batch_ = -1;  // the first one
  std::string bad_parameter_;
  int bad_rank_ = -1;
  std::vector<GradSummary> on_device_;  // of each micro-batch of this step that was not read
  int64_t first_on_device_ = 0;         // which one the first of them is
  at::Tensor bad_on_any_rank_;          // on the accelerator, with ranks: not 0 where the step is skipped
  bool closed_ = false;
};

}  // namespace halfstep::train
