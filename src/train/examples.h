// Instruction data: what is learned of a record, and many of them side by side in sequences of one length.
#pragma once

#include <halfstep/chat_template.h>
#include <halfstep/text_files.h>
#include <halfstep/token_file.h>
#include <halfstep/tokenizer.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace halfstep::train {

/// A text to learn from, a mark for each token.
struct Example {
  std::vector<int32_t> ids{};
  std::vector<TokenMarks> marks{};
};

/// What makes tokens of records.
struct ExampleReader {
  Tokenizer tokenizer;
  std::optional<ChatTemplate> chat{};
  std::optional<int32_t> end{};  ///< put behind a completion, if there is one

  /// Given are the prompt, or all that the template writes up to an answer of the assistant; learned is what
  /// follows up to the next. Each stretch is encoded by itself, as a prompt is when the model is asked.
  /// Messages behind the last answer are left out.
  Example read(const TextRecord& record) const;
};

/// Puts examples into sequences of `length` tokens, none across the end of one, and fills those up.
class ExamplePacker {
 public:
  ExamplePacker(TokenFileWriter& out, int64_t length, int32_t filler);

  /// One that is longer is cut; one of which then nothing is learned is left out.
  void add(Example example);
  /// Writes what is still open, and the token that the last sequence's last one is followed by.
  void finish();

  int64_t examples() const { return examples_; }
  int64_t sequences() const { return sequences_; }
  int64_t cut() const { return cut_; }
  /// Left out because what is given fills the sequence.
  int64_t too_long() const { return too_long_; }
  /// Left out because no token is learned, whatever the length: an empty answer, for instance.
  int64_t nothing_to_learn() const { return nothing_to_learn_; }
  int64_t fillers() const { return fillers_; }

 private:
  void write(Example& sequence);

  TokenFileWriter& out_;
  std::size_t length_;
  int32_t filler_;
  std::vector<Example> open_;
  int64_t examples_ = 0, sequences_ = 0, cut_ = 0, too_long_ = 0, nothing_to_learn_ = 0, fillers_ = 0;
};

}  // namespace halfstep::train
