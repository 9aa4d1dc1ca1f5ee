// Tokens that are looked for in the text itself, before it is cut into words: <|endoftext|>.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/bpe.h"

namespace halfstep::text {

/// Finds the leftmost added token and, of those that begin there, the longest.
class AddedTokens {
 public:
  struct Found {
    size_t begin = 0;
    size_t end = 0;
    int32_t id = kNoToken;  ///< kNoToken: none; `begin` is where the search ended
  };

  void add(std::string_view token, int32_t id);
  bool empty() const { return longest_ == 0; }

  /// From `from` on. With `open`, text may follow: the search ends where a token could begin that what
  /// follows decides.
  Found find(std::string_view text, size_t from, bool open) const;

 private:
  std::unordered_map<uint64_t, uint32_t> next_;  // of (node, byte), nodes being prefixes of tokens
  std::vector<int32_t> id_of_node_ = {kNoToken};
  std::array<bool, 256> begins_{};
  size_t longest_ = 0;
};

}  // namespace halfstep::text
