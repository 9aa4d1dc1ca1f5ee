// Every layout and optimizer in every table against the scalar twin, and against what should not matter:
// length, alignment, how a tensor is cut into runs.
#include <gtest/gtest.h>
#include <halfstep/error.h>

#include <bit>
#include <cmath>
#include <random>

#include "kernels/optimizer_state.h"

namespace halfstep {
namespace {

using namespace testing_state;

bool is_nan(std::uint32_t code, std::size_t bytes, Format format) {
  if (bytes == 4) return std::isnan(std::bit_cast<float>(code));
  return bytes == 2 && std::isnan(decode_float(code, format));
}

/// Equal bits; a NaN may have another payload, since which operand's survives is the compiler's choice.
::testing::AssertionResult equal(State& a, State& b) {
  const std::vector<Array*> as = a.arrays(), bs = b.arrays();
  for (std::size_t k = 0; k < as.size(); ++k) {
    if (!as[k]->guards_hold()) return ::testing::AssertionFailure() << "array " << k << ": guard written";
    for (std::size_t i = 0; as[k]->element_bytes && i < as[k]->count; ++i) {
      const std::uint32_t x = as[k]->code(i), y = bs[k]->code(i);
      const std::size_t bytes = as[k]->element_bytes;
      const Format format = k <= 1 ? a.layout.working : Format::BF16;
      if (x != y && !(is_nan(x, bytes, format) && is_nan(y, bytes, format)))
        return ::testing::AssertionFailure()
               << "array " << k << " element " << i << ": " << std::hex << x << " but the twin has " << y;
    }
  }
  return ::testing::AssertionSuccess();
}

void expect_equal(const UpdateCounts& a, const UpdateCounts& b) {
  EXPECT_EQ(a.nonzero, b.nonzero);
  EXPECT_EQ(a.working_unmoved, b.working_unmoved);
  EXPECT_EQ(a.lost, b.lost);
}

State start(const UpdateLayout& layout, Optimizer optimizer, std::size_t count, std::size_t offset,
            Values kind) {
  State state(layout, optimizer, count, offset);
  state.set_weights(random_values(kind, count, 1));
  return state;
}

constexpr int kSteps = 3;

void expect_like_twin(const KernelTable& table, State vector, State twin, Values kind) {
  const Rates rates;
  for (int step = 1; step <= kSteps; ++step) {
    const std::vector<float> grads = random_values(kind, twin.count, 100 + step);
    vector.set_grads(grads);
    twin.set_grads(grads);
    expect_equal(update(vector, rates, step, table), update(twin, rates, step, kScalarKernels));
    ASSERT_TRUE(equal(vector, twin)) << table.isa << " step " << step;
  }
}

TEST(UpdateTables, EqualTheScalarTwinInEveryLayoutLengthAndAlignment) {
  for (const KernelTable* table : available_kernels()) {
    if (table == &kScalarKernels) continue;
    for (const UpdateLayout& layout : all_layouts())
      for (Optimizer optimizer : kOptimizers) {
        SCOPED_TRACE(describe(layout, optimizer));
        int pick = 0;
        for (std::size_t count : {0, 1, 15, 16, 17, 33, 255, 256, 257, 600})
          for (std::size_t offset : {0, 1, 3}) {
            const Values kind = kValues[pick++ % std::size(kValues)];
            expect_like_twin(*table, start(layout, optimizer, count, offset, kind),
                             start(layout, optimizer, count, offset, kind), kind);
            if (::testing::Test::HasFailure()) {
              FAIL() << "count " << count << " offset " << offset << " values " << int(kind);
            }
          }
      }
  }
}

TEST(UpdateTables, ATensorMayBeCutIntoRunsAnywhere) {
  constexpr std::size_t kCount = 1000;
  const std::uint64_t first_element = (std::uint64_t{1} << 34) - 256;  // a Philox counter carries on the way
  for (const KernelTable* table : available_kernels())
    for (const UpdateLayout& layout : all_layouts()) {
      if (layout.grad != Format::BF16) continue;
      const bool blocks = layout.moments == MomentStorage::Blockwise8;
      for (std::size_t chunk : blocks ? std::vector<std::size_t>{256, 512}
                                      : std::vector<std::size_t>{1, 7, 17, 100, 256, 300, 999}) {
        State whole = start(layout, Optimizer::AdamW, kCount, 0, Values::Ordinary), pieces = whole;
        for (int step = 1; step <= kSteps; ++step) {
          const std::vector<float> grads = random_values(Values::Ordinary, kCount, step);
          whole.set_grads(grads);
          pieces.set_grads(grads);
          const UpdateCounts expected = update(whole, {}, step, *table, 0, kCount, first_element);
          UpdateCounts counts;
          for (std::size_t i = 0; i < kCount; i += chunk)
            counts += update(pieces, {}, step, *table, i, std::min(chunk, kCount - i), first_element);
          expect_equal(counts, expected);
          ASSERT_TRUE(equal(pieces, whole))
              << table->isa << " chunks of " << chunk << " " << describe(layout, Optimizer::AdamW);
        }
      }
    }
}

TEST(UpdateTables, EqualTheTwinWhereALerpStartsAtTheGradient) {
  Rates rates;
  rates.beta1 = 0.25;
  for (const KernelTable* table : available_kernels()) {
    State vector = start({}, Optimizer::AdamW, 100, 0, Values::Ordinary), twin = vector;
    for (int step = 1; step <= kSteps; ++step) {
      vector.set_grads(random_values(Values::Ordinary, 100, step));
      twin.set_grads(random_values(Values::Ordinary, 100, step));
      update(vector, rates, step, *table);
      update(twin, rates, step, kScalarKernels);
      ASSERT_TRUE(equal(vector, twin)) << table->isa;
    }
  }
}

TEST(Update, RefusesLayoutsAndRunsThatThereAreNot) {
  State state({}, Optimizer::AdamW, 16);
  const UpdateRun run = state.run(0, 16, 0);
  const AdamWStep step = adamw_step({}, 1);
  EXPECT_THROW(adamw_update({.working = Format::BF16}, step, run), Error);
  EXPECT_THROW(adamw_update({.weights = WeightStorage::Kahan}, step, run), Error);
  EXPECT_THROW(adamw_update({.working = Format::FP16, .weights = WeightStorage::SplitMaster}, step, run),
               Error);
  EXPECT_THROW(adamw_update({.grad = Format::E4M3}, step, run), Error);
  UpdateRun inside_a_block = run;
  inside_a_block.first_element = 128;
  EXPECT_THROW(adamw_update({.moments = MomentStorage::Blockwise8}, step, inside_a_block), Error);
  EXPECT_THROW(adamw_step({}, 0), Error);
}

// What is NaN is neither an update nor a loss: which NaN a weight holds afterwards differs between compilers.
TEST(UpdateTables, NaNsAreNeitherUpdatesNorLost) {
  constexpr std::size_t kCount = 37;
  for (const KernelTable* table : available_kernels())
    for (const UpdateLayout& layout : all_layouts())
      for (Optimizer optimizer : kOptimizers) {
        State state(layout, optimizer, kCount);
        state.set_weights(std::vector<float>(kCount, 0.5f));
        std::vector<float> grads(kCount, NAN);
        for (std::size_t i = 0; i < kCount; i += 4) grads[i] = 0;
        for (int step = 1; step <= kSteps; ++step) {
          state.set_grads(grads);
          Rates rates;
          rates.weight_decay = 0;
          expect_equal(update(state, rates, step, *table), {});
          ASSERT_FALSE(::testing::Test::HasFailure()) << table->isa << " " << describe(layout, optimizer);
        }
      }
}

// The vectors multiply where the scalar twin divides by the correction: the same bits, for whatever
// correction and second moment.
TEST(UpdateTables, SecondMomentsAreCorrectedAsByADivision) {
  std::mt19937 random(11);
  std::vector<float> corrections = {1.0f, 0x1.fffffep-1f, 0x1.fffffcp-1f, 0x1.000002p-1f, 0x1.fffffep-9f};
  for (const double beta2 : {0.9, 0.95, 0.99, 0.999, 0.99999})
    for (int step = 1; step < 40'000; step += 1 + step / 8)
      corrections.push_back(static_cast<float>(std::sqrt(1 - std::pow(beta2, step))));
  constexpr std::size_t kElements = 8192;
  std::vector<float> seconds(kElements);
  for (float& second : seconds)
    second = std::bit_cast<float>(static_cast<std::uint32_t>(random() & 0x7fffffff));
  // Not numbers alone: random bits hold an Inf or a NaN now and then, and these are edges.
  seconds[0] = 0.0f, seconds[1] = INFINITY, seconds[2] = 0x1p-149f, seconds[3] = 0x1.fffffep127f;
  for (const float correction : corrections) {
    const AdamWStep step{
        .beta2 = 1, .second_correction = correction, .eps = 0, .negative_step_size = -1, .random = {}};
    std::vector<std::vector<float>> updates;
    for (const KernelTable* table : available_kernels()) {
      const std::vector<float> zeros(kElements, 0.0f);
      std::vector<float> first(kElements, 1.0f), second = seconds, next(kElements), update(kElements);
      table->update->adamw(step,
                           {.weight = zeros.data(),
                            .grad = zeros.data(),
                            .first_moment = first.data(),
                            .second_moment = second.data(),
                            .next_weight = next.data(),
                            .update = update.data()},
                           kElements);
      updates.push_back(update);
    }
    for (const auto& update : updates)
      for (std::size_t i = 0; i < kElements; ++i)
        ASSERT_TRUE(std::bit_cast<std::uint32_t>(update[i]) == std::bit_cast<std::uint32_t>(updates[0][i]) ||
                    (std::isnan(update[i]) && std::isnan(updates[0][i])))
            << correction << ", second moment " << seconds[i] << ": " << update[i] << ", " << updates[0][i];
  }
}

}  // namespace
}  // namespace halfstep
