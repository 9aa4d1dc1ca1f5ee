#include <ATen/ops/empty.h>
#include <halfstep/data.h>
#include <halfstep/error.h>

#include <algorithm>

#include "data/permutation.h"

namespace halfstep {

TokenBatches::TokenBatches(std::vector<TokenFile> files, const TokenBatchOptions& options)
    : files_(std::move(files)), options_(options) {
  HALFSTEP_CHECK(options.batch_size > 0 && options.sequence_length > 0, "TokenBatches: batch_size is ",
                 options.batch_size, " and sequence_length ", options.sequence_length,
                 "; both must be positive.");
  for (const TokenFile& file : files_) {
    const bool has_marks = file.format() == TokenFormat::Marked32;
    HALFSTEP_CHECK(first_window_.empty() || has_marks == has_marks_, "TokenBatches: ", file.path().string(),
                   has_marks ? " has" : " has no", " marks, and ", files_.front().path().string(),
                   has_marks_ ? " has." : " has none.", " Train on one kind at a time.");
    has_marks_ = has_marks;
    first_window_.push_back(windows_);
    windows_ += std::max<int64_t>(0, file.size() - 1) / options.sequence_length;
    tokens_ += file.size();
  }
  HALFSTEP_CHECK(windows_ > 0, "TokenBatches: ", files_.size(), " file(s) with ", tokens_,
                 " tokens in all hold no sequence of ", options.sequence_length,
                 " tokens and the one after it. Give more tokens, or a shorter sequence_length.");
  window_tokens_.resize(static_cast<size_t>(options.sequence_length) + 1);
  digest_ = digest();
}

int64_t TokenBatches::window_at(int64_t sequence) const {
  const int64_t place = sequence % windows_, epoch = sequence / windows_;
  if (!options_.shuffle) return place;
  return static_cast<int64_t>(permuted(static_cast<uint64_t>(place), static_cast<uint64_t>(windows_),
                                       options_.seed, static_cast<uint64_t>(epoch)));
}

void TokenBatches::read_window(int64_t window, int64_t row, TokenBatch& batch) {
  constexpr int64_t kNotLearned = -100;  // cross entropy's own number for it
  const auto after = std::upper_bound(first_window_.begin(), first_window_.end(), window);
  const auto file = static_cast<size_t>(after - first_window_.begin()) - 1;
  const int64_t length = options_.sequence_length, first = (window - first_window_[file]) * length;
  const auto row_of = [&](at::Tensor& tensor) { return tensor.mutable_data_ptr<int64_t>() + row * length; };
  int64_t* const targets = row_of(batch.targets);
  const auto fill = [&] {
    std::copy(window_tokens_.begin(), window_tokens_.end() - 1, row_of(batch.inputs));
    std::copy(window_tokens_.begin() + 1, window_tokens_.end(), targets);
  };
  if (!has_marks_) {
    files_[file].read(first, window_tokens_);
    fill();
    return;
  }
  window_marks_.resize(window_tokens_.size());
  files_[file].read(first, window_tokens_, window_marks_);
  fill();
  int64_t* const documents = row_of(batch.documents);
  for (int64_t i = 0; i < length; ++i) {
    const TokenMarks here = window_marks_[static_cast<size_t>(i)],
                     next = window_marks_[static_cast<size_t>(i) + 1];
    documents[i] = i == 0 ? 0 : documents[i - 1] + int64_t{here.begins_text};
    if (next.is_given || next.begins_text) targets[i] = kNotLearned;
  }
}

TokenBatch TokenBatches::next_part(int64_t part, int64_t parts) {
  HALFSTEP_CHECK(parts > 0 && part >= 0 && part < parts, "TokenBatches: part ", part, " of ", parts, ".");
  const int64_t left = windows_ - taken_ % windows_;
  const int64_t all = options_.shuffle ? options_.batch_size : std::min(options_.batch_size, left);
  const int64_t first = all * part / parts, rows = all * (part + 1) / parts - first;
  const int64_t length = options_.sequence_length;
  TokenBatch batch{at::empty({rows, length}, at::kLong), at::empty({rows, length}, at::kLong)};
  if (has_marks_) batch.documents = at::empty({rows, length}, at::kLong);
  for (int64_t row = 0; row < rows; ++row) read_window(window_at(taken_ + first + row), row, batch);
  taken_ += all;
  return batch;
}

/// Of every id, and of where a file ends and the next begins.
int64_t TokenBatches::digest() const {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const TokenFile& file : files_) hash = (hash ^ file.digest()) * 0x100000001b3;
  return static_cast<int64_t>(hash);
}

StateDict TokenBatches::state_dict() const {
  StateDict state;
  state.set("digest", digest_);
  state.set("sequences_taken", taken_);
  state.set("tokens", tokens_);
  state.set("windows", windows_);
  state.set("sequence_length", options_.sequence_length);
  state.set("seed", static_cast<int64_t>(options_.seed));
  state.set("shuffle", int64_t{options_.shuffle});
  return state;
}

void TokenBatches::load_state_dict(const StateDict& saved) {
  const StateDict own = state_dict();
  std::vector<std::string_view> names;
  for (const auto& [name, value] : own) names.push_back(name);
  saved.expect_exactly("TokenBatches", names);
  std::string differences;
  for (const std::string_view name : names) {
    if (name == "sequences_taken" || saved.integer(name) == own.integer(name)) continue;
    differences += differences.empty() ? "" : ", ";
    differences += name == "digest"
                       ? "other ids in the files"
                       : detail::concat(name, " ", saved.integer(name), " (here ", own.integer(name), ")");
  }
  HALFSTEP_CHECK(differences.empty(), "TokenBatches: the saved state is of other data: ", differences,
                 ". Resume with the files and options that it was saved with.");
  const int64_t taken = saved.integer("sequences_taken");
  HALFSTEP_CHECK(taken >= 0, "TokenBatches: the saved state has ", taken, " sequences taken.");
  taken_ = taken;
}

}  // namespace halfstep
