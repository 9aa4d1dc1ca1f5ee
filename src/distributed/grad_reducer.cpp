#include "distributed/grad_reducer.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
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

void GradReducer::check(const Ranks& ranks, const GradReducerOptions& options) {
  const bool canonical = options.canonical_batches > 0;
  HALFSTEP_CHECK(!canonical || options.canonical_batches >= ranks.size(),
                 "MixedPrecision: a canonical sum of ", options.canonical_batches,
                 " micro-batches in a step for ", ranks.size(), " ranks. Each rank needs one at least.");
  HALFSTEP_CHECK(!canonical || options.type == at::kFloat,
                 "MixedPrecision: a canonical sum travels in FP32, not in ", options.type, ".");
  HALFSTEP_CHECK(options.type == at::kFloat || options.type == at::kBFloat16 || options.type == at::kHalf,
                 "MixedPrecision: sums over ranks travel in FP32, BF16 or FP16, not in ", options.type, ".");
}

GradReducer::GradReducer(Ranks ranks, GradReducerOptions options)
    : ranks_(std::move(ranks)), options_(std::move(options)) {
  check(ranks_, options_);
}

void GradReducer::check_whole() const {
  if (!broken_) return;
  throw RankError(
      detail::concat("rank ", ranks_.rank(), " of ", ranks_.size(),
                     " left a step while the other ranks were receiving its sums, by an exception in "
                     "backward or by zero_grad: they wait for sums that will not come. End this process."),
      {ranks_.rank()});
}

void GradReducer::begin_step(const std::vector<Param>& params) {
  check_whole();
  bool fits = laid_out_for_.size() == params.size();
  for (std::size_t i = 0; fits && i < params.size(); ++i) {
    const at::Tensor& working = params[i].working;
    fits = laid_out_for_[i] == static_cast<char>(working.requires_grad()) &&
           working.sizes() == at::IntArrayRef(places_[i].sizes) &&
           working.strides() == at::IntArrayRef(places_[i].strides);
  }
  if (!fits) lay_out(params);
  for (Place& place : places_) place.late = at::Tensor();
  nodes_.clear();
  leaves_ = 0;
  parts_begun_ = false;
  begin_micro_batch();
}

void GradReducer::begin_micro_batch() {
  if (leaves_ > 0 && !sends_each_micro_batch()) return;
  for (Place& place : places_) place.is_ready = false;
  for (Bucket& bucket : buckets_) {
    bucket.waiting_for = static_cast<std::size_t>(
        std::ranges::count_if(bucket.params, [&](std::size_t i) { return places_[i].used; }));
    bucket.sent = bucket.received = false;
  }
  next_bucket_ = 0;
}

at::Tensor GradReducer::zeros(at::IntArrayRef sizes) const {
  return at::zeros(sizes, at::TensorOptions(device_).dtype(at::kFloat));
}

void GradReducer::lay_out(const std::vector<Param>& params) {
  HALFSTEP_CHECK(static_cast<int64_t>(params.size()) <= kMostParams, "MixedPrecision: ", params.size(),
                 " parameters; with ranks up to ", kMostParams, " are supported.");
  buckets_.clear();
  if (!params.empty()) device_ = params.front().working.device();
  places_.assign(params.size(), Place{});
  laid_out_for_.resize(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& working = params[i].working;
    laid_out_for_[i] = static_cast<char>(working.requires_grad());
    places_[i].used = working.requires_grad();
    places_[i].sizes = working.sizes().vec();
    places_[i].strides = working.strides().vec();
  }
  lay_out_buckets(params);
  const MemoryClassScope memory(MemoryClass::Gradient);
  for (Bucket& bucket : buckets_) {
    if (!sends_each_micro_batch()) bucket.flat = zeros({bucket.elements});
    if (!options_.shards) continue;
    const int64_t run = bucket.elements / ranks_.size();
    bucket.part = sends_each_micro_batch() ? zeros({run}) : bucket.flat.narrow(0, run * ranks_.rank(), run);
  }
}

void GradReducer::lay_out_buckets(const std::vector<Param>& params) {
  if (options_.shards) {
    const ShardLayout& shards = *options_.shards;
    for (std::size_t group = 0; group < shards.groups.size(); ++group) {
      Bucket& bucket = buckets_.emplace_back();
      bucket.params = shards.groups[group].params;
      bucket.elements = shards.elements_of(group);
    }
    for (std::size_t i = 0; i < places_.size(); ++i) {
      places_[i].bucket = shards.places[i].group;
      places_[i].first_element = shards.places[i].first_element;
    }
    return;
  }
  constexpr int64_t kAlignment = 16;  // elements: a cache line
  const int64_t most = std::max<int64_t>(1, options_.bucket_bytes / 4);
  for (std::size_t i = params.size(); i-- > 0;) {
    const int64_t elements = params[i].working.numel();
    if (!places_[i].used) continue;
    if (buckets_.empty() || buckets_.back().elements + elements > most) buckets_.emplace_back();
    Bucket& bucket = buckets_.back();
    places_[i].bucket = buckets_.size() - 1;
    places_[i].first_element = bucket.elements;
    bucket.params.push_back(i);
    bucket.elements += (elements + kAlignment - 1) / kAlignment * kAlignment;
  }
}

at::Tensor GradReducer::in_bucket(std::size_t i) {
  const Place& place = places_[i];
  Bucket& bucket = buckets_[place.bucket];
  if (!bucket.flat.defined()) {
    const MemoryClassScope memory(MemoryClass::Gradient);
    bucket.flat = zeros({bucket.elements});
  }
  return bucket.flat.as_strided(place.sizes, place.strides, place.first_element);
}

at::Tensor GradReducer::sum_of(std::size_t i) { return places_[i].used ? in_bucket(i) : at::Tensor(); }

at::Tensor GradReducer::result_of(std::size_t i) {
  if (!options_.shards) return sum_of(i);
  const Place& place = places_[i];
  const Bucket& bucket = buckets_[place.bucket];
  if (options_.shards->places[i].elements == 0) return zeros(place.sizes);
  const ShardLayout::Part part = options_.shards->part_of(i, ranks_.rank());
  const int64_t run = bucket.part.numel() * ranks_.rank();  // begins there
  return bucket.part.narrow(0, part.elements > 0 ? place.first_element + part.first_element - run : 0,
                            part.elements);
}

bool GradReducer::is_sent(std::size_t i) const { return places_[i].used && buckets_[places_[i].bucket].sent; }

void GradReducer::ready(std::size_t i, bool begun) {
  Place& place = places_[i];
  if (!place.used || place.is_ready) return;
  place.is_ready = true;
  // Memory that is made for one micro-batch is zero before its first gradient.
  if (!begun && !sends_each_micro_batch()) sum_of(i).zero_();
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
  if (!bucket.flat.defined()) bucket.flat = zeros({bucket.elements});  // no gradient in it
  bucket.travelling = options_.type == at::kFloat ? bucket.flat : bucket.flat.to(options_.type);
  const std::string what = detail::concat("the sum of gradients, part ", number + 1, " of ", buckets_.size());
  if (sends_each_micro_batch()) bucket.flat = at::Tensor();  // `travelling` has it, or its values
  // For parts too: Gloo's sum that gives each rank a part is slower than the one that gives all to all
  // (LibTorch 2.13), and copies what it is given.
  bucket.pending = ranks_.begin_sum(bucket.travelling, what, this);
  constexpr std::size_t kMostOnTheirWay = 2;
  if (sends_each_micro_batch() && number >= kMostOnTheirWay) receive(buckets_[number - kMostOnTheirWay]);
}

void GradReducer::receive(Bucket& bucket) {
  if (bucket.received) return;
  bucket.received = true;
  bucket.pending.wait();
  if (sends_each_micro_batch()) {
    const int64_t run = bucket.part.numel();
    const at::Tensor arrived = bucket.travelling.narrow(0, run * ranks_.rank(), run);
    parts_begun_ ? bucket.part.add_(arrived) : bucket.part.copy_(arrived);
  } else if (options_.type != at::kFloat) {
    bucket.flat.copy_(bucket.travelling);
  }
  bucket.travelling = at::Tensor();
}

void GradReducer::receive_all() {
  for (Bucket& bucket : buckets_) receive(bucket);
  for (Bucket& bucket : buckets_) bucket.sent = false;
  parts_begun_ = true;
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
  if (sends_each_micro_batch()) {
    for (std::size_t i = 0; i < places_.size(); ++i) ready(i, begun[i]);
    send_complete_buckets();  // one whose parameters are all frozen waits for none
    receive_all();
  }
  if (!canonical()) return;
  const RankShare mine = my_share();
  HALFSTEP_CHECK(leaves_ <= mine.count, "MixedPrecision: rank ", ranks_.rank(), " of ", ranks_.size(),
                 " has more than its ", mine.count, " of the ", options_.canonical_batches,
                 " micro-batches of a step.");
  for (std::size_t i = 0; i < places_.size(); ++i)
    if (places_[i].used && !begun[i]) sum_of(i).zero_();
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
  if (sends_each_micro_batch() && leaves_ == 0) end_micro_batch(std::vector<char>(places_.size(), 0));
  if (!sends_each_micro_batch()) {
    for (std::size_t i = 0; i < places_.size(); ++i) ready(i, canonical() || found.begun[i]);
    if (!canonical()) send_complete_buckets();
  }
  ranks_.end_pieces(this);
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
    if (!sends_each_micro_batch()) receive_all();
    add_late_sums(late);
  }
  next_bucket_ = buckets_.size();
  return agreed;
}

void GradReducer::add_late_sums(const std::vector<char>& late) {
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (!late[i]) continue;
    Place& place = places_[i];
    at::Tensor sum = place.late.defined() ? place.late : zeros(place.sizes);
    ranks_.sum(sum);
    if (options_.shards)
      add_to_part(i, sum);
    else
      sum_of(i).add_(sum);
    place.late = at::Tensor();
  }
}

void GradReducer::add_to_part(std::size_t i, const at::Tensor& sum) {
  const Place& place = places_[i];
  const at::Tensor laid_out = at::empty_strided(place.sizes, place.strides, sum.options()).copy_(sum);
  const ShardLayout::Part part = options_.shards->part_of(i, ranks_.rank());
  result_of(i).add_(laid_out.as_strided({part.elements}, {1}, part.first_element));
}

void GradReducer::begin_pieces(std::function<std::vector<char>()> begun) {
  if (sends_each_micro_batch() || canonical()) return;
  ranks_.begin_pieces(this, [this, begun = std::move(begun)] {
    const std::vector<char> flags = begun();
    for (std::size_t i = 0; i < places_.size(); ++i) ready(i, i < flags.size() && flags[i]);
    send_complete_buckets();
  });
}

GradReducer::~GradReducer() { ranks_.end_pieces(this); }

void GradReducer::drop_step() {
  ranks_.end_pieces(this);
  for (const Bucket& bucket : buckets_) broken_ |= bucket.sent;
  nodes_.clear();
  leaves_ = 0;
}

}  // namespace halfstep
