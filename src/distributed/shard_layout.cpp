#include "distributed/shard_layout.h"

#include <halfstep/storage.h>

#include <algorithm>
#include <map>
#include <utility>

namespace halfstep {
namespace {

int64_t rounded_up(int64_t elements, int64_t to) { return (elements + to - 1) / to * to; }

}  // namespace

ShardLayout::Part ShardLayout::part_of(std::size_t i, int rank) const {
  const Place& place = places[i];
  const int64_t run = groups[place.group].part_elements;
  const int64_t begin = std::max(place.first_element, run * rank);
  const int64_t end = std::min(place.first_element + place.elements, run * (rank + 1));
  if (begin >= end) return {};
  return {.first_element = begin - place.first_element, .elements = end - begin};
}

ShardLayout lay_out_shards(const std::vector<Param>& params, const std::vector<std::string>& block_of,
                           const ShardLayoutOptions& options) {
  // Blocks of 8-bit moments are never cut, so that a part has the bits of the whole.
  constexpr int64_t kAlignment = kMomentBlockElements;
  ShardLayout layout{.ranks = options.ranks, .groups = {}, .blocks = {}, .places = {}};
  layout.places.resize(params.size());
  std::vector<int64_t> elements;  // of each group
  std::map<std::string, std::size_t> blocks;
  const auto block_called = [&](const std::string& name) {
    const auto [found, is_new] = blocks.try_emplace(name, layout.blocks.size());
    if (is_new) layout.blocks.push_back({.name = name, .groups = {}});
    return found->second;
  };
  const auto add = [&](std::size_t i) {
    const at::Tensor& working = params[i].working;
    const std::size_t block = block_called(block_of[i]);
    auto& groups = layout.blocks[block].groups;
    const bool packs = options.packs_matrices && !block_of[i].empty() && working.dim() >= 2;
    const auto fits = [&](std::size_t group) {
      return layout.groups[group].type == working.scalar_type() && layout.groups[group].packs == packs &&
             (!block_of[i].empty() || (elements[group] + working.numel()) * 4 <= options.group_bytes);
    };
    const auto found = std::find_if(groups.rbegin(), groups.rend(), fits);
    const bool is_new = found == groups.rend();
    const std::size_t group = is_new ? layout.groups.size() : *found;
    if (is_new) {
      groups.push_back(group);
      layout.groups.push_back(
          {.params = {}, .type = working.scalar_type(), .part_elements = 0, .packs = packs, .block = block});
      elements.push_back(0);
    }
    layout.groups[group].params.push_back(i);
    layout.places[i] = {.group = group, .first_element = elements[group], .elements = working.numel()};
    elements[group] += rounded_up(working.numel(), kAlignment);
  };
  for (std::size_t i = params.size(); i-- > 0;)
    if (!block_of[i].empty()) add(i);
  for (std::size_t i = params.size(); i-- > 0;)
    if (block_of[i].empty()) add(i);
  block_called("");  // there in any case, and the last
  for (std::size_t group = 0; group < layout.groups.size(); ++group)
    layout.groups[group].part_elements =
        rounded_up((elements[group] + options.ranks - 1) / options.ranks, kAlignment);
  return layout;
}

}  // namespace halfstep
