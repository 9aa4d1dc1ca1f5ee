#include "forecast/choice.h"

#include <halfstep/error.h>

#include <algorithm>

namespace halfstep::forecast {
namespace {

/// More than a device of today can hold.
constexpr int64_t kMostSequences = int64_t{1} << 24;

/// What is tried of 1 to `most`: powers of two, and `most` itself.
std::vector<int64_t> tried_up_to(int64_t most) {
  std::vector<int64_t> sizes;
  for (int64_t size = 1; size < most; size *= 2) sizes.push_back(size);
  if (most > 0) sizes.push_back(most);
  return sizes;
}

/// With as many micro-batches as make the batch; nothing if none do.
std::optional<Arrangement> with_micro_batch(Arrangement arrangement, int64_t micro_batch,
                                            const std::optional<int64_t>& batch) {
  arrangement.micro_batch = micro_batch;
  if (!batch) return arrangement;
  const int64_t of_rank = *batch / arrangement.ranks;
  if (of_rank % micro_batch != 0) return std::nullopt;
  arrangement.accumulation = of_rank / micro_batch;
  return arrangement;
}

}  // namespace

Outcome outcome_of(const ModelShape& shape, const PrecisionPlan& precision, const Arrangement& arrangement,
                   const Device& device) {
  Outcome outcome{.arrangement = arrangement,
                  .memory = memory_per_rank(shape, precision, arrangement, device),
                  .time = step_time(shape, precision, arrangement, device)};
  outcome.fits = outcome.memory.bytes() <= device.usable_bytes();
  const auto tokens = static_cast<double>(arrangement.step_tokens());
  outcome.tokens_per_second_per_device =
      tokens / outcome.time.total() / static_cast<double>(arrangement.ranks);
  if (device.bf16_peak_flops > 0)
    outcome.share_of_peak = outcome.tokens_per_second_per_device *
                            shape.flops_per_token(arrangement.sequence_length) / device.bf16_peak_flops;
  return outcome;
}

int64_t largest_micro_batch(const ModelShape& shape, const PrecisionPlan& precision,
                            const Arrangement& arrangement, const Device& device) {
  const auto fits = [&](int64_t micro_batch) {
    Arrangement tried = arrangement;
    tried.micro_batch = micro_batch;
    return memory_per_rank(shape, precision, tried, device).bytes() <= device.usable_bytes();
  };
  if (!fits(1)) return 0;
  int64_t good = 1, bad = 2;
  while (bad < kMostSequences && fits(bad)) good = bad, bad *= 2;
  while (bad - good > 1) {
    const int64_t middle = good + (bad - good) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good;
}

std::vector<Outcome> best_of_each_sharding(const ModelShape& shape, const PrecisionPlan& precision,
                                           const Question& question, const Device& device) {
  HALFSTEP_CHECK(!question.batch || *question.batch % question.ranks == 0, "a batch of ", *question.batch,
                 " sequences cannot be divided by ", question.ranks, " ranks.");
  if (question.batch && question.micro_batch)
    HALFSTEP_CHECK(*question.batch / question.ranks % *question.micro_batch == 0, "the ",
                   *question.batch / question.ranks, " sequences that each of ", question.ranks,
                   " ranks has of a batch of ", *question.batch, " cannot be divided into micro-batches of ",
                   *question.micro_batch, ".");
  std::vector<Outcome> outcomes;
  for (const auto& [word, sharding] : kShardings) {
    if (question.sharding && *question.sharding != sharding) continue;
    if (question.ranks == 1 && sharding != question.sharding.value_or(Sharding::None)) continue;
    std::optional<Outcome> best, smallest;
    for (const bool recomputes : {false, true}) {
      if (question.recomputes_blocks && *question.recomputes_blocks != recomputes) continue;
      Arrangement arrangement{.ranks = question.ranks,
                              .sharding = sharding,
                              .sequence_length = question.sequence_length,
                              .recomputes_blocks = recomputes,
                              .summed_bytes = question.summed_bytes,
                              .packs_weights = question.packs_weights};
      if (question.batch) arrangement.accumulation = 2;  // sums, if there may be any
      const int64_t most = question.batch ? *question.batch / question.ranks : kMostSequences;
      const int64_t largest = std::min(most, largest_micro_batch(shape, precision, arrangement, device));
      const std::vector<int64_t> sizes = question.micro_batch ? std::vector{*question.micro_batch}
                                                              : tried_up_to(std::max<int64_t>(largest, 1));
      for (const int64_t micro_batch : sizes) {
        const auto tried = with_micro_batch(arrangement, micro_batch, question.batch);
        if (!tried) continue;
        const Outcome outcome = outcome_of(shape, precision, *tried, device);
        if (!smallest || outcome.memory.bytes() < smallest->memory.bytes()) smallest = outcome;
        if (outcome.fits &&
            (!best || outcome.tokens_per_second_per_device > best->tokens_per_second_per_device))
          best = outcome;
      }
    }
    outcomes.push_back(best ? *best : smallest.value());
  }
  return outcomes;
}

const Outcome* cheapest(const std::vector<Outcome>& outcomes) {
  constexpr double kMargin = 1.001;
  const Outcome* best = nullptr;
  for (const Outcome& outcome : outcomes)
    if (outcome.fits && (best == nullptr ||
                         outcome.tokens_per_second_per_device > kMargin * best->tokens_per_second_per_device))
      best = &outcome;
  return best;
}

}  // namespace halfstep::forecast
