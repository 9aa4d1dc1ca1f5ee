// Which layer has which memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>
#include <halfstep/params.h>

#include <iterator>
#include <map>
#include <string>
#include <unordered_map>

namespace halfstep::diagnose {

/// Finds the layer of a tensor by its memory: a view of a weight is another tensor. A storage alone does not
/// tell, because sharded weights lie one behind the other in one.
class LayerMemory {
 public:
  /// Where all of the parameter lies, of which this process may have a part. Of tied ones the first names it.
  void add_param(const Param& param, const std::string& layer) {
    const at::Tensor& here = param.working;
    const int64_t elements =
        param.is_part() ? c10::multiply_integers(param.whole_sizes) : elements_spanned(here);
    const int64_t first = here.storage_offset() - (param.is_part() ? param.first_element : 0);
    add(here, first * here.element_size(), (first + elements) * here.element_size(), layer);
  }
  /// All of a tensor's storage, whosever it was.
  void add_storage(const at::Tensor& tensor, const std::string& layer) {
    if (!tensor.has_storage()) return;
    storages_.erase(tensor.storage().unsafeGetStorageImpl());
    add(tensor, 0, static_cast<int64_t>(tensor.storage().nbytes()), layer);
  }
  void clear() { storages_.clear(); }

  /// Null where it is nobody's.
  const std::string* find(const at::Tensor& tensor) const {
    if (!tensor.has_storage()) return nullptr;
    const auto storage = storages_.find(tensor.storage().unsafeGetStorageImpl());
    if (storage == storages_.end() || storage->second.memory.expired()) return nullptr;
    const int64_t byte = tensor.storage_offset() * tensor.element_size();
    auto next = storage->second.ranges.upper_bound(byte);
    if (next == storage->second.ranges.begin()) return nullptr;
    const Range& range = std::prev(next)->second;
    return byte < range.end ? &range.layer : nullptr;
  }

 private:
  struct Range {
    int64_t end;
    std::string layer;
  };
  struct Ranges {
    c10::weak_intrusive_ptr<c10::StorageImpl> memory;  // its address may become another's
    std::map<int64_t, Range> ranges;                   // by their first byte
  };

  static int64_t elements_spanned(const at::Tensor& tensor) {
    if (tensor.numel() == 0) return 0;
    int64_t last = 0;
    for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
    return last + 1;
  }

  void add(const at::Tensor& tensor, int64_t begin, int64_t end, const std::string& layer) {
    if (!tensor.has_storage() || begin >= end) return;
    const c10::Storage& storage = tensor.storage();
    auto& known =
        storages_.try_emplace(storage.unsafeGetStorageImpl(), Ranges{storage.getWeakStorageImpl(), {}})
            .first->second;
    if (known.memory.expired()) known = {storage.getWeakStorageImpl(), {}};
    known.ranges.try_emplace(begin, Range{end, layer});
  }

  std::unordered_map<const c10::StorageImpl*, Ranges> storages_;
};

}  // namespace halfstep::diagnose
