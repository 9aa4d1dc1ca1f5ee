#include "text/encoder.h"

#include <halfstep/error.h>

#include <algorithm>
#include <iomanip>
#include <iterator>
#include <utility>

#include "text/nfc.h"
#include "text/unicode_ranges.h"
#include "words/utf8.h"

namespace halfstep::text {
namespace {

/// What the pre-tokenizer Digits calls a digit.
bool is_digit(uint32_t code_point) {
  if (code_point < 0x80) return code_point >= '0' && code_point <= '9';
  const auto* const range = std::lower_bound(std::begin(kDigits), std::end(kDigits), code_point,
                                             [](const CodeRange& r, uint32_t p) { return r.last < p; });
  return range != std::end(kDigits) && range->first <= code_point;
}

}  // namespace

size_t Encoder::encode(std::string_view text, bool open, std::string& normalized) {
  if (definition_.stages.empty()) {
    for (const char c : text) ids_.push_back(definition_.model.id_of_byte[static_cast<uint8_t>(c)]);
    return text.size();
  }
  if (definition_.nfc) return encode_nfc(text, open, normalized);
  source_ = text;
  const size_t done = cut_at_added(definition_.first_added, text, open);
  source_offset_ += static_cast<int64_t>(done);
  return done;
}

size_t Encoder::encode_nfc(std::string_view text, bool open, std::string& normalized) {
  for (size_t at = 0;;) {
    const AddedTokens::Found found = definition_.first_added.find(text, at, open);
    const std::string_view piece = text.substr(at, found.begin - at);
    const bool piece_open = open && found.id == kNoToken;
    const size_t certain = piece_open ? settled_in_nfc(piece) : piece.size();
    append_nfc(piece.substr(0, certain), normalized);
    source_ = normalized;
    const size_t done = cut_at_added(definition_.second_added, normalized, piece_open);
    normalized.erase(0, done);
    source_offset_ += static_cast<int64_t>(done);
    if (found.id == kNoToken) return at + certain;
    ids_.push_back(found.id);
    source_offset_ += static_cast<int64_t>(found.end - found.begin);
    at = found.end;
  }
}

size_t Encoder::cut_at_added(const AddedTokens& tokens, std::string_view text, bool open) {
  const bool first = &tokens == &definition_.first_added;
  const auto between = [&](std::string_view piece, bool piece_open) {
    return first ? cut_at_added(definition_.second_added, piece, piece_open)
                 : cut_at_invalid(piece, piece_open);
  };
  for (size_t at = 0;;) {
    const AddedTokens::Found found = tokens.find(text, at, open);
    const std::string_view piece = text.substr(at, found.begin - at);
    if (found.id == kNoToken) return at + between(piece, open);
    between(piece, false);
    ids_.push_back(found.id);
    at = found.end;
  }
}

// A byte that belongs to no valid code point is a word of its own, so that every text comes back whole.
size_t Encoder::cut_at_invalid(std::string_view text, bool open) {
  for (size_t at = 0;;) {
    const size_t valid = valid_bytes_from(text, at);
    const bool to_the_end = at + valid == text.size();
    const bool cut_short = !to_the_end && code_point_at(text, at + valid).cut_short;
    const bool piece_open = open && (to_the_end || cut_short);
    const size_t done = run_stage(0, text.substr(at, valid), piece_open);
    if (to_the_end || piece_open) return at + done;
    append(text.substr(at + valid, 1));
    at += valid + 1;
  }
}

size_t Encoder::run_stage(size_t stage, std::string_view text, bool open) {
  if (text.empty()) return 0;
  if (stage == definition_.stages.size()) {
    if (open) return 0;  // a word that may grow
    append(text);
    return text.size();
  }
  return definition_.stages[stage].kind == Stage::Kind::Digits ? cut_at_digits(stage, text, open)
                                                               : cut_by_pattern(stage, text, open);
}

size_t Encoder::cut_at_digits(size_t stage, std::string_view text, bool open) {
  const bool one_by_one = definition_.stages[stage].digits_one_by_one;
  size_t begin = 0;
  bool in_digits = false;
  for (size_t at = 0; at < text.size();) {
    const CodePoint point = code_point_at(text, at);
    const bool digit = is_digit(point.value);
    if (at > begin && (digit != in_digits || (digit && one_by_one))) {
      run_stage(stage + 1, text.substr(begin, at - begin), false);
      begin = at;
    }
    in_digits = digit;
    at += point.bytes;
  }
  const bool may_grow = open && !(in_digits && one_by_one);
  return begin + run_stage(stage + 1, text.substr(begin), may_grow);
}

size_t Encoder::cut_by_pattern(size_t stage, std::string_view text, bool open) {
  const Stage& here = definition_.stages[stage];
  if (here.add_prefix_space) {
    if (open) return 0;  // what is left would be given a space again
    if (text[0] != ' ') return cut_with_space(stage, text);
  }
  if (!here.pattern) return run_stage(stage + 1, text, open);
  for (size_t at = 0; at < text.size();) {
    Match match;
    const Search search = here.pattern->find(text, at, open, scratch_.match, match);
    if (search == Search::NeedsMoreText) return at;
    if (search == Search::None) match = {text.size(), text.size()};
    if (match.begin > at) run_stage(stage + 1, text.substr(at, match.begin - at), false);
    run_stage(stage + 1, text.substr(match.begin, match.end - match.begin), false);
    at = match.end;
  }
  return text.size();
}

size_t Encoder::cut_with_space(size_t stage, std::string_view text) {
  const std::string with_space = std::string(1, ' ').append(text);
  const int64_t offset = offset_of(text);
  const std::string_view source = std::exchange(source_, with_space);
  const int64_t source_offset = std::exchange(source_offset_, offset);
  source_spaces_ = 1;
  cut_by_pattern(stage, with_space, false);
  source_ = source;
  source_offset_ = source_offset;
  source_spaces_ = 0;
  return text.size();
}

int64_t Encoder::offset_of(std::string_view piece) const {
  return source_offset_ + std::max<int64_t>(piece.data() - source_.data() - source_spaces_, 0);
}

void Encoder::append(std::string_view word) {
  if (const auto known = scratch_.cache.find(word); !known.empty()) {
    ids_.insert(ids_.end(), known.begin(), known.end());
    return;
  }
  if (word.size() > kMaxWordBytes) refuse_word_at(offset_of(word));
  if (definition_.whole_words_first) {
    if (const auto whole = definition_.id_of_bytes.find(std::string(word));
        whole != definition_.id_of_bytes.end()) {
      ids_.push_back(whole->second);
      scratch_.cache.put(word, {&whole->second, 1});
      return;
    }
  }
  const size_t begin = ids_.size();
  const size_t missing = append_word(definition_.model, word, scratch_.bpe, ids_);
  if (missing == 0) {
    scratch_.cache.put(word, {ids_.data() + begin, ids_.size() - begin});
    return;
  }
  if (!drop_missing_bytes_) {
    const auto lacks = [&](char c) {
      return definition_.model.id_of_byte[static_cast<uint8_t>(c)] == kNoToken;
    };
    const auto byte = static_cast<uint8_t>(*std::ranges::find_if(word, lacks));
    detail::throw_error(detail::concat("Tokenizer: the text has a byte 0x", std::hex, std::setw(2),
                                       std::setfill('0'), int{byte}, std::dec,
                                       ", for which this vocabulary has no token. MissingBytes::Drop leaves "
                                       "such bytes out, as `tokenizers` does."));
  }
  dropped_bytes_ += missing;
}

void refuse_word_at(int64_t offset) {
  detail::throw_error(
      detail::concat("Tokenizer: a word of more than ", kMaxWordBytes >> 20, " MiB begins at byte ", offset,
                     " of the text: nothing in it ends a word. Is it text? If so, break its lines first."));
}

}  // namespace halfstep::text
