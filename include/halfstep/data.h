// Data to train on, as tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/config.h>
#include <halfstep/state_dict.h>
#include <halfstep/token_file.h>

#include <cstdint>
#include <filesystem>
#include <vector>

namespace halfstep {

/// Sequences to train on.
struct TokenBatch {
  at::Tensor inputs;   ///< int64, [sequences, sequence_length]
  at::Tensor targets;  ///< the token after each; -100 where it is not to be learned
  /// Which text of its sequence each belongs to, from 0 on, where files have marks: what
  /// CausalLM::forward_packed takes. Otherwise undefined.
  at::Tensor documents{};
};

/// How TokenBatches cuts its files, and in which order the windows come.
struct TokenBatchOptions {
  int64_t batch_size = 0;       ///< sequences a batch; must be given
  int64_t sequence_length = 0;  ///< tokens a sequence; must be given
  uint64_t seed = 0;            ///< of the order
  bool shuffle = true;          ///< false: in the order of the files, for evaluation
};

/// Batches from token files, in an order that only the seed decides, resumable at any step.
///
/// Each file is cut into windows of `sequence_length` inputs; a window's last target is the next one's first
/// input, and what is left at the end of a file is too short for a window and never used. Every window comes
/// once an epoch, in an order of its own for each epoch, which is computed, not stored: a trillion tokens
/// need no more memory than a thousand.
///
/// Shuffled, every batch is full: one that reaches the end of an epoch continues with the next. In order, the
/// last batch of an epoch has fewer sequences where the windows do not divide, so that an evaluation sees
/// each window once.
///
/// Files with marks (TokenFormat::Marked32) give targets of -100 for tokens that are given and for those that
/// begin a text, and `documents`. Either all files have marks, or none.
///
/// Remembers one number between batches, how many sequences were taken: a run resumed from `state_dict()`
/// sees the same batches, bit for bit, even with another batch size from there on. Not thread-safe.
class HALFSTEP_API TokenBatches {
 public:
  TokenBatches(std::vector<TokenFile> files, const TokenBatchOptions& options);

  /// The next batch. Epochs follow each other without an end.
  TokenBatch next() { return next_part(0, 1); }
  /// Of the next batch, the rows of part `part` of `parts`: for ranks, each of which takes one. All of the
  /// batch counts as taken. There may be fewer rows than parts.
  TokenBatch next_part(int64_t part, int64_t parts);

  int64_t windows() const { return windows_; }         ///< sequences an epoch
  int64_t epoch() const { return taken_ / windows_; }  ///< of the next sequence, from 0
  int64_t sequences_taken() const { return taken_; }

  /// How many sequences were taken, and of which files.
  StateDict state_dict() const;
  /// An Error that lists all that differ if the state is of other files, another seed or sequence length.
  void load_state_dict(const StateDict& saved);

 private:
  int64_t window_at(int64_t sequence) const;
  int64_t digest() const;
  void read_window(int64_t window, int64_t row, TokenBatch& batch);

  std::vector<TokenFile> files_;
  std::vector<int64_t> first_window_;  ///< of each file
  TokenBatchOptions options_;
  int64_t windows_ = 0;
  int64_t tokens_ = 0;
  int64_t taken_ = 0;
  int64_t digest_ = 0;
  bool has_marks_ = false;
  std::vector<int64_t> window_tokens_;
  std::vector<TokenMarks> window_marks_;
};

/// Images to train on.
struct ImageBatch {
  at::Tensor images;  ///< FP32, [images, 1, height, width]
  at::Tensor labels;  ///< int64, [images]
};

/// How ImageBatches normalizes its images, and in which order they come.
struct ImageBatchOptions {
  int64_t batch_size = 0;  ///< images a batch; must be given
  double mean = 0.0;       ///< subtracted from each pixel, where black is 0 and white 1
  double deviation = 1.0;  ///< and this divides it
  uint64_t seed = 0;       ///< of the order
  bool shuffle = true;     ///< false: as they lie, for evaluation
};

/// Batches of grey images, kept in memory as bytes. Order, ends of epochs and resuming are as in
/// TokenBatches.
class HALFSTEP_API ImageBatches {
 public:
  /// Bytes [count, height, width] and one label each, as read_idx gives them.
  ImageBatches(at::Tensor images, at::Tensor labels, const ImageBatchOptions& options);

  /// The next batch, as TokenBatches::next.
  ImageBatch next() { return next_part(0, 1); }
  /// As TokenBatches::next_part.
  ImageBatch next_part(int64_t part, int64_t parts);

  int64_t count() const { return images_.size(0); }  ///< images

  /// As those of TokenBatches.
  StateDict state_dict() const;
  void load_state_dict(const StateDict& saved);

 private:
  at::Tensor images_, labels_;
  ImageBatchOptions options_;
  int64_t taken_ = 0;
  int64_t byte_sum_ = 0;
};

/// An IDX file (MNIST, Fashion-MNIST), compressed with gzip or not, in its own type and shape.
HALFSTEP_API at::Tensor read_idx(const std::filesystem::path& path);

}  // namespace halfstep
