#include "text/nfc.h"

#include <halfstep/error.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <vector>

#include "text/unicode_ranges.h"
#include "words/utf8.h"

namespace halfstep::text {
namespace {

/// Whether NFC treats what begins with this code point without regard to what stands before it, and keeps the
/// code point if no mark follows.
bool is_settled(uint32_t code_point) {
  if (code_point < kNotSettledInNfc[0].first) return true;
  const auto* const range =
      std::lower_bound(std::begin(kNotSettledInNfc), std::end(kNotSettledInNfc), code_point,
                       [](const CodeRange& r, uint32_t p) { return r.last < p; });
  return range == std::end(kNotSettledInNfc) || range->first > code_point;
}

int combining_class(int32_t code_point) { return utf8proc_get_property(code_point)->combining_class; }

/// Marks behind a starter, by class; those of one class stay in their order. utf8proc's own sort takes
/// quadratic time, and a file may hold nothing but marks.
void sort_marks(std::vector<int32_t>& points) {
  for (auto at = points.begin(); at != points.end();) {
    at = std::find_if(at, points.end(), [](int32_t p) { return combining_class(p) != 0; });
    const auto end = std::find_if(at, points.end(), [](int32_t p) { return combining_class(p) == 0; });
    if (end - at > 1) {
      std::vector<std::vector<int32_t>> by_class(256);
      for (auto mark = at; mark != end; ++mark)
        by_class[static_cast<size_t>(combining_class(*mark))].push_back(*mark);
      auto place = at;
      for (const std::vector<int32_t>& marks : by_class) place = std::copy(marks.begin(), marks.end(), place);
    }
    at = end;
  }
}

/// `part` is valid UTF-8 of more than one code point, or of one that is not settled.
void append_composed(std::string_view part, std::string& normalized) {
  constexpr auto kOptions = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  std::vector<int32_t> points;
  for (size_t at = 0; at < part.size();) {
    const CodePoint point = code_point_at(part, at);
    const auto value = static_cast<int32_t>(point.value);
    at += point.bytes;
    // A mark that is newer than the Unicode of `tokenizers`: a starter there.
    if (points.empty() && is_settled(point.value) && combining_class(value) != 0) {
      append_utf8(point.value, normalized);
      continue;
    }
    std::array<int32_t, 8> pieces{};  // NFD has up to 4
    int last_boundary_class = 0;
    const auto count =
        utf8proc_decompose_char(value, pieces.data(), pieces.size(), kOptions, &last_boundary_class);
    if (count < 0 || count > std::ssize(pieces)) HALFSTEP_BUG("utf8proc: code point ", value, ": ", count);
    points.insert(points.end(), pieces.begin(), pieces.begin() + count);
  }
  sort_marks(points);
  const auto count = utf8proc_normalize_utf32(points.data(), std::ssize(points), kOptions);
  if (count < 0) HALFSTEP_BUG("utf8proc: ", utf8proc_errmsg(count));
  points.resize(static_cast<size_t>(count));
  for (const int32_t point : points) append_utf8(static_cast<uint32_t>(point), normalized);
}

}  // namespace

void append_nfc(std::string_view text, std::string& normalized) {
  size_t copied = 0;      // of the text, so far
  size_t begin = 0;       // of the part that NFC treats by itself
  bool is_simple = true;  // that part is its own form NFC
  const auto end_part = [&](size_t end) {
    if (!is_simple) {
      normalized.append(text.substr(copied, begin - copied));
      append_composed(text.substr(begin, end - begin), normalized);
      copied = end;
    }
    begin = end;
    is_simple = true;
  };
  for (size_t at = 0; at < text.size();) {
    if (static_cast<uint8_t>(text[at]) < 0x80) {
      end_part(at++);
      continue;
    }
    const CodePoint point = code_point_at(text, at);
    if (point.bytes == 0) {
      end_part(at++);
      begin = at;
      continue;
    }
    if (is_settled(point.value))
      end_part(at);
    else
      is_simple = false;
    at += point.bytes;
  }
  end_part(text.size());
  normalized.append(text.substr(copied));
}

std::string nfc_of(std::string_view text) {
  std::string normalized;
  append_nfc(text, normalized);
  return normalized;
}

size_t settled_in_nfc(std::string_view text) {
  size_t settled = 0;
  for (size_t at = 0; at < text.size();) {
    if (static_cast<uint8_t>(text[at]) < 0x80) {
      settled = at++;
      continue;
    }
    const CodePoint point = code_point_at(text, at);
    if (point.bytes == 0) {
      if (point.cut_short) return settled;
      settled = ++at;
      continue;
    }
    if (is_settled(point.value)) settled = at;
    at += point.bytes;
  }
  return settled;
}

}  // namespace halfstep::text
