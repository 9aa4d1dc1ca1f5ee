#include "distributed/grad_reducer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <halfstep/error.h>
#include <halfstep/memory.h>

#include <algorithm>
#include <utility>

#include "tensor/dense.h"

namespace halfstep {
namespace {

// One number for "rank, micro-batch, parameter" of which the largest is that of the first rank: 0 where all
// is finite.
constexpr int kParamBits = 24, kBatchBits = 20;
constexpr int64_t kMostParams = (int64_t{1} << kParamBits) - 1, kMostBatches = (int64_t{1} << kBatchBits) - 2;

int64_t key_of(const GradReducer::Found& found, int rank, int ranks) {
  if (found.finite) return 0;
  const int64_t batch = std::min(found.micro_batch + 1, kMostBatches);  // from 0, where there is none
  const int64_t param = std::min(static_cast<int64_t>(found.param), kMostParams);
  return (((int64_t{ranks - rank} << kBatchBits) | batch) << kParamBits) | param;
}

void read_key(int64_t key, int ranks, GradAgreement& agreed) {
  agreed.finite = key == 0;
  if (agreed.finite) return;
  agreed.param = static_cast<std::size_t>(key & kMostParams);
  agreed.micro_batch = ((key >> kParamBits) & ((int64_t{1} << kBatchBits) - 1)) - 1;
  agreed.rank = ranks - static_cast<int>(key >> (kParamBits + kBatchBits));
}

/// Merges the last two of a list of aligned runs while they are halves of one.
template <typename Node, typename Add>
void merge_halves(std::vector<Node>& nodes, Add add) {
  while (nodes.size() >= 2) {
    Node &left = nodes[nodes.size() - 2], &right = nodes.back();
    if (left.count != right.count || left.first % (2 * left.count) != 0) return;
    add(left, right);
    left.count *= 2;
    nodes.pop_back();
  }
}

}  // namespace

GradReducer::GradReducer(Ranks ranks, GradReducerOptions options)
    : ranks_(std::move(ranks)), options_(options) {
  HALFSTEP_CHECK(!canonical() || options_.canonical_batches >= ranks_.size(),
                 "MixedPrecision: a canonical sum of ", options_.canonical_batches,
                 " micro-batches in a step for ", ranks_.size(), " ranks. Each rank needs one at least.");
  HALFSTEP_CHECK(!canonical() || options_.type == at::kFloat,
                 "MixedPrecision: a canonical sum travels in FP32, not in ", options_.type, ".");
  HALFSTEP_CHECK(options_.type == at::kFloat || options_.type == at::kBFloat16 || options_.type == at::kHalf,
                 "MixedPrecision: sums over ranks travel in FP32, BF16 or FP16, not in ", options_.type, ".");
}

void GradReducer::check_whole() const {
  if (!broken_) return;
  throw RankError(
      detail::concat(
          "rank ", ranks_.rank(), " of ", ranks_.size(),
          " has left a step whose sums were on their way to the others, by an exception in backward "
          "or by zero_grad: they wait for sums that will not come. End this process."),
      {ranks_.rank()});
}

void GradReducer::begin_step(const std::vector<Param>& params) {
  check_whole();
  bool fits = laid_out_for_.size() == params.size();
  for (std::size_t i = 0; fits && i < params.size(); ++i) {
    const at::Tensor& working = params[i].working;
    fits = laid_out_for_[i] == static_cast<char>(working.requires_grad()) &&
           (!places_[i].used || same_layout(places_[i].sum, working));
  }
  if (!fits) lay_out(params);
  for (Place& place : places_) place.is_ready = false, place.late = at::Tensor();
  for (Bucket& bucket : buckets_) bucket.waiting_for = bucket.params.size(), bucket.sent = false;
  next_bucket_ = 0;
  nodes_.clear();
  leaves_ = 0;
}

void GradReducer::lay_out(const std::vector<Param>& params) {
  HALFSTEP_CHECK(static_cast<int64_t>(params.size()) <= kMostParams, "MixedPrecision: ", params.size(),
                 " parameters; with ranks up to ", kMostParams, " are supported.");
  const MemoryClassScope memory(MemoryClass::Gradient);
  constexpr int64_t kAlignment = 16;  // elements: a cache line
  buckets_.clear();
  places_.assign(params.size(), Place{});
  laid_out_for_.resize(params.size());
  std::vector<int64_t> elements;  // of each bucket
  const int64_t most = std::max<int64_t>(1, options_.bucket_bytes / 4);
  for (std::size_t i = params.size(); i-- > 0;) {
    const at::Tensor& working = params[i].working;
    laid_out_for_[i] = static_cast<char>(working.requires_grad());
    if (!working.requires_grad()) continue;
    if (buckets_.empty() || elements.back() + working.numel() > most)
      buckets_.emplace_back(), elements.push_back(0);
    places_[i] = {.bucket = buckets_.size() - 1,
                  .first_element = elements.back(),
                  .used = true,
                  .is_ready = false,
                  .sum = {},
                  .late = {}};
    buckets_.back().params.push_back(i);
    elements.back() += (working.numel() + kAlignment - 1) / kAlignment * kAlignment;
  }
  const auto options = params.front().working.options().requires_grad(false).dtype(at::kFloat);
  for (std::size_t b = 0; b < buckets_.size(); ++b) buckets_[b].flat = at::zeros({elements[b]}, options);
  for (std::size_t i = 0; i < params.size(); ++i)
    if (places_[i].used)
      places_[i].sum = buckets_[places_[i].bucket].flat.as_strided(
          params[i].working.sizes(), params[i].working.strides(), places_[i].first_element);
}

at::Tensor GradReducer::sum_of(std::size_t i) const { return places_[i].sum; }

bool GradReducer::is_sent(std::size_t i) const { return places_[i].used && buckets_[places_[i].bucket].sent; }

void GradReducer::ready(std::size_t i, bool begun) {
  Place& place = places_[i];
  if (!place.used || place.is_ready) return;
  place.is_ready = true;
  if (!begun) place.sum.zero_();
  --buckets_[place.bucket].waiting_for;
  if (!canonical()) send_complete_buckets();
}

void GradReducer::send_complete_buckets() {
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].waiting_for == 0) send(next_bucket_++);
}

void GradReducer::send(std::size_t number) {
  Bucket& bucket = buckets_[number];
  bucket.sent = true;
  const MemoryClassScope memory(MemoryClass::Gradient);
  bucket.travelling = options_.type == at::kFloat ? bucket.flat : bucket.flat.to(options_.type);
  bucket.pending = ranks_.begin_sum(
      bucket.travelling, detail::concat("the sum of gradients, part ", number + 1, " of ", buckets_.size()));
}

void GradReducer::receive(Bucket& bucket) {
  bucket.pending.wait();
  if (options_.type != at::kFloat) bucket.flat.copy_(bucket.travelling);
  bucket.travelling = at::Tensor();
}

void GradReducer::add_late(std::size_t i, const at::Tensor& grad) {
  at::Tensor& late = places_[i].late;
  if (late.defined())
    late.add_(grad);
  else
    late = grad.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous();
}

void GradReducer::end_micro_batch(const std::vector<char>& begun) {
  ++leaves_;
  if (!canonical()) return;
  const RankShare mine = my_share();
  HALFSTEP_CHECK(leaves_ <= mine.count, "MixedPrecision: rank ", ranks_.rank(), " of ", ranks_.size(),
                 " has more than its ", mine.count, " of the ", options_.canonical_batches,
                 " micro-batches of a step.");
  for (std::size_t i = 0; i < places_.size(); ++i)
    if (places_[i].used && !begun[i]) places_[i].sum.zero_();
  Node leaf{.first = mine.first + leaves_ - 1, .count = 1, .flats = {}};
  for (const Bucket& bucket : buckets_) leaf.flats.push_back(bucket.flat.clone());
  nodes_.push_back(std::move(leaf));
  merge_halves(nodes_, [](Node& left, const Node& right) {
    for (std::size_t b = 0; b < left.flats.size(); ++b) left.flats[b].add_(right.flats[b]);
  });
}

void GradReducer::sum_tree() {
  struct Run {
    int64_t first = 0, count = 0;
  };
  std::vector<Node> all;
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    // The runs that a rank has made of its leaves are known to all.
    std::vector<Run> runs;
    const RankShare share = ranks_.share(options_.canonical_batches, rank);
    for (int64_t leaf = share.first; leaf < share.first + share.count; ++leaf) {
      runs.push_back({leaf, 1});
      merge_halves(runs, [](Run&, Run&) {});
    }
    for (std::size_t r = 0; r < runs.size(); ++r) {
      Node node{.first = runs[r].first, .count = runs[r].count, .flats = {}};
      for (std::size_t b = 0; b < buckets_.size(); ++b) {
        at::Tensor flat = rank == ranks_.rank() ? nodes_[r].flats[b] : at::empty_like(buckets_[b].flat);
        ranks_.broadcast(flat, rank);
        node.flats.push_back(std::move(flat));
      }
      all.push_back(std::move(node));
      merge_halves(all, [](Node& left, const Node& right) {
        for (std::size_t b = 0; b < left.flats.size(); ++b) left.flats[b].add_(right.flats[b]);
      });
    }
  }
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    buckets_[b].flat.copy_(all[0].flats[b]);
    for (std::size_t n = 1; n < all.size(); ++n) buckets_[b].flat.add_(all[n].flats[b]);
  }
  nodes_.clear();
}

GradAgreement GradReducer::finish(const Found& found) {
  check_whole();
  const auto count = static_cast<int64_t>(places_.size());
  if (canonical()) {
    const RankShare mine = my_share();
    HALFSTEP_CHECK(leaves_ == mine.count, "MixedPrecision: rank ", ranks_.rank(), " of ", ranks_.size(),
                   " closes a step after ", leaves_, " of its ", mine.count, " micro-batches (of ",
                   options_.canonical_batches, " in all).");
  }
  for (std::size_t i = 0; i < places_.size(); ++i) ready(i, canonical() || found.begun[i]);
  const auto extra = static_cast<int64_t>(found.largest.size());
  const at::Tensor message = at::zeros({1 + 2 * count + extra}, at::kLong);
  auto* numbers = message.mutable_data_ptr<int64_t>();
  numbers[0] = key_of(found, ranks_.rank(), ranks_.size());
  for (int64_t i = 0; i < count; ++i) {
    numbers[1 + i] = found.begun[i];
    numbers[1 + count + i] = places_[i].late.defined();
  }
  std::copy(found.largest.begin(), found.largest.end(), numbers + 1 + 2 * count);
  ranks_.largest(message);
  GradAgreement agreed;
  read_key(numbers[0], ranks_.size(), agreed);
  agreed.any_grad.assign(numbers + 1, numbers + 1 + count);
  const std::vector<char> late(numbers + 1 + count, numbers + 1 + 2 * count);
  agreed.largest.assign(numbers + 1 + 2 * count, numbers + 1 + 2 * count + extra);
  if (canonical()) {
    sum_tree();
  } else {
    for (Bucket& bucket : buckets_) receive(bucket);
    add_late_sums(late);
  }
  for (Bucket& bucket : buckets_) bucket.sent = false;
  next_bucket_ = buckets_.size();
  return agreed;
}

void GradReducer::add_late_sums(const std::vector<char>& late) {
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (!late[i]) continue;
    Place& place = places_[i];
    at::Tensor sum = place.late.defined() ? place.late : at::zeros(place.sum.sizes(), place.sum.options());
    ranks_.sum(sum);
    place.sum.add_(sum);
    place.late = at::Tensor();
  }
}

void GradReducer::drop_step() {
  for (const Bucket& bucket : buckets_) broken_ |= bucket.sent;
  nodes_.clear();
  leaves_ = 0;
}

}  // namespace halfstep
