#include "kernels/update.h"

#include <halfstep/error.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/moment_codes.h"
#include "kernels/tiles.h"

namespace halfstep {
namespace {

constexpr std::uint32_t kMomentTensorBit = 0x80000000;

/// The tile in FP32 and room to work in: the first-level cache keeps it.
struct Buffers {
  alignas(64) float weight[kTileElements], grad[kTileElements], first[kTileElements], second[kTileElements],
      next[kTileElements], update[kTileElements];
  alignas(64) std::uint32_t random[kTileElements];
  WeightBuffers weights;
};

/// A moment of this tile, in FP32. Where it is kept in FP32 the tile is the array itself.
float* load_moment(const KernelTable& table, MomentStorage storage, int which, void* moments,
                   const float* scales, std::size_t begin, std::size_t count, float* buffer) {
  if (!moments) return nullptr;
  if (storage == MomentStorage::Fp32) return static_cast<float*>(moments) + begin;
  load_moment_tile(table, storage, which, moments, scales, begin, count, buffer);
  return buffer;
}

void store_moment(const KernelTable& table, MomentStorage storage, int which, const float* values,
                  Dither dither, std::size_t begin, std::size_t count, void* moments, float* scales) {
  if (!moments) return;
  const UpdateStages& stages = *table.update;
  if (storage == MomentStorage::Bf16) {
    stages.round_bf16_moment[which](values, dither, static_cast<std::uint16_t*>(moments) + begin, count);
  } else if (storage == MomentStorage::Blockwise8) {
    float& scale = scales[begin / kMomentBlockElements];
    scale = stages.block_scale[which](values, count);
    stages.round_block_moment[which](values, scale, dither, static_cast<std::uint8_t*>(moments) + begin,
                                     count);
  }
}

/// `compute` is one of the two optimizers over a tile in FP32.
template <typename Compute>
UpdateCounts update_by_tiles(const UpdateLayout& layout, float grad_multiplier, StochasticKey key,
                             const UpdateRun& run, const KernelTable& table, const Compute& compute) {
  static_assert(kTileElements == kMomentBlockElements);
  const UpdateStages& stages = *table.update;
  const int grad_index = grad_format_index(layout.grad);
  // One random word serves both moments for all steps: the phase moves on, see moment_codes.h.
  const StochasticKey moment_key{key.seed, key.tensor ^ kMomentTensorBit, 0};
  UpdateCounts counts;
  Buffers buffers;
  for (std::size_t begin = 0; begin < run.count; begin += kTileElements) {
    const std::size_t count = std::min(kTileElements, run.count - begin);
    const std::uint64_t element = run.first_element + begin;
    stages.load_grads[grad_index](at_element(run.grad, layout.grad, begin), grad_multiplier, buffers.grad,
                                  count);
    const WeightTile weights = weight_tile(layout, run.working, run.companion, begin, count);
    load_weight_tile(table, weights, buffers.weight, buffers.weights);
    drop_stale_compensations(table, weights, buffers.weight, buffers.weights);
    const UpdateTile tile{
        .weight = buffers.weight,
        .grad = buffers.grad,
        .first_moment = load_moment(table, layout.moments, kFirst, run.first_moment, run.first_scale, begin,
                                    count, buffers.first),
        .second_moment = load_moment(table, layout.moments, kSecond, run.second_moment, run.second_scale,
                                     begin, count, buffers.second),
        .next_weight = buffers.next,
        .update = buffers.update,
    };
    compute(tile, count);
    counts += move_weight_tile(table, weights, {key, element}, tile, buffers.weights);
    if (layout.moments == MomentStorage::Fp32 || !tile.first_moment) continue;
    table.random({moment_key, element}, buffers.random, count);
    const Dither dither{buffers.random, key.step * kDitherStep};
    store_moment(table, layout.moments, kFirst, tile.first_moment, dither, begin, count, run.first_moment,
                 run.first_scale);
    store_moment(table, layout.moments, kSecond, tile.second_moment, dither, begin, count, run.second_moment,
                 run.second_scale);
  }
  return counts;
}

/// In one loop where there is one for this layout. Returns how many elements it did.
std::size_t fused_adamw(const UpdateLayout& layout, const AdamWStep& step, const UpdateRun& run,
                        const KernelTable& table, UpdateCounts& counts) {
  const auto storage = static_cast<int>(layout.weights);
  if (storage >= kFusedStorages || layout.moments != MomentStorage::Fp32 || layout.working == Format::FP16)
    return 0;
  const auto kernel = table.update->fused_adamw[storage][grad_format_index(layout.grad)];
  return kernel ? kernel(step, run, counts) : 0;
}

/// What a fused loop has left. Its moments are FP32.
UpdateRun rest_of(const UpdateLayout& layout, UpdateRun run, std::size_t done) {
  if (done == 0) return run;
  const WeightTile weights = weight_tile(layout, run.working, run.companion, done, run.count - done);
  run.working = weights.working;
  run.companion = weights.companion;
  run.grad = at_element(run.grad, layout.grad, done);
  run.first_moment = static_cast<float*>(run.first_moment) + done;
  run.second_moment = static_cast<float*>(run.second_moment) + done;
  run.count -= done;
  run.first_element += done;
  return run;
}

void check_run(const char* name, const UpdateLayout& layout, const UpdateRun& run) {
  check_layout(name, layout);
  HALFSTEP_CHECK(layout.moments != MomentStorage::Blockwise8 || run.first_element % kMomentBlockElements == 0,
                 name, ": a run with blockwise moments begins at element ", run.first_element,
                 ", inside a block. Begin runs at multiples of ", kMomentBlockElements, ".");
}

}  // namespace

AdamWStep adamw_step(const AdamWRates& rates, std::int64_t step_number) {
  HALFSTEP_CHECK(step_number >= 1, "adamw_step: step number ", step_number, "; the first step is 1.");
  const auto step = static_cast<double>(step_number);
  const double first_correction = 1 - std::pow(rates.beta1, step);
  const double second_correction = 1 - std::pow(rates.beta2, step);
  const double decay = rates.learning_rate * rates.weight_decay;
  return {
      .decay = static_cast<float>(decay),
      .kept = static_cast<float>(1 - decay),
      .first_weight = static_cast<float>(1 - rates.beta1),
      .beta2 = static_cast<float>(rates.beta2),
      .second_weight = static_cast<float>(1 - rates.beta2),
      .second_correction = static_cast<float>(std::sqrt(second_correction)),
      .eps = static_cast<float>(rates.eps),
      .negative_step_size = static_cast<float>(-(rates.learning_rate / first_correction)),
      .random = {},
  };
}

UpdateCounts adamw_update(const UpdateLayout& layout, const AdamWStep& step, const UpdateRun& run,
                          const KernelTable& table) {
  check_run("adamw_update", layout, run);
  UpdateCounts counts;
  const std::size_t fused = fused_adamw(layout, step, run, table, counts);
  counts += update_by_tiles(
      layout, step.grad_multiplier, step.random, rest_of(layout, run, fused), table,
      [&](const UpdateTile& tile, std::size_t count) { table.update->adamw(step, tile, count); });
  return counts;
}

UpdateCounts sgd_update(const UpdateLayout& layout, const SgdStep& step, const UpdateRun& run,
                        const KernelTable& table) {
  check_run("sgd_update", layout, run);
  return update_by_tiles(
      layout, step.grad_multiplier, step.random, run, table,
      [&](const UpdateTile& tile, std::size_t count) { table.update->sgd(step, tile, count); });
}

double sum_of_squares(Format format, const void* grads, std::size_t count, const KernelTable& table) {
  double lanes[kSquareLanes] = {};
  table.update->sum_of_squares[grad_format_index(format)](grads, count, lanes);
  for (std::size_t half = kSquareLanes / 2; half > 0; half /= 2)
    for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

void accumulate(Format grad, const void* grads, float* sum, std::size_t count, bool first,
                const KernelTable& table) {
  const UpdateStages& stages = *table.update;
  const int grad_index = grad_format_index(grad);
  if (first) {
    stages.load_grads[grad_index](grads, 1, sum, count);
  } else {
    stages.accumulate[grad_index](grads, sum, count);
  }
}

void accumulate_kahan(Format grad, const void* grads, std::uint16_t* sum_bf16,
                      std::uint16_t* compensation_bf16, std::size_t count, bool first,
                      const KernelTable& table) {
  const UpdateLayout as_weight{.working = Format::BF16, .weights = WeightStorage::Kahan};
  const int grad_index = grad_format_index(grad);
  WeightBuffers buffers;
  alignas(64) float before[kTileElements];
  for (std::size_t begin = 0; begin < count; begin += kTileElements) {
    const std::size_t tile_count = std::min(kTileElements, count - begin);
    std::uint16_t *sum = sum_bf16 + begin, *compensation = compensation_bf16 + begin;
    table.update->load_grads[grad_index](at_element(grads, grad, begin), 1, buffers.addend, tile_count);
    if (first) {
      store_weights(as_weight, buffers.addend, sum, compensation, tile_count, table);
      continue;
    }
    table.update->load_grads[kBf16Grads](sum, 1, before, tile_count);
    add_compensated(table, Format::BF16, before, buffers.addend, sum, compensation, tile_count, buffers);
  }
}

}  // namespace halfstep
