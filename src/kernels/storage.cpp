#include <halfstep/error.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/tiles.h"

namespace halfstep {
namespace {

// A weight or sum that leaves the format's range becomes Inf, as copies between tensors do in LibTorch.
SpecialResults visible_overflow(Format format) {
  const std::uint32_t inf = traits(format).inf_code;
  return {.overflow = inf, .inf = inf};
}

std::uint16_t* codes_of(void* array) { return static_cast<std::uint16_t*>(array); }

void round_nearest(const KernelTable& table, Format format, const float* values, void* codes,
                   std::size_t count) {
  if (format == Format::BF16) {
    table.update->round_bf16(values, codes_of(codes), count);
  } else {
    table.format[static_cast<int>(format)].nearest_even(values, codes, count, visible_overflow(format));
  }
}

void load(const KernelTable& table, Format format, const void* codes, float* values, std::size_t count) {
  table.update->load_grads[grad_format_index(format)](codes, 1, values, count);
}

/// Whether these values round to the working copy, all of them. Leaves what they round to in buffers.before.
bool rounds_to_working(const KernelTable& table, const WeightTile& tile, const float* values,
                       WeightBuffers& buffers) {
  round_nearest(table, tile.format, values, buffers.before, tile.count);
  return std::memcmp(buffers.before, tile.working, tile.count * sizeof(std::uint16_t)) == 0;
}

/// Leaves the compensation in FP32 in buffers.sum, 0 where it is stale. Returns whether any was, and then
/// leaves its codes in buffers.companion.
bool load_compensation(const KernelTable& table, const WeightTile& tile, const float* weights,
                       WeightBuffers& buffers) {
  const auto load_times = [&](float factor) {
    table.update->load_grads[grad_format_index(tile.format)](tile.companion, factor, buffers.sum, tile.count);
  };
  // Half a unit in the last place counts: one just below may have been rounded up to it. It is a tie, which
  // may round the other way; a little less is none, and so little that the next larger compensation stays
  // above.
  load_times(1 - std::ldexp(1.0f, -traits(tile.format).mantissa_bits - 1));
  table.update->add(weights, buffers.sum, buffers.after, tile.count);
  const bool all_count = rounds_to_working(table, tile, buffers.after, buffers);
  load_times(1);
  if (all_count) return false;
  std::memcpy(buffers.companion, tile.companion, tile.count * sizeof(std::uint16_t));
  for (std::size_t i = 0; i < tile.count; ++i) {
    if (buffers.before[i] == codes_of(tile.working)[i]) continue;
    buffers.companion[i] = 0;
    buffers.sum[i] = 0;
  }
  return true;
}

UpdateCounts move_master(const KernelTable& table, const WeightTile& tile, const UpdateTile& step,
                         WeightBuffers& buffers) {
  const UpdateStages& stages = *table.update;
  const std::size_t count = tile.count;
  std::memcpy(buffers.before, tile.working, count * sizeof(std::uint16_t));
  round_nearest(table, tile.format, step.next_weight, tile.working, count);
  std::memcpy(tile.companion, step.next_weight, count * sizeof(float));
  return {.working_unmoved = stages.unmoved_codes(step.update, buffers.before, codes_of(tile.working), count),
          .lost = stages.unmoved_words(step.update, step.weight, step.next_weight, count)};
}

UpdateCounts move_split(const KernelTable& table, const WeightTile& tile, const UpdateTile& step,
                        WeightBuffers& buffers) {
  const UpdateStages& stages = *table.update;
  const std::size_t count = tile.count;
  std::memcpy(buffers.before, tile.working, count * sizeof(std::uint16_t));
  stages.split(step.next_weight, codes_of(tile.working), codes_of(tile.companion), count);
  return {.working_unmoved = stages.unmoved_codes(step.update, buffers.before, codes_of(tile.working), count),
          .lost = stages.unmoved_words(step.update, step.weight, step.next_weight, count)};
}

UpdateCounts move_kahan(const KernelTable& table, const WeightTile& tile, const UpdateTile& step,
                        WeightBuffers& buffers) {
  const UpdateStages& stages = *table.update;
  const std::size_t count = tile.count;
  std::uint16_t *working = codes_of(tile.working), *companion = codes_of(tile.companion);
  std::memcpy(buffers.before, working, count * sizeof(std::uint16_t));
  std::memcpy(buffers.companion, companion, count * sizeof(std::uint16_t));
  std::memcpy(buffers.addend, step.update, count * sizeof(float));
  add_compensated(table, tile.format, step.weight, buffers.addend, working, companion, count, buffers);
  const UpdateCounts counts{.working_unmoved =
                                stages.unmoved_codes(step.update, buffers.before, working, count)};
  // Lost where neither half moved: compare both as one word.
  float *both_before = buffers.addend, *both_after = buffers.after;
  stages.join(buffers.before, buffers.companion, both_before, count);
  stages.join(working, companion, both_after, count);
  return {.working_unmoved = counts.working_unmoved,
          .lost = stages.unmoved_words(step.update, both_before, both_after, count)};
}

UpdateCounts move_alone(const KernelTable& table, const WeightTile& tile, const StochasticStream& stream,
                        const UpdateTile& step, WeightBuffers& buffers) {
  const std::size_t count = tile.count;
  const bool random = tile.storage == WeightStorage::Stochastic;
  std::memcpy(buffers.before, tile.working, count * sizeof(std::uint16_t));
  if (random) {
    table.format[static_cast<int>(tile.format)].stochastic(step.next_weight, tile.working, count,
                                                           visible_overflow(tile.format), stream);
  } else {
    round_nearest(table, tile.format, step.next_weight, tile.working, count);
  }
  const std::size_t unmoved =
      table.update->unmoved_codes(step.update, buffers.before, codes_of(tile.working), count);
  return {.working_unmoved = unmoved, .lost = random ? 0 : unmoved};
}

}  // namespace

void add_compensated(const KernelTable& table, Format format, const float* before, float* addend,
                     std::uint16_t* sum, std::uint16_t* compensation, std::size_t count,
                     WeightBuffers& buffers) {
  const UpdateStages& stages = *table.update;
  load(table, format, compensation, buffers.sum, count);
  stages.add(addend, buffers.sum, addend, count);
  stages.add(before, addend, buffers.sum, count);
  round_nearest(table, format, buffers.sum, sum, count);
  load(table, format, sum, buffers.after, count);
  stages.left_of(addend, before, buffers.after, buffers.sum, count);
  round_nearest(table, format, buffers.sum, compensation, count);
}

void check_layout(const char* name, const UpdateLayout& layout) {
  const bool fp32 = layout.weights == WeightStorage::Fp32;
  const bool working_fits = fp32 ? layout.working == Format::FP32
                            : layout.weights == WeightStorage::SplitMaster
                                ? layout.working == Format::BF16
                                : layout.working == Format::BF16 || layout.working == Format::FP16;
  HALFSTEP_CHECK(working_fits, name, ": working weights are ", traits(layout.working).name,
                 "; WeightStorage::Fp32 takes FP32, SplitMaster BF16, the others BF16 or FP16.");
}

int grad_format_index(Format format) {
  HALFSTEP_CHECK(format == Format::FP32 || format == Format::BF16 || format == Format::FP16, "gradients are ",
                 traits(format).name, "; there are kernels for FP32, BF16 and FP16.");
  return format == Format::FP32 ? kFp32Grads : format == Format::BF16 ? kBf16Grads : kFp16Grads;
}

WeightTile weight_tile(const UpdateLayout& layout, void* working, void* companion, std::size_t begin,
                       std::size_t count) {
  const std::size_t working_bytes = layout.weights == WeightStorage::Fp32 ? 4 : 2;
  const std::size_t companion_bytes = layout.weights == WeightStorage::Fp32Master ? 4 : 2;
  return {.storage = layout.weights,
          .format = layout.working,
          .working = static_cast<char*>(working) + begin * working_bytes,
          .companion = companion ? static_cast<char*>(companion) + begin * companion_bytes : nullptr,
          .count = count};
}

void load_weight_tile(const KernelTable& table, const WeightTile& tile, float* weights,
                      WeightBuffers& buffers) {
  switch (tile.storage) {
    case WeightStorage::Fp32:
      std::memcpy(weights, tile.working, tile.count * sizeof(float));
      return;
    case WeightStorage::Fp32Master:
      std::memcpy(weights, tile.companion, tile.count * sizeof(float));
      if (!rounds_to_working(table, tile, weights, buffers)) {
        load(table, tile.format, tile.working, buffers.after, tile.count);
        for (std::size_t i = 0; i < tile.count; ++i)
          if (buffers.before[i] != codes_of(tile.working)[i]) weights[i] = buffers.after[i];
      }
      return;
    case WeightStorage::SplitMaster:
      table.update->join(codes_of(tile.working), codes_of(tile.companion), weights, tile.count);
      return;
    case WeightStorage::Kahan:
    case WeightStorage::Stochastic:
    case WeightStorage::Nearest:
      load(table, tile.format, tile.working, weights, tile.count);
      return;
  }
}

void drop_stale_compensations(const KernelTable& table, const WeightTile& tile, const float* weights,
                              WeightBuffers& buffers) {
  if (tile.storage != WeightStorage::Kahan) return;
  if (load_compensation(table, tile, weights, buffers))
    std::memcpy(tile.companion, buffers.companion, tile.count * sizeof(std::uint16_t));
}

UpdateCounts move_weight_tile(const KernelTable& table, const WeightTile& tile,
                              const StochasticStream& stream, const UpdateTile& step,
                              WeightBuffers& buffers) {
  UpdateCounts counts;
  switch (tile.storage) {
    case WeightStorage::Fp32:
      counts.lost = table.update->unmoved_words(step.update, step.weight, step.next_weight, tile.count);
      counts.working_unmoved = counts.lost;
      std::memcpy(tile.working, step.next_weight, tile.count * sizeof(float));
      break;
    case WeightStorage::Fp32Master:
      counts = move_master(table, tile, step, buffers);
      break;
    case WeightStorage::SplitMaster:
      counts = move_split(table, tile, step, buffers);
      break;
    case WeightStorage::Kahan:
      counts = move_kahan(table, tile, step, buffers);
      break;
    case WeightStorage::Stochastic:
    case WeightStorage::Nearest:
      counts = move_alone(table, tile, stream, step, buffers);
      break;
  }
  counts.nonzero = table.update->nonzero(step.update, tile.count);
  return counts;
}

void load_moment_tile(const KernelTable& table, MomentStorage storage, int which, const void* moments,
                      const float* scales, std::size_t begin, std::size_t count, float* values) {
  if (storage == MomentStorage::Bf16) {
    load(table, Format::BF16, static_cast<const std::uint16_t*>(moments) + begin, values, count);
  } else {
    table.update->load_block_moment[which](static_cast<const std::uint8_t*>(moments) + begin,
                                           scales[begin / kMomentBlockElements], values, count);
  }
}

void store_weights(const UpdateLayout& layout, const float* weights, void* working, void* companion,
                   std::size_t count, const KernelTable& table) {
  check_layout("store_weights", layout);
  WeightBuffers buffers;
  for (std::size_t begin = 0; begin < count; begin += kTileElements) {
    const float* values = weights + begin;
    const WeightTile tile =
        weight_tile(layout, working, companion, begin, std::min(kTileElements, count - begin));
    switch (layout.weights) {
      case WeightStorage::Fp32:
        std::memcpy(tile.working, values, tile.count * sizeof(float));
        break;
      case WeightStorage::SplitMaster:
        table.update->split(values, codes_of(tile.working), codes_of(tile.companion), tile.count);
        break;
      case WeightStorage::Fp32Master:
        round_nearest(table, tile.format, values, tile.working, tile.count);
        std::memcpy(tile.companion, values, tile.count * sizeof(float));
        break;
      case WeightStorage::Kahan:
        round_nearest(table, tile.format, values, tile.working, tile.count);
        load(table, tile.format, tile.working, buffers.after, tile.count);
        std::fill_n(buffers.sum, tile.count, 0.0f);
        table.update->left_of(values, buffers.sum, buffers.after, buffers.addend, tile.count);
        round_nearest(table, tile.format, buffers.addend, tile.companion, tile.count);
        break;
      case WeightStorage::Stochastic:
      case WeightStorage::Nearest:
        round_nearest(table, tile.format, values, tile.working, tile.count);
        break;
    }
  }
}

void load_weights(const UpdateLayout& layout, const void* working, const void* companion, float* weights,
                  std::size_t count, const KernelTable& table) {
  check_layout("load_weights", layout);
  WeightBuffers buffers;
  for (std::size_t begin = 0; begin < count; begin += kTileElements) {
    // The tile's arrays are only read.
    const WeightTile tile = weight_tile(layout, const_cast<void*>(working), const_cast<void*>(companion),
                                        begin, std::min(kTileElements, count - begin));
    load_weight_tile(table, tile, weights + begin, buffers);
    if (layout.weights != WeightStorage::Kahan) continue;
    load_compensation(table, tile, weights + begin, buffers);
    table.update->add(weights + begin, buffers.sum, weights + begin, tile.count);
  }
}

void load_moments(MomentStorage storage, bool second, const void* moments, const float* scales, float* values,
                  std::size_t count, const KernelTable& table) {
  if (storage == MomentStorage::Fp32) {
    if (count) std::memcpy(values, moments, count * sizeof(float));
    return;
  }
  for (std::size_t begin = 0; begin < count; begin += kTileElements)
    load_moment_tile(table, storage, second ? kSecond : kFirst, moments, scales, begin,
                     std::min(kTileElements, count - begin), values + begin);
}

}  // namespace halfstep
