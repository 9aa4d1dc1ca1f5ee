#include "text/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <halfstep/error.h>
#include <pcre2.h>

#include <array>
#include <cstdio>
#include <limits>
#include <mutex>
#include <new>
#include <span>
#include <string>

#include "text/unicode_ranges.h"

namespace halfstep::text {
namespace {

constexpr KnownPattern kKnown[] = {
    {"GPT-2", R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"},
    {"Llama-3",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    {"Qwen2",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    {"GPT-4o",
     R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    {"Tekken",
     R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
};

std::string items(std::span<const CodeRange> ranges) {
  std::string text;
  std::array<char, 32> item{};
  for (const CodeRange& range : ranges) {
    std::snprintf(item.data(), item.size(), R"(\x{%X}-\x{%X})", range.first, range.last);
    text += item.data();
  }
  return text;
}

struct ClassItems {
  std::string_view name;
  std::string items;
};

// What stands for a class inside brackets. The ASCII members come first and by range: PCRE2 keeps those in a
// bitmap, where a property costs a look into its tables.
const std::array<ClassItems, 9>& class_items() {
  static const std::array<ClassItems, 9> all = {{
      {R"(\p{L})", R"(A-Za-z\p{L})" + items(kNewL)},
      {R"(\p{N})", R"(0-9\p{N})" + items(kNewN)},
      {R"(\p{Lu})", R"(A-Z\p{Lu})" + items(kNewLu)},
      {R"(\p{Ll})", R"(a-z\p{Ll})" + items(kNewLl)},
      {R"(\p{Lt})", R"(\p{Lt})"},
      {R"(\p{Lm})", R"(\p{Lm})" + items(kNewLm)},
      {R"(\p{Lo})", R"(\p{Lo})" + items(kNewLo)},
      {R"(\p{M})", R"(\p{M})" + items(kNewM)},
      {R"(\s)", items(kSpaces)},  // Unicode 14's \s has one code point more, U+180E
  }};
  return all;
}

// PCRE2 10.42 knows the letters of Unicode 14, the package `tokenizers` those of Unicode 16.
std::string with_own_classes(std::string_view expression) {
  std::string text;
  bool inside = false;
  for (size_t at = 0; at < expression.size();) {
    const std::string_view rest = expression.substr(at);
    const ClassItems* found = nullptr;
    for (const ClassItems& candidate : class_items())
      if (rest.starts_with(candidate.name)) found = &candidate;
    if (found != nullptr) {
      text += inside ? found->items : "[" + found->items + "]";
      at += found->name.size();
    } else if (rest.starts_with(R"(\S)")) {
      text += "[^" + items(kSpaces) + "]";
      at += 2;
    } else {
      if (rest[0] == '[' || rest[0] == ']') inside = rest[0] == '[';
      text += rest[0];
      ++at;
    }
  }
  return text;
}

std::string message_of(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

/// How long a match may take.
class MatchLimits {
 public:
  MatchLimits() : context_(pcre2_match_context_create(nullptr)) {
    if (context_ == nullptr) throw std::bad_alloc();
    // PCRE2's own limit of 10 million steps back is there for expressions that take exponential time. The
    // known ones take one step back a character, and a run of 11 million spaces is a valid text.
    pcre2_set_match_limit(context_, std::numeric_limits<uint32_t>::max());
  }
  ~MatchLimits() { pcre2_match_context_free(context_); }
  MatchLimits(const MatchLimits&) = delete;
  MatchLimits& operator=(const MatchLimits&) = delete;

  pcre2_match_context* context() const { return context_; }

 private:
  pcre2_match_context* context_;
};

pcre2_match_context* match_limits() {
  static const MatchLimits limits;  // matching only reads it, so threads share it
  return limits.context();
}

bool is_limit(int result) {
  return result == PCRE2_ERROR_MATCHLIMIT || result == PCRE2_ERROR_DEPTHLIMIT ||
         result == PCRE2_ERROR_HEAPLIMIT || result == PCRE2_ERROR_JIT_STACKLIMIT ||
         result == PCRE2_ERROR_NOMEMORY;
}

// Compiled once for all who use it at a time.
std::shared_ptr<const Pattern> shared_pattern(size_t index) {
  static std::mutex mutex;
  static std::array<std::weak_ptr<const Pattern>, std::size(kKnown)> all;
  const std::lock_guard lock(mutex);
  auto pattern = all[index].lock();
  if (!pattern) all[index] = pattern = std::make_shared<Pattern>(kKnown[index].expression);
  return pattern;
}

pcre2_code* code_of(void* it) { return static_cast<pcre2_code*>(it); }
pcre2_match_data* data_of(void* it) { return static_cast<pcre2_match_data*>(it); }

}  // namespace

std::span<const KnownPattern> known_patterns() { return kKnown; }

MatchScratch::MatchScratch() : data_(pcre2_match_data_create(1, nullptr)) {
  if (data_ == nullptr) throw std::bad_alloc();
}

MatchScratch::~MatchScratch() { pcre2_match_data_free(data_of(data_)); }

std::shared_ptr<const Pattern> Pattern::named_by(std::string_view expression) {
  for (size_t i = 0; i < std::size(kKnown); ++i)
    if (expression == kKnown[i].expression) return shared_pattern(i);
  return nullptr;
}

std::shared_ptr<const Pattern> Pattern::gpt2() { return shared_pattern(0); }

Pattern::Pattern(std::string_view expression) {
  const std::string text = with_own_classes(expression);
  int fault = 0;
  PCRE2_SIZE place = 0;
  code_ = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), PCRE2_UTF | PCRE2_UCP, &fault,
                        &place, nullptr);
  if (code_ == nullptr) HALFSTEP_BUG("PCRE2 refuses '", text, "' at ", place, ": ", message_of(fault));
  // Without JIT (a PCRE2 built without it) the matches are the same, only slower.
  pcre2_jit_compile(code_of(code_), PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD);
}

Pattern::~Pattern() { pcre2_code_free(code_of(code_)); }

Search Pattern::find(std::string_view text, size_t from, bool open, MatchScratch& scratch,
                     Match& match) const {
  const uint32_t options = PCRE2_NO_UTF_CHECK | (open ? PCRE2_PARTIAL_HARD : 0u);
  const int result = pcre2_match(code_of(code_), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                                 options, data_of(scratch.data_), match_limits());
  if (result == PCRE2_ERROR_PARTIAL) return Search::NeedsMoreText;
  if (result == PCRE2_ERROR_NOMATCH) return open ? Search::NeedsMoreText : Search::None;
  HALFSTEP_CHECK(!is_limit(result), "Tokenizer: PCRE2 cannot cut a text of ", text.size() - from,
                 " bytes into words: ", message_of(result), ". Give it in smaller parts.");
  if (result < 0) HALFSTEP_BUG("PCRE2 failed on ", text.size() - from, " bytes: ", message_of(result));
  const PCRE2_SIZE* const ends = pcre2_get_ovector_pointer(data_of(scratch.data_));
  match = {ends[0], ends[1]};
  return Search::Found;
}

}  // namespace halfstep::text
