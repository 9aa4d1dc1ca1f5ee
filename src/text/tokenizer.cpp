#include <halfstep/error.h>
#include <halfstep/tokenizer.h>

#include <algorithm>
#include <mutex>

#include "text/encoder.h"

namespace halfstep {
namespace {

// A word, and the beginnings of an added token of each kind and of a character.
constexpr size_t kMostKeptBack = text::kMaxWordBytes + 1024;

}  // namespace

struct Tokenizer::State {
  text::Definition definition;
  bool drop_missing_bytes;
  mutable std::mutex mutex;
  mutable std::vector<std::unique_ptr<text::EncoderScratch>> idle{};  // warm caches, one a thread at work

  std::unique_ptr<text::EncoderScratch> take() const {
    {
      const std::lock_guard lock(mutex);
      if (!idle.empty()) {
        auto scratch = std::move(idle.back());
        idle.pop_back();
        return scratch;
      }
    }
    return std::make_unique<text::EncoderScratch>();
  }

  void give_back(std::unique_ptr<text::EncoderScratch> scratch) const {
    const std::lock_guard lock(mutex);
    idle.push_back(std::move(scratch));
  }

  struct Progress {
    size_t encoded_bytes;
    uint64_t next_offset;
    size_t dropped_bytes;
  };

  /// `offset`: of the text in the whole, for messages. `normalized`: see Encoder. An Error leaves both as
  /// they were.
  Progress encode(std::string_view text, bool open, std::string& normalized, std::vector<int32_t>& ids,
                  uint64_t offset) const {
    auto scratch = take();
    const size_t before = ids.size();
    std::string rest = normalized;
    text::Encoder encoder(definition, drop_missing_bytes, *scratch, ids, offset);
    try {
      const size_t done = encoder.encode(text, open, rest);
      normalized = std::move(rest);
      give_back(std::move(scratch));
      return {done, encoder.next_offset(), encoder.dropped_bytes()};
    } catch (...) {
      ids.resize(before);
      throw;
    }
  }

  // What a stream keeps back is then one word, with what may become an added token or a character behind it.
  bool keeps_back_one_word() const {
    return std::ranges::none_of(definition.stages, &text::Stage::add_prefix_space);
  }

  static std::shared_ptr<const State> make(text::Definition definition, const TokenizerOptions& options) {
    return std::shared_ptr<const State>(
        new State{.definition = std::move(definition),
                  .drop_missing_bytes = options.missing_bytes == MissingBytes::Drop,
                  .mutex = {}});
  }
};

Tokenizer::Tokenizer(std::shared_ptr<const State> state) : state_(std::move(state)) {}

Tokenizer Tokenizer::bytes() { return Tokenizer(State::make(text::bytes_definition(), {})); }

Tokenizer Tokenizer::from_file(const std::filesystem::path& path, const TokenizerOptions& options) {
  return Tokenizer(State::make(text::read_tokenizer_json(path), options));
}

Tokenizer Tokenizer::from_json(std::string_view text, const std::string& where,
                               const TokenizerOptions& options) {
  return Tokenizer(State::make(text::parse_tokenizer_json(text, where), options));
}

Tokenizer Tokenizer::from_gpt2(const std::filesystem::path& vocabulary, const std::filesystem::path& merges,
                               const TokenizerOptions& options) {
  return Tokenizer(State::make(text::read_gpt2_files(vocabulary, merges), options));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  encode(text, ids);
  return ids;
}

void Tokenizer::encode(std::string_view text, std::vector<int32_t>& ids) const {
  std::string normalized;
  state_->encode(text, /*open=*/false, normalized, ids, /*offset=*/0);
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  const auto& bytes_of_id = state_->definition.bytes_of_id;
  std::string text;
  for (size_t i = 0; i < ids.size(); ++i) {
    const bool known = ids[i] >= 0 && static_cast<size_t>(ids[i]) < bytes_of_id.size() &&
                       bytes_of_id[static_cast<size_t>(ids[i])];
    HALFSTEP_CHECK(known, "Tokenizer: the id ", ids[i], " at place ", i, " is not in the vocabulary of ",
                   vocabulary_size(), " ids. Was the text encoded by another tokenizer?");
    text += *bytes_of_id[static_cast<size_t>(ids[i])];
  }
  return text;
}

int64_t Tokenizer::vocabulary_size() const {
  return static_cast<int64_t>(state_->definition.bytes_of_id.size());
}

std::optional<int32_t> Tokenizer::id_of(std::string_view token) const {
  const std::string key(token);
  for (const auto* map : {&state_->definition.id_of_added, &state_->definition.id_of_bytes})
    if (const auto found = map->find(key); found != map->end()) return found->second;
  return std::nullopt;
}

TokenStream::TokenStream(Tokenizer tokenizer) : tokenizer_(std::move(tokenizer)) {}

void TokenStream::feed(std::string_view part, std::vector<int32_t>& ids) {
  pending_ += part;
  if (kept_back() >= enough_) encode(true, ids);
}

void TokenStream::finish(std::vector<int32_t>& ids) {
  encode(false, ids);
  text_offset_ = 0;
}

void TokenStream::encode(bool open, std::vector<int32_t>& ids) {
  const auto progress = tokenizer_.state_->encode(pending_, open, normalized_, ids, text_offset_);
  text_offset_ = progress.next_offset;
  pending_.erase(0, progress.encoded_bytes);
  dropped_bytes_ += progress.dropped_bytes;
  // One endless word is scanned again only when it has doubled: linear in all, not quadratic.
  enough_ = 2 * kept_back();
  if (!tokenizer_.state_->keeps_back_one_word()) return;
  if (kept_back() > kMostKeptBack) text::refuse_word_at(static_cast<int64_t>(text_offset_));
  enough_ = std::min(enough_, kMostKeptBack + 1);
}

}  // namespace halfstep
