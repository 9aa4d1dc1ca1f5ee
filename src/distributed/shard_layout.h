// How the elements of a model's parameters are dealt out to ranks.
#pragma once

#include <halfstep/params.h>

#include <cstdint>
#include <string>
#include <vector>

namespace halfstep {

/// Parameters of one type in groups that travel as one array. Each rank has one run of every group, of the
/// same length on all ranks: what a rank has does not depend on where one parameter ends and the next begins.
struct ShardLayout {
  struct Group {
    std::vector<std::size_t> params;  ///< in the order of their memory
    c10::ScalarType type{};           ///< of the weights
    int64_t part_elements = 0;        ///< of each rank
    bool packs = false;               ///< travels as codes of 8 bits where it may: see packed_weights.h
    std::size_t block = 0;
  };
  /// Groups that are used together. The last one is of the parameters of no block.
  struct Block {
    std::string name;
    std::vector<std::size_t> groups;
  };
  struct Place {
    std::size_t group = 0;
    int64_t first_element = 0;  ///< in the group's array
    int64_t elements = 0;
  };
  /// A run of the elements of one parameter, as they lie in memory.
  struct Part {
    int64_t first_element = 0, elements = 0;
  };

  int ranks = 1;
  std::vector<Group> groups;
  std::vector<Block> blocks;
  std::vector<Place> places;  ///< of each parameter

  int64_t elements_of(std::size_t group) const { return groups[group].part_elements * ranks; }
  /// What of parameter `i` is in the run of `rank`; maybe nothing.
  Part part_of(std::size_t i, int rank) const;
};

struct ShardLayoutOptions {
  int ranks = 1;
  int64_t group_bytes = 25 << 20;
  bool packs_matrices = false;  ///< of blocks
};

/// `block_of`: the name of each parameter's block, "" for none. A block is one group for each type that its
/// parameters have, and one of those that are packed; those of no block are cut into groups of about
/// `group_bytes` in FP32. The last parameters come first, since backward is done with them first; those of no
/// block last, since it may use them to the end.
ShardLayout lay_out_shards(const std::vector<Param>& params, const std::vector<std::string>& block_of,
                           const ShardLayoutOptions& options);

}  // namespace halfstep
