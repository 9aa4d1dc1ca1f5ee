#include "train/examples.h"

#include <halfstep/error.h>

#include <algorithm>
#include <span>

namespace halfstep::train {
namespace {

void append(Example& example, const std::vector<int32_t>& ids, bool is_given) {
  example.ids.insert(example.ids.end(), ids.begin(), ids.end());
  example.marks.resize(example.ids.size(), {.is_given = is_given});
}

/// What is given before an answer that is the first message: a template need not render an empty
/// conversation, and may write a system message of its own before the answer. Hence all up to the words that
/// begin an answer, the ones that the template writes behind a conversation for the next.
std::string before_first_answer(const ChatTemplate& chat, std::span<const ChatMessage> answer) {
  const std::string whole = chat.render(answer, /*add_generation_prompt=*/false);
  const std::string asking = chat.render(answer, /*add_generation_prompt=*/true);
  if (!asking.starts_with(whole)) return asking;  // refused by whoever compares it with the whole
  const std::string begins_answer = asking.substr(whole.size());
  const std::size_t at = whole.find(begins_answer);
  return at == whole.npos ? asking : whole.substr(0, at + begins_answer.size());
}

}  // namespace

Example ExampleReader::read(const TextRecord& record) const {
  Example example;
  if (record.kind == RecordKind::Prompt) {
    append(example, tokenizer.encode(record.prompt), /*is_given=*/true);
    append(example, tokenizer.encode(record.completion), /*is_given=*/false);
    if (end) append(example, {*end}, /*is_given=*/false);
  }
  std::string written;
  const auto grow_to = [&](std::string text, std::size_t message, bool is_given) {
    HALFSTEP_CHECK(text.starts_with(written), "the chat template writes message ", message + 1,
                   " not after its text of the earlier messages, so the text of this message cannot be "
                   "determined. Only templates that append each message can be used for training.");
    append(example, tokenizer.encode(std::string_view(text).substr(written.size())), is_given);
    written = std::move(text);
  };
  const std::span<const ChatMessage> messages(record.messages);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].role != "assistant") continue;
    HALFSTEP_CHECK(chat,
                   "has messages, and the model has no chat template. Name one with data.chat_template.");
    grow_to(i == 0 ? before_first_answer(*chat, messages.first(1))
                   : chat->render(messages.first(i), /*add_generation_prompt=*/true),
            i, /*is_given=*/true);
    grow_to(chat->render(messages.first(i + 1), /*add_generation_prompt=*/false), i, /*is_given=*/false);
  }
  if (!example.marks.empty()) example.marks.front().begins_text = true;
  return example;
}

namespace {

// More find room for what is short, and cost memory and the order of the file.
constexpr std::size_t kMostOpen = 64;

bool is_learned(TokenMarks marks) { return !marks.is_given && !marks.begins_text; }

}  // namespace

ExamplePacker::ExamplePacker(TokenFileWriter& out, int64_t length, int32_t filler)
    : out_(out), length_(static_cast<std::size_t>(length)), filler_(filler) {}

void ExamplePacker::add(Example example) {
  const bool is_long = example.ids.size() > length_;
  if (is_long) {
    example.ids.resize(length_);
    example.marks.resize(length_);
  }
  if (std::ranges::none_of(example.marks, is_learned)) {
    ++(is_long ? too_long_ : nothing_to_learn_);
    return;
  }
  ++examples_;
  cut_ += is_long ? 1 : 0;
  // The fullest one with room for it.
  const auto place = [&] {
    auto best = open_.end();
    for (auto one = open_.begin(); one != open_.end(); ++one)
      if (one->ids.size() + example.ids.size() <= length_ &&
          (best == open_.end() || one->ids.size() > best->ids.size()))
        best = one;
    if (best != open_.end()) return best;
    if (open_.size() == kMostOpen) {
      const auto tokens = [](const Example& one) { return one.ids.size(); };
      const auto fullest = std::ranges::max_element(open_, {}, tokens);
      write(*fullest);
      *fullest = {};
      return fullest;
    }
    open_.emplace_back();
    return open_.end() - 1;
  }();
  place->ids.insert(place->ids.end(), example.ids.begin(), example.ids.end());
  place->marks.insert(place->marks.end(), example.marks.begin(), example.marks.end());
}

void ExamplePacker::write(Example& sequence) {
  const std::size_t used = sequence.ids.size();
  fillers_ += static_cast<int64_t>(length_ - used);
  sequence.ids.resize(length_, filler_);
  sequence.marks.resize(length_, {.is_given = true});
  if (used < length_) sequence.marks[used].begins_text = true;
  out_.append(sequence.ids, sequence.marks);
  ++sequences_;
}

void ExamplePacker::finish() {
  for (Example& sequence : open_) write(sequence);
  open_.clear();
  const TokenMarks last{.begins_text = true, .is_given = true};
  out_.append({&filler_, 1}, {&last, 1});
}

}  // namespace halfstep::train
