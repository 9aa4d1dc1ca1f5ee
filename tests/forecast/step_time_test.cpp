#include "forecast/step_time.h"

#include <gtest/gtest.h>

#include "forecast/collectives.h"
#include "forecast/shapes.h"

namespace halfstep::forecast {
namespace {

StepTime time_of(const char* model, const char* precision, const Arrangement& arrangement) {
  return step_time(known(model), precision_plan(precision), arrangement, device_named("h100"));
}

TEST(StepTime, IsNoLessThanTheArithmeticTakes) {
  const Arrangement arrangement{.sequence_length = 8192};
  const double flops = known("llama-8b").flops_per_token(8192) * 8192;
  const double at_once = flops / device_named("h100").bf16_flops;
  const double computed = time_of("llama-8b", "bf16", arrangement).computed();
  EXPECT_GT(computed, at_once);
  EXPECT_LT(computed, 2 * at_once);
}

TEST(StepTime, RecomputedBlocksCostOneMoreForwardOfThem) {
  Arrangement arrangement{.sequence_length = 8192};
  const StepTime kept = time_of("llama-8b", "bf16", arrangement);
  arrangement.recomputes_blocks = true;
  const StepTime recomputed = time_of("llama-8b", "bf16", arrangement);
  EXPECT_EQ(recomputed.forward, kept.forward);
  EXPECT_GT(recomputed.backward - kept.backward, 0.85 * kept.forward);  // all but the head
  EXPECT_LT(recomputed.backward - kept.backward, kept.forward);
}

TEST(StepTime, Fp8GainsLessThanItsRate) {
  const Arrangement arrangement{.sequence_length = 8192};
  const double gain = time_of("llama-8b", "bf16", arrangement).computed() /
                      time_of("llama-8b", "fp8-current", arrangement).computed();
  EXPECT_GT(gain, 1.1);
  EXPECT_LT(gain, 1402.6 / 794.5);
}

TEST(StepTime, PackedWeightsTravelInHalfTheTime) {
  const ModelShape shape = known("llama-70b");
  Device device = device_named("h100");
  device.within_node.seconds_per_hop = device.between_nodes.seconds_per_hop = device.seconds_per_collective =
      0;  // bytes alone
  const auto exchanged = [&](Sharding sharding, bool packs) {
    return step_time(shape, precision_plan("bf16"),
                     {.ranks = 64, .sharding = sharding, .sequence_length = 8192, .packs_weights = packs},
                     device)
        .exchanged;
  };
  // Each element is gathered twice in 2 bytes and summed in 4, all over the same links; matrices of blocks
  // are gathered in 33/32.
  double matrices = 0;
  for (const Linear& linear : shape.block_linears())
    matrices += static_cast<double>(shape.layers * linear.weights());
  const double blocks = static_cast<double>(shape.layers * shape.block_parameters()),
               outer = static_cast<double>(shape.outer_parameters());
  const double own = 2 * 2 * blocks + 2 * outer + 4 * (blocks + outer);
  const double packed = own - 2 * (2 - 33.0 / 32) * matrices;
  EXPECT_NEAR(exchanged(Sharding::Weights, true) / exchanged(Sharding::Weights, false), packed / own, 1e-9);
  EXPECT_EQ(exchanged(Sharding::Gradients, true), exchanged(Sharding::Gradients, false));
}

TEST(StepTime, ExposedIsAPartOfWhatIsExchanged) {
  for (const char* model : {"gpt2-124m", "llama-8b", "llama-70b"})
    for (const auto& [word, sharding] : kShardings)
      for (const int64_t ranks : {2, 8, 512, 16384})
        for (const int64_t accumulation : {1, 4}) {
          const StepTime time = time_of(
              model, "bf16",
              {.ranks = ranks, .sharding = sharding, .sequence_length = 1024, .accumulation = accumulation});
          EXPECT_LE(time.exposed, time.exchanged * (1 + 1e-12)) << model << " " << word << " " << ranks;
          EXPECT_GT(time.exposed, 0);
        }
}

TEST(StepTime, TheLastBucketIsWaitedForWhateverElseItHolds) {
  // GPT-2's embedding of 257 tokens shares its bucket with blocks: none of it leaves before backward is done.
  ModelShape shape = known("gpt2-124m");
  shape.vocabulary = 257;
  const Arrangement arrangement{.ranks = 8, .sequence_length = 1024, .micro_batch = 64};
  const Device device = device_named("h100");
  const StepTime time = step_time(shape, precision_plan("bf16"), arrangement, device);
  const double embedding = 4.0 * static_cast<double>(shape.embedding_weights());
  EXPECT_GT(time.exposed, 2 * collective_seconds(Collective::AllReduce, embedding, 8, device));
  EXPECT_LE(time.exposed, collective_seconds(Collective::AllReduce, kBucketBytes, 8, device));
}

TEST(StepTime, PartsOfWholeSumsTakeTheTimeOfWholeSums) {
  Device device = device_named("h100");
  device.seconds_per_collective = device.within_node.seconds_per_hop = 0;
  const ModelShape shape = known("llama-8b");
  const Arrangement arrangement{.ranks = 8, .sharding = Sharding::Weights};
  const auto exchanged = [&] {
    return step_time(shape, precision_plan("bf16"), arrangement, device).exchanged;
  };
  const double in_parts = exchanged();
  device.exchanges_by_gloo = true;
  // Twice the 4 bytes of each parameter's sum, of which 7 in 8 travel.
  const double more =
      4.0 * static_cast<double>(shape.parameters()) * 7 / 8 / device.within_node.bytes_per_second;
  EXPECT_NEAR(exchanged() - in_parts, more, 1e-9 * more);
}

TEST(StepTime, OneRankExchangesNothing) { EXPECT_EQ(time_of("llama-8b", "bf16", {}).exchanged, 0); }

TEST(StepTime, MicroBatchesShareOneSumUnlessItsPartsAreKept) {
  Arrangement arrangement{.ranks = 64, .sharding = Sharding::States, .accumulation = 1};
  const auto exchanged = [&](Sharding sharding, int64_t accumulation) {
    arrangement.sharding = sharding;
    arrangement.accumulation = accumulation;
    return time_of("llama-8b", "bf16", arrangement).exchanged;
  };
  EXPECT_EQ(exchanged(Sharding::None, 4), exchanged(Sharding::None, 1));
  EXPECT_EQ(exchanged(Sharding::States, 4), exchanged(Sharding::States, 1));
  EXPECT_GT(exchanged(Sharding::Gradients, 4), 2 * exchanged(Sharding::Gradients, 1));
  EXPECT_NEAR(exchanged(Sharding::Weights, 4), 4 * exchanged(Sharding::Weights, 1), 1e-9);
}

TEST(StepTime, ShardedWeightsTravelTwiceAndSumsOnce) {
  // Without hops: forward and backward gather 2 bytes a parameter, the sums are 4. The weights of no block
  // stay from forward to backward.
  Device device = device_named("h100");
  device.seconds_per_collective = device.within_node.seconds_per_hop = device.between_nodes.seconds_per_hop =
      0;
  const ModelShape shape = known("llama-8b");
  const Arrangement arrangement{.ranks = 8, .sharding = Sharding::Weights};
  const auto all = static_cast<double>(shape.parameters()),
             outer = static_cast<double>(shape.outer_parameters());
  const double bytes = 2 * (2 * all - outer) + 4 * all;
  EXPECT_NEAR(step_time(shape, precision_plan("bf16"), arrangement, device).exchanged,
              bytes * 7 / 8 / device.within_node.bytes_per_second, 1e-9);
}

}  // namespace
}  // namespace halfstep::forecast
