#include "forecast/collectives.h"

#include <algorithm>
#include <bit>

namespace halfstep::forecast {
namespace {

// Both ways are NCCL's model of them (src/graph/tuning.cc): a ring passes every rank once for each half of an
// all-reduce, a tree the ranks of a node and then the logarithm of the nodes.

/// What a tree moves of what a ring does.
constexpr double kTreeShare = 0.92;

}  // namespace

double collective_seconds(Collective collective, double bytes, int64_t ranks, const Device& device) {
  if (ranks <= 1 || bytes <= 0) return 0;
  const int64_t nodes = (ranks + device.ranks_per_node - 1) / device.ranks_per_node;
  const int64_t ranks_of_node = std::min(ranks, device.ranks_per_node);
  double bytes_per_second = device.within_node.bytes_per_second;
  if (nodes > 1) bytes_per_second = std::min(bytes_per_second, device.between_nodes.bytes_per_second);

  const double halves = collective == Collective::AllReduce ? 2 : 1;
  const double travelled = halves * bytes * static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  const auto hops = [&](int64_t within, int64_t between) {
    return static_cast<double>(within) * device.within_node.seconds_per_hop +
           static_cast<double>(between) * device.between_nodes.seconds_per_hop;
  };
  const double ring = halves * hops(ranks - nodes, nodes - 1) + travelled / bytes_per_second;
  if (collective != Collective::AllReduce) return device.seconds_per_collective + ring;
  const int depth = std::bit_width(static_cast<uint64_t>(nodes)) - 1;
  const double tree = halves * hops(ranks_of_node - 1, depth) + travelled / (bytes_per_second * kTreeShare);
  return device.seconds_per_collective + std::min(ring, tree);
}

}  // namespace halfstep::forecast
