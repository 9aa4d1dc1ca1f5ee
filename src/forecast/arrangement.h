// How a model is trained on many ranks: what a forecast is asked about.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>

namespace halfstep::forecast {

/// Of what each rank keeps a part instead of all.
enum class Sharding {
  None,       ///< every rank has all of it
  States,     ///< masters and moments in parts; weights are gathered after each update
  Gradients,  ///< sums of gradients too, so that each micro-batch is summed over ranks
  Weights,    ///< the weights too, gathered block by block while they are used
};
inline constexpr std::array<std::pair<std::string_view, Sharding>, 4> kShardings = {
    {{"none", Sharding::None},
     {"states", Sharding::States},
     {"gradients", Sharding::Gradients},
     {"weights", Sharding::Weights}}};

constexpr std::string_view to_string(Sharding sharding) {
  return kShardings[static_cast<std::size_t>(sharding)].first;
}

struct Arrangement {
  int64_t ranks = 1;
  Sharding sharding = Sharding::None;
  int64_t sequence_length = 1024;
  int64_t micro_batch = 1;   ///< sequences of one rank in one forward
  int64_t accumulation = 1;  ///< micro-batches of one rank in one step
  bool recomputes_blocks = false;
  int64_t summed_bytes = 4;    ///< of an element of a gradient on its way: FP32, or 2
  bool packs_weights = false;  ///< sharded weights travel as MXFP8 where they are matrices of blocks

  int64_t micro_batch_tokens() const { return micro_batch * sequence_length; }
  int64_t step_tokens() const { return micro_batch_tokens() * accumulation * ranks; }
  /// Whether gradients have FP32 sums beside them.
  bool has_sums() const { return ranks > 1 || accumulation > 1; }
  bool gathers_packed() const { return packs_weights && shards(Sharding::Weights); }
  /// With one rank there is nothing to share.
  bool shards(Sharding at_least) const { return ranks > 1 && sharding >= at_least; }
};

/// Of a packed weight on its way: a code, and its share of a scale for 32.
inline constexpr double kPackedBytes = 33.0 / 32;

/// Gradients of parameters travel together up to so many bytes.
inline constexpr int64_t kBucketBytes = 25 << 20;

}  // namespace halfstep::forecast
