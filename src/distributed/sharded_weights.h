// The weights of a model of which each rank updates a part.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <halfstep/params.h>
#include <halfstep/ranks.h>

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "distributed/shard_layout.h"

namespace halfstep {

/// A model's parameters, moved into the arrays of a ShardLayout, and this rank's parts of them.
///
/// With `comes_and_goes` the arrays have memory only while they are used. An operation of LibTorch's that is
/// given a weight, or a view of one, inside a Use finds all of its block there: it is gathered from the ranks
/// just before, and the next block of the order that was seen last time begins to come. What is used is left
/// alone; other blocks go. Parameters of no block stay to the end of the pass. Groups that pack travel as
/// codes in passes of a step, and in their own type where no backward follows.
class ShardedWeights {
 public:
  /// Gives `params` their place in the arrays; their masters are cut. The parameters themselves stay the
  /// model's tensors.
  ShardedWeights(Ranks ranks, ShardLayout layout, const std::vector<Param>& params, bool comes_and_goes);
  ~ShardedWeights();
  ShardedWeights(const ShardedWeights&) = delete;
  ShardedWeights& operator=(const ShardedWeights&) = delete;

  /// What this rank updates: of each parameter a run of its elements, maybe none. In the arrays themselves,
  /// or, where these come and go, beside them.
  const std::vector<Param>& parts() const { return parts_; }

  /// An Error where somebody has put other memory under a parameter.
  void check_in_place() const;
  /// Follows what the model's tensors require.
  void follow_requires_grad();
  /// After an update of the parts: every rank's weights are those of all. `all_changed`: not only those that
  /// an optimizer has updated.
  void share_update(bool all_changed = false);

  enum class Pass { Forward, Backward };
  /// A pass through the model; weights that come and go are there when an operation uses them.
  class Use {
   public:
    Use(ShardedWeights& weights, Pass pass);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    ShardedWeights& weights_;
    std::optional<c10::impl::IncludeDispatchKeyGuard> guard_;
    bool goes_;  // at the end: no backward follows
    Pass outer_pass_;
    bool outer_may_pack_;
    std::size_t outer_used_last_;
  };

  /// Which blocks have come, in their order, as one number: the same on all ranks, or their weights are not
  /// those of one block.
  std::int32_t order() const { return order_; }

 private:
  struct Group {
    at::Tensor whole;  // its memory may be gone
    at::Tensor part;
    at::Tensor codes{};  // of all ranks, on their way
    bool was_packed = false;
    Ranks::Pending pending{};
  };
  enum class Presence { Gone, Coming, There };

  friend void make_present(const std::vector<c10::StorageImpl*>& storages, bool may_let_go);
  void begin_pass(Pass pass, bool may_pack);
  void note_in_order(std::size_t number);
  std::string name_of_block(std::size_t block) const;
  void begin(std::size_t block);
  void finish(std::size_t block);
  void keep_edits(std::size_t block);
  void let_go(std::size_t block);
  void let_all_go();
  void need(const std::vector<std::size_t>& blocks, bool may_let_go);
  Param part_of(const Param& param, std::size_t i);

  Ranks ranks_;
  ShardLayout layout_;
  std::vector<at::Tensor> model_;  // the model's own
  bool comes_and_goes_;
  std::vector<Group> groups_;
  std::vector<Presence> blocks_;
  std::vector<Param> parts_;

  // Where weights come and go.
  std::vector<int64_t> versions_;      // of the model's tensors, when they came
  std::vector<int64_t> seen_updates_;  // of the parts
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  int uses_ = 0;  // one inside another
  Pass pass_ = Pass::Forward;
  bool may_pack_ = false;                                     // in this pass
  std::size_t used_last_ = kNone;                             // a block
  std::map<std::pair<Pass, std::size_t>, std::size_t> next_;  // after a block, as seen last time
  std::int32_t order_ = 0;
};

}  // namespace halfstep
