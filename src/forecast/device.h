// What a device can do: the constants of a forecast, all of them in device.cpp, with their sources.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "forecast/precision.h"

namespace halfstep::forecast {

/// A way from one rank to the next.
struct Link {
  /// That a ring of ranks moves through the link, as nccl-tests' busbw counts it: of one rank inside a node,
  /// of all ranks of a node together between nodes.
  double bytes_per_second = 0;
  double seconds_per_hop = 0;  ///< alpha
};

/// One device of a rank. Rates are those that programs have reached, not those of a data sheet, where a
/// source has them.
struct Device {
  std::string name{};
  double memory_bytes = 0;
  /// Of memory_bytes, what tensors may take: the rest is for the driver, the collectives' buffers and holes.
  double usable_share = 1;
  double memory_bytes_per_second = 0;
  /// Of matrix products. 0: it has no such products.
  double fp32_flops = 0, tf32_flops = 0, bf16_flops = 0, fp16_flops = 0, fp8_flops = 0, fp4_flops = 0;
  double bf16_peak_flops = 0;  ///< of the data sheet, dense: what shares of the peak are of
  /// BF16 and FP16 products make an FP32 result first, which takes memory: processors without instructions
  /// for them.
  bool products_in_fp32 = false;
  /// SwiGLU keeps its two factors and nothing else: Halfstep's pass over BF16 and FP16 is for CPUs.
  bool swiglu_in_one_pass = false;
  /// Ranks that keep a part of a sum get all of it, because Gloo's sums in parts are slower; and what Gloo
  /// gathers arrives in a copy.
  bool exchanges_by_gloo = false;
  int64_t ranks_per_node = 1;
  double seconds_per_collective = 0;  ///< to begin one
  Link within_node{}, between_nodes{};
  std::vector<std::string> sources{};  ///< a sentence for each group of numbers, or that they are assumed

  /// Operations per second; an Error, which names precisions that it has, for one that it has not.
  double flops(Operands operands) const;
  double usable_bytes() const { return memory_bytes * usable_share; }
};

/// Those that come with Halfstep.
std::span<const Device> known_devices();
/// An Error that lists the names if there is none of this one.
const Device& device_named(std::string_view name);

/// The device of a file that `halfstep bench --calibrate` wrote, or that was written by hand alike.
Device read_device(std::string_view json, const std::string& where);
std::string to_json(const Device& device);

}  // namespace halfstep::forecast
