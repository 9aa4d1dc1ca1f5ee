#include "log/log_end.h"

#include <halfstep/error.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <span>
#include <string_view>

#include "words/names.h"
#include "io/input_file.h"
#include "log/record_text.h"

namespace halfstep::log {
namespace {

constexpr size_t kLongestLine = size_t{64} << 20;

struct LineStep {
  int64_t step;
  bool of_step;  // a record of kind "step", or a row
};

std::optional<int64_t> integer_before(std::string_view text, char end) {
  int64_t value = 0;
  const auto [stop, fault] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (fault != std::errc{} || stop == text.data() + text.size() || *stop != end || value < 0) return {};
  return value;
}

/// {"kind":"step","step":17, ...: no more of the line is read, a log may have millions of them.
std::optional<LineStep> step_of_record(std::string_view line) {
  constexpr std::string_view kKind = "{\"kind\":\"", kStep = "\",\"step\":";
  if (!line.starts_with(kKind) || !line.ends_with('}')) return {};
  line.remove_prefix(kKind.size());
  const size_t end = line.find('"');
  if (end == std::string_view::npos || !line.substr(end).starts_with(kStep)) return {};
  const std::optional<int64_t> step = integer_before(line.substr(end + kStep.size()), ',');
  if (!step) return {};
  return LineStep{.step = *step, .of_step = line.substr(0, end) == "step"};
}

std::optional<LineStep> step_of_row(std::string_view line) {
  const std::optional<int64_t> step = integer_before(line, ',');
  if (!step) return {};
  return LineStep{.step = *step, .of_step = true};
}

/// `take` gets every whole line, without its \n, and says whether to go on.
template <typename Take>
void each_line(const std::filesystem::path& path, Take take) {
  constexpr size_t kBlockBytes = size_t{1} << 20;
  const files::InputFile file(path);
  std::string text;  // from the beginning of a line on
  for (uint64_t offset = 0; offset < file.size();) {
    const size_t before = text.size();
    text.resize(before + std::min<uint64_t>(kBlockBytes, file.size() - offset));
    file.read(offset, std::as_writable_bytes(std::span(text).subspan(before)));
    offset += text.size() - before;
    size_t begin = 0;
    for (size_t end = text.find('\n', before); end != std::string::npos; end = text.find('\n', begin)) {
      if (!take(std::string_view(text).substr(begin, end - begin))) return;
      begin = end + 1;
    }
    text.erase(0, begin);
    if (text.size() > kLongestLine) return;  // no record of ours: as a last line that was cut
  }
}

/// Lines that are no records. A power cut leaves them behind what was synced: they are cut off with the
/// records of later steps. In the middle of a log they are somebody's damage.
class Rubbish {
 public:
  explicit Rubbish(const std::filesystem::path& path) : path_(path) {}

  bool note(int64_t number, std::string_view line) {
    HALFSTEP_CHECK(number > 1, path_.string(),
                   ": line 1 is no record of Halfstep's: ", in_quotes(line),
                   ". Move the file away; a resumed run then begins a new one.");
    if (first_ == 0) {
      first_ = number;
      text_ = in_quotes(line);
    }
    return true;  // to the next line
  }

  void check_nothing_follows(int64_t number) const {
    HALFSTEP_CHECK(first_ == 0, path_.string(), ": line ", first_, " is no record of Halfstep's: ", text_,
                   ", and line ", number,
                   " behind it is. Move the file away; a resumed run then begins a new one.");
  }

 private:
  const std::filesystem::path& path_;
  int64_t first_ = 0;
  std::string text_;
};

}  // namespace

LogEnd end_of_jsonl(const std::filesystem::path& path, int64_t step) {
  LogEnd end;
  int64_t number = 0;
  Rubbish rubbish(path);
  each_line(path, [&](std::string_view line) {
    ++number;
    const std::optional<LineStep> found = step_of_record(line);
    if (!found) return rubbish.note(number, line);
    if (found->step > step) return false;
    rubbish.check_nothing_follows(number);
    end.bytes += line.size() + 1;
    end.latest_step = std::max(end.latest_step, found->step);
    if (found->of_step) end.step_record = line;
    return true;
  });
  return end;
}

LogEnd end_of_csv(const std::filesystem::path& path, int64_t step) {
  LogEnd end;
  int64_t number = 0;
  Rubbish rubbish(path);
  each_line(path, [&](std::string_view line) {
    ++number;
    const bool columns = number == 1;
    const std::optional<LineStep> found = columns ? LineStep{.step = 0, .of_step = false} : step_of_row(line);
    HALFSTEP_CHECK(!columns || line == kCsvColumns.substr(0, kCsvColumns.size() - 1), path.string(),
                   ": line 1 is not the columns of this version's log: ", in_quotes(line),
                   ". Move the file away; a resumed run then begins a new one.");
    if (!found) return rubbish.note(number, line);
    if (found->step > step) return false;
    rubbish.check_nothing_follows(number);
    end.bytes += line.size() + 1;
    end.latest_step = std::max(end.latest_step, found->step);
    return true;
  });
  return end;
}

}  // namespace halfstep::log
