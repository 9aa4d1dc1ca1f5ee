#include "forecast/memory.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <ostream>

#include "forecast/shapes.h"

namespace halfstep::forecast {
namespace {

constexpr double kBound = 0.05;  // what docs/forecast.md promises

void expect_near(double forecast, double measured, const char* what) {
  EXPECT_LE(std::abs(forecast - measured), kBound * measured)
      << what << ": " << forecast << " for " << measured;
}

/// What the log of a run has of its second step, on a processor without BF16 instructions:
///   halfstep train --preset tiny --set train.steps=2 --set optimizer.warmup_steps=0 --set
///   train.evaluate_every=0
///     --set train.sample_every=0 --set checkpoint.every=0 --set model.width=256 --set model.layers=6
///     --set model.context=256, and the settings of each row; "launch -n 2" before it for two ranks.
struct Measured {
  const char* name;
  const char* family;
  int64_t layers, vocabulary, batch, length;
  const char* precision;  // and how weights are kept, where it is not as usual
  bool recomputes;
  int64_t ranks, accumulation;
  double working, master, gradient, moments, activation, total;
};
std::ostream& operator<<(std::ostream& out, const Measured& measured) { return out << measured.name; }

constexpr Measured kMeasured[] = {
    {"gpt2_fp32", "gpt2", 6, 8192, 8, 256, "fp32", false, 1, 1, 27607040, 0, 134217732, 55214080, 340148232,
     490110984},
    {"gpt2_bf16", "gpt2", 6, 8192, 8, 256, "bf16", false, 1, 1, 13803520, 13803520, 88080388, 55214080,
     167159808, 250040320},
    {"gpt2_fp16", "gpt2", 6, 8192, 8, 256, "fp16", false, 1, 1, 13803520, 27607040, 88080392, 55214080,
     167159808, 263843840},
    {"gpt2_mxfp8", "gpt2", 6, 8192, 8, 256, "mxfp8", false, 1, 1, 13803520, 13803520, 88080388, 55214080,
     187142144, 270022656},
    {"gpt2_fp8", "gpt2", 6, 8192, 8, 256, "fp8-current", false, 1, 1, 13803520, 13803520, 88080388, 55214080,
     186535936, 269416448},
    {"gpt2_recomputed", "gpt2", 6, 8192, 8, 256, "bf16", true, 1, 1, 13803520, 13803520, 88080388, 55214080,
     110118912, 192974848},
    {"gpt2_two_layers", "gpt2", 2, 8192, 8, 256, "bf16", false, 1, 1, 7485440, 7485440, 88080388, 29941760,
     124938240, 169893888},
    {"gpt2_accumulated", "gpt2", 6, 8192, 8, 256, "bf16", false, 1, 2, 13803520, 13803520, 115687428,
     55214080, 167159808, 277647360},
    {"gpt2_fp32_weights", "gpt2", 6, 8192, 8, 256, "bf16 fp32", false, 1, 1, 27607040, 0, 88080388, 55214080,
     180791296, 277276672},
    {"gpt2_fp32_end", "gpt2", 6, 32768, 2, 8, "fp32", false, 1, 1, 52772864, 0, 119627780, 105545728, 5803144,
     277946632},
    {"llama_fp32", "llama", 6, 8192, 8, 256, "fp32", false, 1, 1, 34485248, 0, 134217732, 68970496, 392601608,
     563198984},
    {"llama_bf16", "llama", 6, 8192, 8, 256, "bf16", false, 1, 1, 17242624, 17242624, 88080388, 68970496,
     204926464, 308414976},
    {"llama_mxfp8", "llama", 6, 8192, 8, 256, "mxfp8", false, 1, 1, 17242624, 17242624, 88080388, 68970496,
     215463936, 318952448},
    {"llama_recomputed", "llama", 6, 8192, 8, 256, "bf16", true, 1, 1, 17242624, 17242624, 88080388, 68970496,
     110241280, 213729792},
    {"gpt2_short", "gpt2", 6, 32768, 2, 64, "bf16", false, 1, 1, 26386432, 26386432, 84148228, 105545728,
     29346816, 246545416},
    {"gpt2_two_ranks", "gpt2", 6, 32768, 2, 64, "bf16", false, 2, 1, 26386432, 26386432, 136921096, 105545728,
     29346816, 299318284},
};

ModelShape shape_of(const Measured& measured) {
  ModelShape shape{.name = measured.name,
                   .family = measured.family,
                   .vocabulary = measured.vocabulary,
                   .context = 256,
                   .layers = measured.layers,
                   .width = 256,
                   .heads = 4,
                   .key_value_heads = 4,
                   .head_size = 64,
                   .feed_forward_width = 1024};
  if (shape.is_gpt2()) {
    shape.is_tied = shape.has_query_bias = shape.has_output_bias = shape.has_feed_forward_bias = true;
  } else {
    shape.key_value_heads = 2;
    shape.feed_forward_width = 704;
  }
  return shape;
}

class MeasuredMemory : public ::testing::TestWithParam<Measured> {};

TEST_P(MeasuredMemory, IsForecastByClassAndInAll) {
  const Measured& measured = GetParam();
  const std::string words = measured.precision;
  const PrecisionPlan precision =
      words == "bf16 fp32" ? precision_plan("bf16", "fp32") : precision_plan(words);
  const RankMemory memory = memory_per_rank(shape_of(measured), precision,
                                            {.ranks = measured.ranks,
                                             .sequence_length = measured.length,
                                             .micro_batch = measured.batch,
                                             .accumulation = measured.accumulation,
                                             .recomputes_blocks = measured.recomputes},
                                            Device{.products_in_fp32 = true});
  const auto peak = [&](MemoryClass c) { return static_cast<double>(memory.class_peaks[c]); };
  EXPECT_EQ(peak(MemoryClass::Working), measured.working);
  EXPECT_EQ(peak(MemoryClass::Master), measured.master);
  EXPECT_EQ(peak(MemoryClass::Moments), measured.moments);
  expect_near(peak(MemoryClass::Gradient), measured.gradient, "gradient");
  expect_near(peak(MemoryClass::Activation), measured.activation, "activation");
  expect_near(memory.bytes(), measured.total, "total");
}

INSTANTIATE_TEST_SUITE_P(Runs, MeasuredMemory, ::testing::ValuesIn(kMeasured),
                         [](const auto& info) { return std::string(info.param.name); });

/// build/release/bin/memory_table --model gpt2_124m --scheme bf16, on a processor without BF16 instructions.
TEST(Memory, OfGpt2WhereBf16IsEmulatedIsThatOfTheMemoryTable) {
  const RankMemory memory =
      memory_per_rank(known("gpt2-124m"), precision_plan("bf16"), {.sequence_length = 256, .micro_batch = 4},
                      Device{.products_in_fp32 = true});
  expect_near(static_cast<double>(memory.at_peak[MemoryClass::Gradient]), 520'923'140, "gradient");
  expect_near(static_cast<double>(memory.at_peak[MemoryClass::Activation]), 191'264'772, "activation");
  expect_near(memory.bytes(), 2'205'627'400, "total");
}

/// docs/memory.md, on a processor with BF16 instructions: the peak of a whole step, MB.
TEST(Memory, IsThatOfTheTableOfSchemesWhereBf16IsNative) {
  const ModelShape gpt2 = known("gpt2-124m");
  const Arrangement step{.sequence_length = 256, .micro_batch = 4};
  const auto peak = [&](const PrecisionPlan& precision, const ModelShape& shape,
                        const Arrangement& arrangement) {
    return memory_per_rank(shape, precision, arrangement, Device{}).bytes() / 1e6;
  };
  expect_near(peak(precision_plan("fp32"), gpt2, step), 2722, "fp32");
  expect_near(peak(precision_plan("bf16", "fp32"), gpt2, step), 2159, "fp32 weights");
  expect_near(peak(precision_plan("bf16", "fp32_master"), gpt2, step), 2145, "fp32 master");
  expect_near(peak(precision_plan("bf16"), gpt2, step), 1897, "split master");
  expect_near(peak(precision_plan("bf16", {}, "bf16"), gpt2, step), 1399, "bf16 moments");
  expect_near(peak(precision_plan("bf16", {}, "8bit"), gpt2, step), 1154, "8-bit moments");

  // Six blocks of width 384, four sequences of 512, 30,044,544 parameters.
  ModelShape small = gpt2;
  small.layers = small.heads = small.key_value_heads = 6;
  small.width = 384;
  small.feed_forward_width = 4 * 384;
  small.context = 256;
  const Arrangement long_step{.sequence_length = 512, .micro_batch = 4};
  expect_near(peak(precision_plan("bf16"), small, long_step), 710, "30M");
  Arrangement recomputed = long_step;
  recomputed.recomputes_blocks = true;
  expect_near(peak(precision_plan("bf16", {}, "8bit"), small, recomputed), 446, "30M recomputed");
}

/// tools/ranks_sweep --only memory, on a processor with BF16 instructions: ranks that exchange by Gloo.
struct MeasuredRanks {
  int64_t ranks;
  Sharding sharding;
  double working, master, gradient, moments, activation, total;
};
constexpr MeasuredRanks kMeasuredRanks[] = {
    {2, Sharding::States, 367.2e6, 124.4e6, 729.5e6, 497.8e6, 74.9e6, 1600.6e6},
    {2, Sharding::Gradients, 367.2e6, 124.4e6, 542.8e6, 497.8e6, 74.9e6, 1413.9e6},
    {2, Sharding::Weights, 308.8e6, 124.4e6, 540.4e6, 497.8e6, 74.9e6, 1380.0e6},
    {8, Sharding::States, 336.4e6, 31.1e6, 729.5e6, 124.4e6, 19.6e6, 1133.9e6},
    {8, Sharding::Gradients, 341.5e6, 31.1e6, 356.1e6, 124.4e6, 19.6e6, 760.6e6},
    {8, Sharding::Weights, 215.4e6, 31.1e6, 353.8e6, 124.4e6, 19.6e6, 633.4e6},
};

TEST(Memory, OfPartsIsThatOfRanksOnGloo) {
  for (const MeasuredRanks& measured : kMeasuredRanks) {
    SCOPED_TRACE(::testing::Message() << measured.ranks << " ranks, " << static_cast<int>(measured.sharding));
    const RankMemory memory = memory_per_rank(known("gpt2-124m"), precision_plan("bf16"),
                                              {.ranks = measured.ranks,
                                               .sharding = measured.sharding,
                                               .sequence_length = 64,
                                               .micro_batch = 8 / measured.ranks},
                                              Device{.swiglu_in_one_pass = true, .exchanges_by_gloo = true});
    const auto peak = [&](MemoryClass c) { return static_cast<double>(memory.class_peaks[c]); };
    expect_near(peak(MemoryClass::Working), measured.working, "working");
    expect_near(peak(MemoryClass::Master), measured.master, "master");
    expect_near(peak(MemoryClass::Gradient), measured.gradient, "gradient");
    expect_near(peak(MemoryClass::Moments), measured.moments, "moments");
    expect_near(peak(MemoryClass::Activation), measured.activation, "activation");
    expect_near(memory.bytes(), measured.total, "total");
  }
}

double bytes_of(const ModelShape& shape, const Arrangement& arrangement, MemoryClass c) {
  const RankMemory memory = memory_per_rank(shape, precision_plan("bf16"), arrangement, Device{});
  return static_cast<double>(memory.class_peaks[c]);
}

TEST(Memory, ShardedStatesShrinkWithTheRanks) {
  const ModelShape shape = known("llama-8b");
  const auto parameters = static_cast<double>(shape.parameters());
  for (const int64_t ranks : {2, 8, 64}) {
    const Arrangement states{.ranks = ranks, .sharding = Sharding::States};
    // Moments 8 bytes, the lower half of the master 2.
    EXPECT_NEAR(bytes_of(shape, states, MemoryClass::Moments), 8 * parameters / static_cast<double>(ranks),
                1);
    EXPECT_NEAR(bytes_of(shape, states, MemoryClass::Master), 2 * parameters / static_cast<double>(ranks), 1);
    // All weights, and copies of two groups on their way: the first embedding, and before it the first
    // matrix.
    const auto two = static_cast<double>(shape.vocabulary * shape.width + shape.width * shape.query_width());
    EXPECT_NEAR(bytes_of(shape, states, MemoryClass::Working),
                2 * parameters + 2 * two / static_cast<double>(ranks), 1);
  }
}

TEST(Memory, ShardedWeightsAreTheirPartTwoBlocksAndWhatIsInNone) {
  const ModelShape shape = known("llama-70b");
  const Arrangement weights{.ranks = 64, .sharding = Sharding::Weights};
  // Two embeddings and a norm; two of the 80 blocks, each 855,654,400.
  const double outer = 2.0 * 128256 * 8192 + 8192, block = (70'553'706'496 - outer) / 80;
  EXPECT_NEAR(bytes_of(shape, weights, MemoryClass::Working), 2 * (70'553'706'496 / 64.0 + outer + 2 * block),
              1);
}

TEST(Memory, EachShardingNeedsLessThanTheOneBefore) {
  for (const char* name : {"gpt2-1.5b", "llama-8b", "llama-70b"})
    for (const int64_t ranks : {8, 64}) {
      double before = std::numeric_limits<double>::infinity();
      for (const auto& [word, sharding] : kShardings) {
        const double bytes = memory_per_rank(known(name), precision_plan("bf16"),
                                             {.ranks = ranks, .sharding = sharding}, Device{})
                                 .bytes();
        EXPECT_LT(bytes, before) << name << " " << word;
        before = bytes;
      }
    }
}

TEST(Memory, OneRankSharesWithNobody) {
  const ModelShape shape = known("gpt2-124m");
  const RankMemory none = memory_per_rank(shape, precision_plan("bf16"), {}, Device{});
  const RankMemory weights =
      memory_per_rank(shape, precision_plan("bf16"), {.sharding = Sharding::Weights}, Device{});
  EXPECT_EQ(none.class_peaks, weights.class_peaks);
}

}  // namespace
}  // namespace halfstep::forecast
