// Tiles of weights and moments between their storage and FP32.
#pragma once

#include "kernels/update.h"

namespace halfstep {

/// Elements of a tile: one block of moments.
inline constexpr std::size_t kTileElements = kMomentBlockElements;

/// Throws where `layout` is none that there is; `name` is the function that was called.
void check_layout(const char* name, const UpdateLayout& layout);

/// The index of a gradient's format in UpdateStages. Formats that gradients do not come in are refused.
int grad_format_index(Format format);

inline const void* at_element(const void* array, Format format, std::size_t element) {
  return static_cast<const char*>(array) + element * (format == Format::FP32 ? 4 : 2);
}

/// The weights of one tile, at most kTileElements.
struct WeightTile {
  WeightStorage storage;
  Format format;  // of the working copy
  void* working;
  void* companion;
  std::size_t count;
};
WeightTile weight_tile(const UpdateLayout& layout, void* working, void* companion, std::size_t begin,
                       std::size_t count);

/// Room to work in.
struct WeightBuffers {
  alignas(64) std::uint16_t before[kTileElements], companion[kTileElements];
  alignas(64) float addend[kTileElements], sum[kTileElements], after[kTileElements];
};

/// What the optimizer takes for the weight: the master, or the working copy where there is none or where the
/// master does not round to it, because it was edited.
void load_weight_tile(const KernelTable& table, const WeightTile& tile, float* weights,
                      WeightBuffers& buffers);

/// Clears Kahan compensations that do not round to their working copy, because it was edited. `weights` is
/// what load_weight_tile gave.
void drop_stale_compensations(const KernelTable& table, const WeightTile& tile, const float* weights,
                              WeightBuffers& buffers);

/// sum += addend, both halves of the sum in `format`: what was left of earlier addends goes along, and what
/// the sum cannot take of this one is kept. `before` is the sum in FP32; `addend` is overwritten.
void add_compensated(const KernelTable& table, Format format, const float* before, float* addend,
                     std::uint16_t* sum, std::uint16_t* compensation, std::size_t count,
                     WeightBuffers& buffers);

/// Writes the weights of `step`, whose `weight` is what load_weight_tile gave, and counts.
UpdateCounts move_weight_tile(const KernelTable& table, const WeightTile& tile,
                              const StochasticStream& stream, const UpdateTile& step, WeightBuffers& buffers);

/// Elements [begin, begin + count) of moments that are not kept in FP32; at most one block.
void load_moment_tile(const KernelTable& table, MomentStorage storage, int which, const void* moments,
                      const float* scales, std::size_t begin, std::size_t count, float* values);

}  // namespace halfstep
