#include "text/definition.h"

#include <halfstep/error.h>

#include <algorithm>

#include "text/nfc.h"
#include "words/names.h"
#include "words/utf8.h"

namespace halfstep::text {
namespace {

constexpr uint32_t kFirstSubstitute = 0x100;
constexpr uint32_t kSubstitutes = 68;

constexpr bool stands_for_itself(uint32_t byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

struct Alphabet {
  std::array<std::string, 256> characters;
  std::array<int, kFirstSubstitute + kSubstitutes> byte_of;  // by code point; -1: not of the alphabet

  Alphabet() {
    byte_of.fill(-1);
    uint32_t substitute = kFirstSubstitute;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t point = stands_for_itself(byte) ? byte : substitute++;
      append_utf8(point, characters[byte]);
      byte_of[point] = static_cast<int>(byte);
    }
  }
};

const Alphabet& alphabet() {
  static const Alphabet it;
  return it;
}

uint64_t step(uint32_t node, char byte) { return uint64_t{node} << 8 | static_cast<uint8_t>(byte); }

// Beyond any vocabulary in use (the largest have 262,144): limits for untrusted files.
constexpr int64_t kIdLimit = int64_t{1} << 22;
constexpr size_t kMergeLimit = size_t{1} << 23;
// Every place of a text is compared with them, and each of their bytes is a node in memory. Tokenizers in use
// have up to a few thousand of less than 64 bytes.
constexpr size_t kAddedTokenBytes = 256;
constexpr size_t kAllAddedTokensBytes = size_t{1} << 20;

}  // namespace

const std::array<std::string, 256>& byte_characters() { return alphabet().characters; }

std::optional<std::string> bytes_of_token(std::string_view token) {
  std::string bytes;
  for (size_t at = 0; at < token.size();) {
    const CodePoint point = code_point_at(token, at);
    if (point.bytes == 0 || point.value >= alphabet().byte_of.size()) return std::nullopt;
    const int byte = alphabet().byte_of[point.value];
    if (byte < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(byte));
    at += point.bytes;
  }
  return bytes;
}

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

void DefinitionBuilder::set_bytes(int32_t id, std::string bytes) {
  if (static_cast<size_t>(id) >= bytes_of_id_.size()) bytes_of_id_.resize(static_cast<size_t>(id) + 1);
  bytes_of_id_[static_cast<size_t>(id)] = std::move(bytes);
}

void DefinitionBuilder::add_to_vocabulary(const std::string& token, int64_t id) {
  HALFSTEP_CHECK(id >= 0 && id < kIdLimit, where_, ": the token ", in_quotes(token), " has the id ", id,
                 "; ids are read from 0 to ", kIdLimit - 1, ".");
  HALFSTEP_CHECK(static_cast<size_t>(id) >= bytes_of_id_.size() || !bytes_of_id_[static_cast<size_t>(id)],
                 where_, ": the id ", id, " of ", in_quotes(token), " occurs twice in the vocabulary.");
  HALFSTEP_CHECK(id_of_token_.emplace(token, static_cast<int32_t>(id)).second, where_, ": the token ",
                 in_quotes(token), " occurs twice in the vocabulary.");
  set_bytes(static_cast<int32_t>(id), bytes_of_token(token).value_or(token));
}

int32_t DefinitionBuilder::id_in_vocabulary(std::string_view token, std::string_view of_what) const {
  const auto found = id_of_token_.find(token);
  HALFSTEP_CHECK(found != id_of_token_.end(), where_, ": merge ", merges_.size(), " ", of_what, " ",
                 in_quotes(token), ", which is not in the vocabulary.");
  return found->second;
}

void DefinitionBuilder::add_merge(std::string_view left, std::string_view right) {
  HALFSTEP_CHECK(merges_.size() < kMergeLimit, where_, ": more than ", kMergeLimit, " merges.");
  // Merging with nothing would never end.
  HALFSTEP_CHECK(!left.empty() && !right.empty(), where_, ": merge ", merges_.size(),
                 " names an empty token.");
  merges_.push_back({id_in_vocabulary(left, "names"), id_in_vocabulary(right, "names"),
                     id_in_vocabulary(std::string(left) += right, "makes")});
}

// By sorting, which no choice of pairs makes slow as it does a hash.
void DefinitionBuilder::check_merges_differ() const {
  std::vector<std::pair<int32_t, int32_t>> pairs;
  pairs.reserve(merges_.size());
  for (const Merge& merge : merges_) pairs.emplace_back(merge.left, merge.right);
  std::ranges::sort(pairs);
  const auto twice = std::ranges::adjacent_find(pairs);
  if (twice == pairs.end()) return;
  const auto token = [&](int32_t id) { return in_quotes(*bytes_of_id_[static_cast<size_t>(id)]); };
  detail::throw_error(detail::concat(where_, ": the merge of ", token(twice->first), " and ",
                                     token(twice->second), " occurs twice."));
}

void DefinitionBuilder::add_added_token(const std::string& content, int64_t id, bool normalized) {
  HALFSTEP_CHECK(!content.empty() && content.size() <= kAddedTokenBytes, where_, ": the added token of id ",
                 id, " has ", content.size(), " bytes; 1 to ", kAddedTokenBytes, " are read.");
  added_bytes_ += content.size();
  HALFSTEP_CHECK(added_bytes_ <= kAllAddedTokensBytes, where_, ": the added tokens have more than ",
                 kAllAddedTokensBytes, " bytes in all.");
  const auto in_vocabulary = id_of_token_.find(content);
  if (in_vocabulary != id_of_token_.end()) {
    HALFSTEP_CHECK(in_vocabulary->second == id, where_, ": the added token ", in_quotes(content),
                   " has the id ", id, ", in the vocabulary ", in_vocabulary->second, ".");
    HALFSTEP_CHECK(bytes_of_id_[static_cast<size_t>(id)] == content, where_, ": the added token ",
                   in_quotes(content), " is in the vocabulary for other bytes; its id would be ambiguous.");
  } else {
    // The rule of `tokenizers`, which numbers new tokens itself whatever the file says.
    const int64_t expected = std::max<int64_t>(static_cast<int64_t>(id_of_token_.size()), last_added_ + 1);
    HALFSTEP_CHECK(id == expected && id < kIdLimit, where_, ": the added token ", in_quotes(content),
                   " has the id ", id, "; after ", id_of_token_.size(),
                   " tokens of the vocabulary and added ones it must be ", expected, ".");
    HALFSTEP_CHECK(static_cast<size_t>(id) >= bytes_of_id_.size() || !bytes_of_id_[static_cast<size_t>(id)],
                   where_, ": the id ", id, " of the added token ", in_quotes(content),
                   " is in the vocabulary.");
    set_bytes(static_cast<int32_t>(id), content);
  }
  HALFSTEP_CHECK(id_of_added_.emplace(content, static_cast<int32_t>(id)).second, where_, ": the added token ",
                 in_quotes(content), " occurs twice.");
  last_added_ = std::max(last_added_, id);
  if (!normalized) return first_added_.add(content, static_cast<int32_t>(id));
  second_added_.add(nfc_ ? nfc_of(content) : content, static_cast<int32_t>(id));
}

bool DefinitionBuilder::has_every_byte() const {
  return std::ranges::all_of(byte_characters(), [&](const std::string& byte) { return has(byte); });
}

Definition DefinitionBuilder::build() {
  check_merges_differ();
  Definition definition{.bytes_of_id = std::move(bytes_of_id_),
                        .id_of_bytes = {},
                        .id_of_added = std::move(id_of_added_),
                        .model = {.id_of_byte = {}, .merges = MergeTable(merges_)},
                        .first_added = std::move(first_added_),
                        .nfc = nfc_,
                        .second_added = std::move(second_added_),
                        .stages = {}};
  for (size_t byte = 0; byte < 256; ++byte) {
    const auto found = id_of_token_.find(byte_characters()[byte]);
    definition.model.id_of_byte[byte] = found == id_of_token_.end() ? kNoToken : found->second;
  }
  for (const auto& [token, id] : id_of_token_)
    if (const auto bytes = bytes_of_token(token)) definition.id_of_bytes.emplace(*bytes, id);
  return definition;
}

Definition bytes_definition() {
  DefinitionBuilder builder("bytes");
  for (int byte = 0; byte < 256; ++byte)
    builder.add_to_vocabulary(byte_characters()[static_cast<size_t>(byte)], byte);
  return builder.build();
}

}  // namespace halfstep::text
