#include <halfstep/error.h>
#include <halfstep/event_file.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "log/append_file.h"
#include "log/crc32c.h"
#include "words/utf8.h"

namespace halfstep::log {
namespace {

// The part of protobuf's wire format that event files need: https://protobuf.dev/programming-guides/encoding.

static_assert(std::endian::native == std::endian::little,
              "fixed-width fields are copied as they are in memory");

template <typename Number>
void put_fixed(std::string& out, Number value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

/// One message, field by field.
class Message {
 public:
  void clear() { bytes_.clear(); }
  std::string_view bytes() const { return bytes_; }

  void integer(uint32_t field, int64_t value) {
    tag(field, 0);
    varint(static_cast<uint64_t>(value));
  }
  void fixed(uint32_t field, double value) {
    tag(field, 1);
    put_fixed(bytes_, value);
  }
  void fixed(uint32_t field, float value) {
    tag(field, 5);
    put_fixed(bytes_, value);
  }
  /// A string, or a message within.
  void block(uint32_t field, std::string_view content) {
    tag(field, 2);
    varint(content.size());
    bytes_ += content;
  }
  void packed(uint32_t field, std::span<const double> values) {
    block(field, {reinterpret_cast<const char*>(values.data()), values.size_bytes()});
  }

 private:
  void tag(uint32_t field, uint32_t wire_type) { varint(field << 3 | wire_type); }
  void varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

}  // namespace
}  // namespace halfstep::log

namespace halfstep {
namespace {

using log::AppendFile;
using log::Message;

constexpr size_t kBlockBytes = size_t{64} << 10;
// A disk that stays full for days must not fill the memory as well.
constexpr size_t kMostRefused = size_t{64} << 20;
constexpr int kTimeDigits = 10;  // of Unix time, from 2001 to 2286

// Field numbers of TensorFlow's event.proto and summary.proto.
namespace event {
constexpr uint32_t kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7;
}
namespace summary {
constexpr uint32_t kValue = 1;
}
namespace value {
constexpr uint32_t kTag = 1, kSimpleValue = 2, kHistogram = 5;
}
namespace histogram_proto {
constexpr uint32_t kMin = 1, kMax = 2, kCount = 3, kSum = 4, kSumOfSquares = 5, kLimits = 6, kCounts = 7;
}
namespace session_log {
constexpr uint32_t kStatus = 1;
constexpr int64_t kStart = 1;
}  // namespace session_log

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string host() {
  char name[256] = "";
  if (::gethostname(name, sizeof name - 1) != 0 || name[0] == '\0') return "localhost";
  return name;
}

constexpr std::string_view kPrefix = "events.out.tfevents.";

/// The latest time in the names of a folder's event files; 0 if there are none.
int64_t latest_time_in(const std::filesystem::path& folder) {
  int64_t latest = 0;
  std::error_code unreadable;  // creating the file tells why
  for (const auto& entry : std::filesystem::directory_iterator(folder, unreadable)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kPrefix)) continue;
    int64_t time = 0;
    const char* const digits = name.data() + kPrefix.size();
    const auto read = std::from_chars(digits, name.data() + name.size(), time);
    if (read.ec == std::errc{} && read.ptr - digits == kTimeDigits) latest = std::max(latest, time);
  }
  return latest;
}

// TensorBoard reads the files of a folder in the order of their names. A file that was begun later comes
// later, also in the same second and after the clock was set back: its time is then one more than the latest.
AppendFile open_new(const std::filesystem::path& folder) {
  constexpr int kMostTries = 1000;
  int64_t time = std::max(static_cast<int64_t>(unix_time()), latest_time_in(folder) + 1);
  for (int i = 0;; ++i, ++time) {
    char digits[24];
    std::snprintf(digits, sizeof digits, "%0*lld", kTimeDigits, static_cast<long long>(time));
    try {
      return AppendFile::create(folder / detail::concat(kPrefix, digits, ".", host()));
    } catch (const FileError& error) {
      if (error.code() != EEXIST || i == kMostTries) throw;
    }
  }
}

}  // namespace

struct EventFile::State {
  AppendFile file;
  std::string kept{};                 // whole records, not yet in the file
  std::deque<std::string> refused{};  // blocks of them that the disk did not take, the oldest first
  size_t refused_bytes = 0;
  int64_t lost_bytes = 0;  // for which there was no room in memory either
  // One for each level of nesting, used again.
  Message event{}, summary{}, value{}, histogram{};

  void begin(int64_t step) {
    event.clear();
    event.fixed(event::kWallTime, unix_time());
    event.integer(event::kStep, step);
  }

  // TFRecord: length, its CRC, the bytes, their CRC.
  void end() {
    const std::string_view bytes = event.bytes();
    const size_t start = kept.size();
    log::put_fixed(kept, static_cast<uint64_t>(bytes.size()));
    log::put_fixed(kept, log::masked_crc32c(std::string_view(kept).substr(start)));
    kept += bytes;
    log::put_fixed(kept, log::masked_crc32c(bytes));
    if (kept.size() < kBlockBytes) return;
    try {
      flush();
    } catch (const FileError&) {  // kept, and told by the next call of flush
    }
  }

  void begin_value(std::string_view tag) {
    value.clear();
    value.block(value::kTag, valid_utf8(tag));
  }

  void end_value(int64_t step) {
    summary.clear();
    summary.block(summary::kValue, value.bytes());
    begin(step);
    event.block(event::kSummary, summary.bytes());
    end();
  }

  void flush() {
    if (!kept.empty() && refused_bytes + kept.size() <= kMostRefused) {
      refused_bytes += kept.size();
      refused.push_back(std::exchange(kept, {}));
    } else if (kept.size() >= kBlockBytes) {
      lost_bytes += static_cast<int64_t>(kept.size());
      kept.clear();
    }
    for (; !refused.empty(); refused.pop_front()) {
      file.append(refused.front());
      refused_bytes -= refused.front().size();
    }
  }
};

EventFile::EventFile(const std::filesystem::path& folder, std::optional<int64_t> resumed_after)
    : state_(new State{.file = open_new(folder)}) {
  state_->begin(0);
  state_->event.block(event::kFileVersion, "brain.Event:2");
  state_->end();
  if (resumed_after) {
    // TensorBoard 2.21 drops what it has read from this step on (event_accumulator.py).
    Message session;
    session.integer(session_log::kStatus, session_log::kStart);
    state_->begin(*resumed_after + 1);
    state_->event.block(event::kSessionLog, session.bytes());
    state_->end();
  }
  state_->flush();
}

EventFile::~EventFile() {
  if (!state_) return;
  try {
    state_->flush();
  } catch (const Error&) {  // as the header says
  }
}

EventFile::EventFile(EventFile&&) noexcept = default;
EventFile& EventFile::operator=(EventFile&& other) noexcept {
  std::swap(state_, other.state_);  // what this one kept is flushed when `other` goes
  return *this;
}

void EventFile::scalar(std::string_view tag, double value, int64_t step) {
  state_->begin_value(tag);
  state_->value.fixed(value::kSimpleValue, static_cast<float>(value));
  state_->end_value(step);
}

void EventFile::histogram(std::string_view tag, const Histogram& histogram, int64_t step) {
  HALFSTEP_CHECK(histogram.limits.size() == histogram.counts.size(), "EventFile: histogram '", tag, "' has ",
                 histogram.limits.size(), " limits for ", histogram.counts.size(), " buckets; each has one.");
  Message& proto = state_->histogram;
  proto.clear();
  proto.fixed(histogram_proto::kMin, histogram.min);
  proto.fixed(histogram_proto::kMax, histogram.max);
  proto.fixed(histogram_proto::kCount, histogram.count);
  proto.fixed(histogram_proto::kSum, histogram.sum);
  proto.fixed(histogram_proto::kSumOfSquares, histogram.sum_of_squares);
  proto.packed(histogram_proto::kLimits, histogram.limits);
  proto.packed(histogram_proto::kCounts, histogram.counts);
  state_->begin_value(tag);
  state_->value.block(value::kHistogram, proto.bytes());
  state_->end_value(step);
}

void EventFile::flush() { state_->flush(); }
int64_t EventFile::lost_bytes() const { return state_->lost_bytes; }
const std::filesystem::path& EventFile::path() const { return state_->file.path(); }

namespace {

// Every bucket holds its lower end and not its upper one, so that a negative value goes by the power of two
// above its size, -2^j <= x < -2^(j-1), and a positive one by the power below, 2^e <= x < 2^(e+1). FP32 has j
// from 128 down to -149, then zero, then e from -149 (the smallest denormal number) up to 127.
constexpr int kNegative = 128 + 149 + 1, kPositive = 127 + 149 + 1;
constexpr int kBuckets = kNegative + 1 + kPositive;

int bucket_of(float value) {
  if (value == 0) return kNegative;
  int exponent = 0;
  const float fraction = std::frexp(value, &exponent);  // 0.5 <= |fraction| < 1
  if (value > 0) return kNegative + 1 + (exponent - 1 + 149);
  return 128 - (fraction == -0.5f ? exponent - 1 : exponent);
}

double upper_limit_of(int bucket) {
  return bucket < kNegative ? -std::ldexp(1.0, 127 - bucket) : std::ldexp(1.0, bucket - kNegative - 149);
}

}  // namespace

Histogram histogram_of(std::span<const float> values) {
  Histogram result{.min = std::numeric_limits<double>::infinity(),
                   .max = -std::numeric_limits<double>::infinity()};
  std::array<int64_t, kBuckets> counts{};
  for (const float value : values) {
    if (!std::isfinite(value)) {
      ++result.not_finite;
      continue;
    }
    ++counts[static_cast<size_t>(bucket_of(value))];
    const double exact = value;
    result.min = std::min(result.min, exact);
    result.max = std::max(result.max, exact);
    result.sum += exact;
    result.sum_of_squares += exact * exact;
  }
  result.count = static_cast<double>(values.size()) - static_cast<double>(result.not_finite);
  if (result.count == 0) return Histogram{.not_finite = result.not_finite};
  for (int bucket = 0; bucket < kBuckets; ++bucket) {
    const auto count = static_cast<double>(counts[static_cast<size_t>(bucket)]);
    const bool before_the_first = result.counts.empty();
    if (count == 0 && before_the_first) continue;
    if (count == 0 && result.counts.back() == 0) {
      result.limits.back() = upper_limit_of(bucket);
      continue;
    }
    result.limits.push_back(upper_limit_of(bucket));
    result.counts.push_back(count);
  }
  if (result.counts.back() == 0) {  // behind the last value
    result.limits.pop_back();
    result.counts.pop_back();
  }
  return result;
}

Histogram histogram_of(const TensorStats& stats) {
  Histogram made{.not_finite = stats.nans + stats.infinities};
  for (int exponent = TensorStats::kLeastExponent; exponent <= TensorStats::kLargestExponent; ++exponent) {
    const int64_t count = stats.in_binade(exponent);
    if (count == 0 && made.limits.empty()) continue;
    if (made.limits.empty()) {
      made.min = exponent;
      made.limits.push_back(exponent);  // the bucket below it is empty
      made.counts.push_back(0);
    }
    const double middle = exponent + 0.5, counted = static_cast<double>(count);
    made.count += counted;
    made.sum += counted * middle;
    made.sum_of_squares += counted * middle * middle;
    made.limits.push_back(exponent + 1);
    made.counts.push_back(counted);
  }
  while (!made.counts.empty() && made.counts.back() == 0) {
    made.limits.pop_back();
    made.counts.pop_back();
  }
  if (stats.amax > 0) made.max = std::log2(static_cast<double>(stats.amax));
  if (made.limits.empty()) made.limits = {0}, made.counts = {0};
  return made;
}

}  // namespace halfstep
