#include "text/added_tokens.h"

#include <algorithm>

namespace halfstep::text {
namespace {

uint64_t step(uint32_t node, char byte) { return uint64_t{node} << 8 | static_cast<uint8_t>(byte); }

}  // namespace

void AddedTokens::add(std::string_view token, int32_t id) {
  uint32_t node = 0;
  for (const char byte : token) {
    const auto [place, is_new] =
        next_.try_emplace(step(node, byte), static_cast<uint32_t>(id_of_node_.size()));
    if (is_new) id_of_node_.push_back(kNoToken);
    node = place->second;
  }
  id_of_node_[node] = id;
  begins_[static_cast<uint8_t>(token[0])] = true;
  longest_ = std::max(longest_, token.size());
}

AddedTokens::Found AddedTokens::find(std::string_view text, size_t from, bool open) const {
  if (empty()) return {text.size(), text.size(), kNoToken};
  for (size_t begin = from; begin < text.size(); ++begin) {
    if (!begins_[static_cast<uint8_t>(text[begin])]) continue;
    Found found{begin, begin, kNoToken};
    uint32_t node = 0;
    size_t at = begin;
    for (; at < text.size(); ++at) {
      const auto next = next_.find(step(node, text[at]));
      if (next == next_.end()) break;
      node = next->second;
      if (id_of_node_[node] != kNoToken) found = {begin, at + 1, id_of_node_[node]};
    }
    if (open && at == text.size()) return {begin, begin, kNoToken};  // a token, or a longer one, may follow
    if (found.id != kNoToken) return found;
  }
  return {text.size(), text.size(), kNoToken};
}

}  // namespace halfstep::text
