#include "distributed/sharded_weights.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/InferenceMode.h>
#include <halfstep/error.h>
#include <halfstep/memory.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "distributed/packed_weights.h"
#include "tensor/param_checks.h"

namespace halfstep {
namespace {

/// Sees every operation before LibTorch does anything else with it, the policy of an AutocastScope too. One
/// of LibTorch's two keys for its own tests, which nothing else in LibTorch uses; checkpoint_activations has
/// the other.
constexpr c10::DispatchKey kUseKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

struct Owner {
  ShardedWeights* weights;
  std::size_t block;
};

/// Arrays that come and go, of all models of this process.
struct Registry {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, Owner> owners;
};
Registry& registry() {
  static Registry all;
  return all;
}

void note_storage(const at::Tensor& tensor, std::vector<c10::StorageImpl*>& found) {
  if (tensor.defined() && tensor.has_storage()) found.push_back(tensor.storage().unsafeGetStorageImpl());
}

void note_storages(const c10::IValue& value, std::vector<c10::StorageImpl*>& found) {
  if (value.isTensor()) {
    note_storage(value.toTensor(), found);
  } else if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector()) note_storage(each, found);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
      if (each) note_storage(*each, found);
  }
}

}  // namespace

void make_present(const std::vector<c10::StorageImpl*>& storages, bool may_let_go) {
  ShardedWeights* weights = nullptr;
  std::vector<std::size_t> blocks;
  {
    const std::lock_guard lock(registry().mutex);
    for (const c10::StorageImpl* storage : storages) {
      const auto found = registry().owners.find(storage);
      if (found == registry().owners.end()) continue;
      HALFSTEP_CHECK(weights == nullptr || weights == found->second.weights,
                     "MixedPrecision: an operation with sharded weights of two models at once; each model's "
                     "weights are gathered and released separately.");
      weights = found->second.weights;
      if (std::ranges::find(blocks, found->second.block) == blocks.end())
        blocks.push_back(found->second.block);
    }
  }
  if (weights != nullptr) weights->need(blocks, may_let_go);
}

namespace {

void on_every_operation(const c10::OperatorHandle& operation, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack) {
  std::vector<c10::StorageImpl*> storages;
  for (const c10::IValue& value : torch::jit::last(*stack, operation.schema().arguments().size()))
    note_storages(value, storages);
  // An operation calls others: what the outermost was given stays until it is done.
  thread_local int depth = 0;
  make_present(storages, /*may_let_go=*/depth == 0);
  struct Deeper {
    Deeper() { ++depth; }
    ~Deeper() { --depth; }
  } const deeper;
  operation.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kUseKey), stack);
}

/// For the first weights that come and go: a process without them has nothing of this.
void watch_operations() {
  static const torch::Library library = [] {
    torch::Library made(torch::Library::IMPL, "_", kUseKey, __FILE__, __LINE__);
    made.fallback(torch::CppFunction::makeFromBoxedFunction<&on_every_operation>());
    return made;
  }();
}

}  // namespace

ShardedWeights::ShardedWeights(Ranks ranks, ShardLayout layout, const std::vector<Param>& params,
                               bool comes_and_goes)
    : ranks_(std::move(ranks)), layout_(std::move(layout)), comes_and_goes_(comes_and_goes) {
  const at::NoGradGuard no_grad;
  blocks_.assign(layout_.blocks.size(), Presence::There);
  for (const Param& param : params) model_.push_back(param.working);
  versions_.assign(params.size(), 0);
  seen_updates_.assign(params.size(), 0);
  {
    const MemoryClassScope memory(MemoryClass::Working);
    for (std::size_t group = 0; group < layout_.groups.size(); ++group) {
      const at::Tensor whole = at::empty({layout_.elements_of(group)}, layout_.groups[group].type).zero_();
      for (const std::size_t i : layout_.groups[group].params) {
        at::Tensor& working = model_[i];
        if (working.numel() == 0) continue;  // nothing to share
        const at::Tensor place =
            whole.as_strided(working.sizes(), working.strides(), layout_.places[i].first_element);
        place.copy_(working);
        working.set_data(place);
      }
      const int64_t run = layout_.groups[group].part_elements;
      const at::Tensor part = whole.narrow(0, run * ranks_.rank(), run);
      groups_.push_back({.whole = whole, .part = comes_and_goes_ ? part.clone() : part});
    }
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    parts_.push_back(part_of(params[i], i));
    versions_[i] = model_[i]._version();
  }
  if (!comes_and_goes_) return;
  watch_operations();
  {
    const std::lock_guard lock(registry().mutex);
    for (std::size_t group = 0; group < groups_.size(); ++group)
      registry().owners[groups_[group].whole.storage().unsafeGetStorageImpl()] = {
          this, layout_.groups[group].block};
  }
  let_all_go();
}

ShardedWeights::~ShardedWeights() {
  if (!comes_and_goes_) return;
  const std::lock_guard lock(registry().mutex);
  for (const Group& group : groups_) registry().owners.erase(group.whole.storage().unsafeGetStorageImpl());
}

Param ShardedWeights::part_of(const Param& param, std::size_t i) {
  if (param.working.numel() == 0) return param;  // nothing to cut
  const ShardLayout::Part part = layout_.part_of(i, ranks_.rank());
  const ShardLayout::Place& place = layout_.places[i];
  Param mine = param;
  mine.first_element = part.first_element;
  mine.whole_sizes = param.working.sizes().vec();
  if (mine.whole_sizes.empty()) mine.whole_sizes = {1};
  // A view of the model's own tensor, with which it shares the count of its changes.
  mine.working =
      param.working.detach().as_strided({part.elements}, {1}, place.first_element + part.first_element);
  if (comes_and_goes_) {
    const Group& group = groups_[place.group];
    const int64_t begin = place.first_element + part.first_element - group.part.numel() * ranks_.rank();
    mine.working = group.part.narrow(0, part.elements > 0 ? begin : 0, part.elements);
  }
  mine.working.set_requires_grad(param.working.requires_grad());
  if (param.master.defined()) {
    const MemoryClassScope memory(MemoryClass::Master);
    mine.master = param.master.numel() == 0
                      ? at::empty({0}, param.master.options())
                      : param.master.as_strided({part.elements}, {1}, part.first_element).clone();
  }
  note_as_part(mine);
  return mine;
}

void ShardedWeights::check_in_place() const {
  for (std::size_t i = 0; i < model_.size(); ++i)
    HALFSTEP_CHECK(model_[i].numel() == 0 ||
                       (model_[i].storage().unsafeGetStorageImpl() ==
                            groups_[layout_.places[i].group].whole.storage().unsafeGetStorageImpl() &&
                        model_[i].scalar_type() == layout_.groups[layout_.places[i].group].type),
                   "MixedPrecision: other memory was put under '", parts_[i].name,
                   "', by torch::load, set_data or Module::to. Of a sharded model each rank has a part of "
                   "the master, so load weights before MixedPrecision is made, or with load_state_dict.");
}

void ShardedWeights::follow_requires_grad() {
  for (std::size_t i = 0; i < model_.size(); ++i)
    if (parts_[i].working.requires_grad() != model_[i].requires_grad())
      parts_[i].working.set_requires_grad(model_[i].requires_grad());
}

void ShardedWeights::share_update(bool all_changed) {
  const at::NoGradGuard no_grad;
  if (comes_and_goes_) {
    // As an update in place is noted: autograd then sees that a graph has outlived its weights. Elsewhere
    // parts share the count of the whole.
    for (std::size_t i = 0; i < model_.size(); ++i) {
      if (std::exchange(seen_updates_[i], parts_[i].record->updates) != parts_[i].record->updates ||
          all_changed)
        model_[i].unsafeGetTensorImpl()->bump_version();
      versions_[i] = model_[i]._version();  // what is there still is from before the update
    }
    return let_all_go();
  }
  const MemoryClassScope memory(MemoryClass::Working);
  constexpr std::size_t kMostOnTheirWay = 2;
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    if (group >= kMostOnTheirWay) groups_[group - kMostOnTheirWay].pending.wait();
    // A copy of the part: an exchange whose arrays overlap is not defined.
    groups_[group].pending =
        ranks_.begin_gather(groups_[group].part.clone(), groups_[group].whole,
                            detail::concat("the updated weights, part ", group + 1, " of ", groups_.size()));
  }
  for (Group& group : groups_) group.pending.wait();
}

// Weights that come and go

ShardedWeights::Use::Use(ShardedWeights& weights, Pass pass)
    : weights_(weights),
      goes_(pass == Pass::Backward || !at::GradMode::is_enabled()),
      outer_pass_(weights.pass_),
      outer_may_pack_(weights.may_pack_),
      outer_used_last_(weights.used_last_) {
  if (!weights.comes_and_goes_) return;
  guard_.emplace(kUseKey);
  ++weights.uses_;
  weights.begin_pass(pass, /*may_pack=*/!(pass == Pass::Forward && goes_));
  const auto first = weights.next_.find({pass, kNone});
  if (first != weights.next_.end()) weights.begin(first->second);
}

ShardedWeights::Use::~Use() {
  if (!weights_.comes_and_goes_) return;
  const bool is_inner = --weights_.uses_ > 0;
  try {
    if (goes_) weights_.let_all_go();
    // A look at the model in the middle of a forward: that one goes on as it was.
    if (is_inner) weights_.begin_pass(outer_pass_, outer_may_pack_);
  } catch (const std::exception&) {
    // A rank is gone: whatever exchanges next says so.
  }
  if (is_inner) weights_.used_last_ = outer_used_last_;
}

void ShardedWeights::begin_pass(Pass pass, bool may_pack) {
  // What is there of another pass may be rounded.
  if (std::exchange(may_pack_, may_pack) != may_pack) let_all_go();
  pass_ = pass;
  used_last_ = kNone;
}

void ShardedWeights::note_in_order(std::size_t number) {
  order_ = static_cast<std::int32_t>(
      (static_cast<std::uint32_t>(order_) * 31 + static_cast<std::uint32_t>(number) + 1) & 0x7fffffff);
}

void ShardedWeights::begin(std::size_t block) {
  if (blocks_[block] != Presence::Gone) return;
  const c10::InferenceMode as_for_training(false);
  const at::NoGradGuard no_grad;
  const MemoryClassScope memory(MemoryClass::Working);
  // The exchange has threads of its own, whose operations would wait here for themselves.
  const c10::impl::ExcludeDispatchKeyGuard not_a_use(kUseKey);
  blocks_[block] = Presence::Coming;
  note_in_order(block);
  for (const std::size_t number : layout_.blocks[block].groups) {
    Group& group = groups_[number];
    c10::StorageImpl& storage = *group.whole.storage().unsafeGetStorageImpl();
    storage.clear_data_ptr_access_error_msg_();
    storage.set_data_ptr_noswap(c10::GetAllocator(c10::kCPU)->allocate(storage.nbytes()));
    const std::string what = "the weights of " + name_of_block(block);
    group.was_packed = may_pack_ && layout_.groups[number].packs;
    if (group.was_packed)
      group.codes = at::empty({ranks_.size() * packed_bytes(group.part.numel())}, at::kByte);
    group.pending = group.was_packed ? ranks_.begin_gather(packed(group.part), group.codes, what)
                                     : ranks_.begin_gather(group.part, group.whole, what);
  }
}

void ShardedWeights::finish(std::size_t block) {
  if (blocks_[block] != Presence::Coming) return;
  const c10::InferenceMode as_for_training(false);
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard not_a_use(kUseKey);
  blocks_[block] = Presence::There;
  for (const std::size_t number : layout_.blocks[block].groups) {
    Group& group = groups_[number];
    group.pending.wait();
    if (group.was_packed) {
      const int64_t run = group.part.numel(), bytes = packed_bytes(run);
      for (int rank = 0; rank < ranks_.size(); ++rank)
        unpack(group.codes.narrow(0, bytes * rank, bytes), group.whole.narrow(0, run * rank, run));
      group.codes = at::Tensor();
    }
    for (const std::size_t i : layout_.groups[number].params) versions_[i] = model_[i]._version();
  }
}

std::string ShardedWeights::name_of_block(std::size_t block) const {
  const std::string& name = layout_.blocks[block].name;
  return name.empty() ? "no block" : "'" + name + "'";
}

/// What somebody wrote while they were there counts, as it does for weights that stay.
void ShardedWeights::keep_edits(std::size_t block) {
  const c10::InferenceMode as_for_training(false);
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard not_a_use(kUseKey);
  for (const std::size_t number : layout_.blocks[block].groups) {
    const auto& params = layout_.groups[number].params;
    if (std::ranges::none_of(params, [&](std::size_t i) { return model_[i]._version() != versions_[i]; }))
      continue;
    const Group& group = groups_[number];
    // Which elements were written cannot be told, and the others are rounded.
    HALFSTEP_CHECK(
        !group.was_packed, "MixedPrecision: a matrix of ", name_of_block(block),
        " was written in a forward that trains. With Gather::Fp8 the values there are rounded ones: "
        "write in a forward without gradients (at::NoGradGuard around mp.forward).");
    group.part.copy_(group.whole.narrow(0, group.part.numel() * ranks_.rank(), group.part.numel()));
    for (const std::size_t i : params) versions_[i] = model_[i]._version();
  }
}

void ShardedWeights::let_go(std::size_t block) {
  finish(block);
  if (blocks_[block] == Presence::Gone) return;
  keep_edits(block);
  blocks_[block] = Presence::Gone;
  for (const std::size_t number : layout_.blocks[block].groups) {
    c10::StorageImpl& storage = *groups_[number].whole.storage().unsafeGetStorageImpl();
    storage.set_data_ptr_noswap(c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(detail::concat(
        "MixedPrecision: weights of ", name_of_block(block),
        " are read or written while each rank has its part of them only. Use them inside mp.forward, on all "
        "ranks; to save them, CheckpointFolder with CheckpointRanks."));
  }
}

void ShardedWeights::let_all_go() {
  for (std::size_t block = 0; block < blocks_.size(); ++block) let_go(block);
}

void ShardedWeights::need(const std::vector<std::size_t>& blocks, bool may_let_go) {
  for (const std::size_t block : blocks) begin(block);
  for (const std::size_t block : blocks) finish(block);
  if (!may_let_go) return;
  const std::size_t of_no_block = blocks_.size() - 1;
  const auto used = std::ranges::find_if(blocks, [&](std::size_t block) { return block != of_no_block; });
  if (used == blocks.end() || *used == used_last_) return;
  next_[{pass_, used_last_}] = *used;
  used_last_ = *used;
  note_in_order(blocks_.size() + *used);  // one may have come ahead and not have been used
  for (std::size_t block = 0; block < of_no_block; ++block)
    if (std::ranges::find(blocks, block) == blocks.end()) let_go(block);
  const auto next = next_.find({pass_, used_last_});
  if (next != next_.end()) begin(next->second);
}

}  // namespace halfstep
