// Sums gradients over ranks, while backward still runs.
#pragma once

#include <halfstep/params.h>
#include <halfstep/ranks.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distributed/shard_layout.h"

namespace halfstep {

struct GradReducerOptions {
  c10::ScalarType type = at::kFloat;  ///< in which sums travel
  /// Above 0: how many micro-batches all ranks have together in a step. They are then added in the order of
  /// one fixed tree, whoever computed them.
  int64_t canonical_batches = 0;
  int64_t bucket_bytes = 25 << 20;
  /// Each rank gets its parts of the sums only; a group is a bucket.
  std::shared_ptr<const ShardLayout> shards{};
  /// And keeps no other: the sums of a micro-batch leave with it.
  bool keeps_parts_only = false;
};

/// What the ranks know of a step together.
struct GradAgreement {
  bool finite = true;
  int rank = -1;  ///< the first that has something that is not finite, and what and where:
  int64_t micro_batch = -1;
  std::size_t param = 0;
  std::vector<char> any_grad;    ///< by parameter: whether a rank has a gradient for it
  std::vector<int32_t> largest;  ///< of what was given, over all ranks
};

/// FP32 memory for the sum of each parameter's gradients, in buckets that travel as one. Buckets go in one
/// order on all ranks, the last parameters first: backward is done with them first. Where parts only are kept
/// a bucket has memory from its first gradient until it has arrived, and few are on their way at a time.
class GradReducer {
 public:
  GradReducer(Ranks ranks, GradReducerOptions options);
  ~GradReducer();
  GradReducer(const GradReducer&) = delete;
  GradReducer& operator=(const GradReducer&) = delete;
  /// The Errors of the constructor.
  static void check(const Ranks& ranks, const GradReducerOptions& options);

  bool canonical() const { return options_.canonical_batches > 0; }
  const Ranks& ranks() const { return ranks_; }
  bool has_parts() const { return options_.shards != nullptr; }
  RankShare my_share() const { return ranks_.share(options_.canonical_batches); }

  /// Before a step's first gradient: the parameters that require one have memory from here on.
  void begin_step(const std::vector<Param>& params);
  /// Before each backward.
  void begin_micro_batch();
  /// Sums may leave from here on, bucket by bucket. `begun`: by parameter, whether it has a gradient; asked
  /// where another exchange comes before this step's end.
  void begin_pieces(std::function<std::vector<char>()> begun);
  /// Where the gradients of parameter `i` are added up on this rank, laid out as the parameter; undefined for
  /// one that did not require a gradient when the step began.
  at::Tensor sum_of(std::size_t i);
  /// After finish(): of all ranks. With shards, this rank's part.
  at::Tensor result_of(std::size_t i);
  bool sends_each_micro_batch() const { return options_.keeps_parts_only && !canonical(); }

  /// Whether the sum of `i` is on its way already: what comes later is added by add_late.
  bool is_sent(std::size_t i) const;
  /// The sum of `i` is complete on this rank.
  void ready(std::size_t i, bool begun);
  void add_late(std::size_t i, const at::Tensor& grad);

  /// A micro-batch is complete; with `canonical` its sum is a leaf of the tree.
  void end_micro_batch(const std::vector<char>& begun);

  /// What one rank knows of its micro-batches at the end of a step.
  struct Found {
    bool finite = true;
    int64_t micro_batch = -1;
    std::size_t param = 0;
    std::vector<char> begun;       ///< by parameter: whether it has a gradient
    std::vector<int32_t> largest;  ///< to be agreed on: the largest of all ranks'
  };
  /// Sends what was not sent, and waits for all: result_of(i) is then that of all ranks.
  GradAgreement finish(const Found& found);
  /// This rank leaves the step. Where sums are on their way, the others cannot be caught up with.
  void drop_step();

 private:
  struct Bucket {
    std::vector<std::size_t> params;  // in the order of their memory
    int64_t elements = 0;
    at::Tensor flat;              // FP32
    at::Tensor travelling;        // `flat`, or its values in another type
    at::Tensor part;              // with shards, FP32: of the sum of all ranks, in `flat` or beside it
    std::size_t waiting_for = 0;  // parameters whose sum is not complete
    bool sent = false, received = false;
    Ranks::Pending pending;
  };
  struct Place {
    std::size_t bucket = 0;
    int64_t first_element = 0;
    std::vector<int64_t> sizes, strides;
    bool used = false;
    bool is_ready = false;
    at::Tensor late;
  };
  struct Node {  // of the tree: the sum of leaves [first, first + count), as flats of all buckets
    int64_t first = 0, count = 0;
    std::vector<at::Tensor> flats;
  };

  at::Tensor zeros(at::IntArrayRef sizes) const;  // FP32, where the parameters are
  void lay_out(const std::vector<Param>& params);
  void lay_out_buckets(const std::vector<Param>& params);
  void send_complete_buckets();
  void send(std::size_t bucket);
  void receive(Bucket& bucket);
  void receive_all();
  at::Tensor in_bucket(std::size_t i);
  void add_to_part(std::size_t i, const at::Tensor& sum);
  void add_late_sums(const std::vector<char>& late);
  void sum_tree();
  void check_whole() const;

  Ranks ranks_;
  GradReducerOptions options_;
  at::Device device_{at::kCPU};
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;
  std::vector<char> laid_out_for_;  // which parameters required a gradient
  std::vector<Node> nodes_;
  std::size_t next_bucket_ = 0;
  int64_t leaves_ = 0;
  bool parts_begun_ = false;  // in this step
  bool broken_ = false;
};

}  // namespace halfstep
