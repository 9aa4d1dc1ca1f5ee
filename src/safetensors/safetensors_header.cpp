#include "safetensors/safetensors_header.h"

#include <halfstep/error.h>
#include <halfstep/safetensors.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string_view>
#include <tuple>

#include "safetensors/tensor_size.h"
#include "words/names.h"

namespace halfstep::files {
namespace {

// A first look at the text of a safetensors header.

/// Refuses what nlohmann's lexer must not be given. It takes a NUL for the end of the text, so that what
/// follows would go unread; and it keeps the whole token it works on, and the white space behind it, several
/// times over once it complains. Returns how many objects begin in the text.
size_t check_header_tokens(std::string_view text, std::string_view where, const SafetensorsLimits& limits) {
  const size_t longest_string = static_cast<size_t>(limits.header_bytes / 8);
  constexpr size_t kLongestRun = 4096;  // of anything but strings and punctuation
  const size_t nul = text.find('\0');
  HALFSTEP_CHECK(nul == std::string_view::npos, where, ": a NUL byte in the header, at its byte ", nul, ".");
  size_t object_count = 0, run = 0;
  for (size_t at = 0; at < text.size(); ++at) {
    if (text[at] == '{') ++object_count;
    if (text[at] != '"') {
      run = std::string_view("{}[]:,").find(text[at]) == std::string_view::npos ? run + 1 : 0;
      HALFSTEP_CHECK(run <= kLongestRun, where, ": a number, a word or white space of more than ",
                     kLongestRun, " bytes in the header, at its byte ", at, ".");
      continue;
    }
    run = 0;
    const size_t start = at;
    for (++at; at < text.size() && text[at] != '"'; ++at)
      if (text[at] == '\\') ++at;
    HALFSTEP_CHECK(at < text.size(), where, ": the header ends within the string that starts at its byte ",
                   start, ".");
    HALFSTEP_CHECK(at - start <= longest_string, where, ": a string of ", at - start,
                   " bytes in the header; at most ", longest_string,
                   " are read, an eighth of SafetensorsLimits::header_bytes.");
  }
  return object_count;
}

static_assert(std::endian::native == std::endian::little,
              "safetensors is little-endian, and so are its bytes in memory");

constexpr uint64_t kLengthBytes = 8;

std::string_view header_text(std::span<const std::byte> file, std::string_view where,
                             const SafetensorsLimits& limits) {
  HALFSTEP_CHECK(
      file.size() >= kLengthBytes, where, ": ", file.size(),
      " bytes, too short for a safetensors file: it begins with 8 bytes that give the length of its "
      "header.");
  uint64_t length = 0;
  std::memcpy(&length, file.data(), kLengthBytes);
  HALFSTEP_CHECK(length <= file.size() - kLengthBytes, where, ": the header's length, ", length,
                 " bytes, exceeds the file, which has ", file.size() - kLengthBytes,
                 " bytes after it. The file is cut short, or not a safetensors file.");
  HALFSTEP_CHECK(length <= limits.header_bytes, where, ": the header has ", length, " bytes; at most ",
                 limits.header_bytes, " are read. SafetensorsLimits::header_bytes raises the limit.");
  const auto* start = reinterpret_cast<const char*>(file.data() + kLengthBytes);
  const std::string_view text(start, static_cast<size_t>(length));
  HALFSTEP_CHECK(text.starts_with('{'), where,
                 ": the header does not start with '{'. Is it a safetensors file?");
  return text;
}

void sort_by_bytes(std::vector<TensorEntry>& entries) {
  const auto before = [](const TensorEntry& a, const TensorEntry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  };
  if (!std::is_sorted(entries.begin(), entries.end(), before))
    std::sort(entries.begin(), entries.end(), before);
}

std::vector<uint32_t> sorted_by_name(const std::vector<TensorEntry>& entries, std::string_view where) {
  std::vector<uint32_t> order(entries.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return entries[a].name < entries[b].name; });
  const auto twice = std::adjacent_find(
      order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return entries[a].name == entries[b].name; });
  HALFSTEP_CHECK(twice == order.end(), where, ": the name ", in_quotes(entries[*twice].name),
                 " is a duplicate: two tensors have it.");
  return order;
}

void check_tiling(const std::vector<TensorEntry>& entries, uint64_t data_bytes, std::string_view where) {
  uint64_t reached = 0;
  const TensorEntry* previous = nullptr;
  for (const TensorEntry& entry : entries) {
    HALFSTEP_CHECK(entry.begin >= reached, where, ": the bytes of tensors ", in_quotes(previous->name), " [",
                   previous->begin, ", ", previous->end, ") and ", in_quotes(entry.name), " [", entry.begin,
                   ", ", entry.end, ") overlap.");
    HALFSTEP_CHECK(entry.begin == reached, where, ": a hole before tensor ", in_quotes(entry.name),
                   ": bytes [", reached, ", ", entry.begin, ") belong to no tensor.");
    reached = entry.end;
    previous = &entry;
  }
  HALFSTEP_CHECK(reached <= data_bytes, where, ": its tensors take ", reached, " bytes, but only ",
                 data_bytes, " follow the header. The file is cut short.");
  HALFSTEP_CHECK(reached == data_bytes, where, ": ", data_bytes - reached,
                 " trailing bytes after the last tensor belong to none.");
}

}  // namespace

const TensorEntry* SafetensorsHeader::find(std::string_view name) const {
  const auto at =
      std::lower_bound(by_name.begin(), by_name.end(), name,
                       [&](uint32_t index, std::string_view wanted) { return entries[index].name < wanted; });
  return at != by_name.end() && entries[*at].name == name ? &entries[*at] : nullptr;
}

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> file, std::string_view where,
                                           const SafetensorsLimits& limits) {
  const std::string_view text = header_text(file, where, limits);
  SafetensorsHeader header;
  header.data_start = kLengthBytes + text.size();
  read_header_text(text, where, limits, header);
  sort_by_bytes(header.entries);
  header.by_name = sorted_by_name(header.entries, where);
  check_tiling(header.entries, file.size() - header.data_start, where);
  return header;
}

namespace {

// {"dtype":"U8","shape":[],"data_offsets":[0,1]} with a name of one letter, a colon and a comma.
constexpr size_t kSmallestEntryBytes = 51;

class HeaderEvents final : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderEvents(std::string_view where, const SafetensorsLimits& limits, SafetensorsHeader& header)
      : where_(where), limits_(limits), header_(header) {}

  bool null() override { refuse("null"); }
  bool boolean(bool value) override { refuse(value ? "true" : "false"); }
  bool binary(binary_t&) override { refuse("binary data"); }

  bool number_integer(number_integer_t value) override {
    refuse(detail::concat("the negative number ", value));
  }
  bool number_float(number_float_t, const string_t& text) override {
    refuse(detail::concat("the number ", in_quotes(text), ", which is not an integer of 64 bits,"));
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::Shape) {
      HALFSTEP_CHECK(value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()), where_, ": ",
                     tensor(), ": its shape overflows: a dimension of ", value, " does not fit in 63 bits.");
      HALFSTEP_CHECK(shape_.size() < static_cast<size_t>(limits_.rank), where_, ": ", tensor(),
                     ": its rank exceeds ", limits_.rank,
                     " dimensions. SafetensorsLimits::rank raises the limit.");
      shape_.push_back(static_cast<int64_t>(value));
    } else if (place_ == Place::Offsets) {
      HALFSTEP_CHECK(offset_count_ < 2, where_, ": ", tensor(), ": data_offsets has more than 2 numbers.");
      (offset_count_++ == 0 ? begin_ : end_) = value;
    } else {
      refuse(detail::concat("the number ", value));
    }
    return true;
  }
  bool string(string_t& value) override {
    if (place_ == Place::Metadata) {
      header_.metadata[metadata_key_] = value;
    } else if (place_ == Place::Tensor && field_ == Field::Type) {
      type_ = type_named(value);
      HALFSTEP_CHECK(type_, where_, ": ", tensor(), ": unknown dtype ", in_quotes(value), ". The format has ",
                     type_names(), ".");
      field_ = Field::None;
    } else {
      refuse(detail::concat("the string ", in_quotes(value)));
    }
    return true;
  }

  bool start_object(size_t) override {
    switch (place_) {
      case Place::Text:
        place_ = Place::File;
        return true;
      case Place::File:
        place_ = is_metadata_ ? Place::Metadata : Place::Tensor;
        return true;
      default:
        refuse("an object");
    }
  }
  bool end_object() override {
    if (place_ == Place::Tensor) finish_tensor();
    place_ = place_ == Place::File ? Place::Text : Place::File;
    return true;
  }
  bool start_array(size_t) override {
    if (place_ != Place::Tensor || (field_ != Field::Shape && field_ != Field::Offsets)) refuse("an array");
    place_ = field_ == Field::Shape ? Place::Shape : Place::Offsets;
    return true;
  }
  bool end_array() override {
    place_ = Place::Tensor;
    field_ = Field::None;
    return true;
  }

  bool key(string_t& value) override {
    if (place_ == Place::File) start_entry(value);
    if (place_ == Place::Tensor) start_field(value);
    if (place_ == Place::Metadata) start_metadata(value);
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception& fault) override {
    const std::string_view what = fault.what();
    throw Error(detail::concat(where_, ": the header is not valid JSON at its byte ", position, ": ",
                               in_quotes(what.substr(std::min(what.size(), what.find(": ") + 2)))));
  }

 private:
  enum class Place { Text, File, Tensor, Shape, Offsets, Metadata };
  enum class Field { None, Type, Shape, Offsets };

  std::string tensor() const { return "tensor " + in_quotes(name_); }

  [[noreturn]] void refuse(const std::string& found) const {
    std::string_view wanted = "one object";
    std::string whose;
    switch (place_) {
      case Place::Text:
        break;
      case Place::File:
        wanted = is_metadata_ ? "an object of strings" : "an object with dtype, shape and data_offsets";
        whose = is_metadata_ ? "__metadata__: " : tensor() + ": ";
        break;
      case Place::Metadata:
        wanted = "a string";
        whose = "__metadata__ " + in_quotes(metadata_key_) + ": ";
        break;
      case Place::Tensor:
        wanted = field_ == Field::Type ? "the name of a dtype" : "an array of integers";
        whose = tensor() + ": ";
        break;
      case Place::Shape:
      case Place::Offsets:
        wanted = place_ == Place::Shape ? "an integer from 0 upward in its shape"
                                        : "an integer from 0 upward in data_offsets";
        whose = tensor() + ": ";
        break;
    }
    throw Error(detail::concat(where_, ": ", whose, found, " where ", wanted, " should stand."));
  }

  void start_entry(const std::string& name) {
    is_metadata_ = name == "__metadata__";
    if (is_metadata_) {
      HALFSTEP_CHECK(!metadata_seen_, where_, ": the key '__metadata__' is a duplicate.");
      metadata_seen_ = true;
      return;
    }
    HALFSTEP_CHECK(!name.empty(), where_, ": a tensor with an empty name.");
    HALFSTEP_CHECK(name.find('\0') == std::string::npos, where_, ": the name ", in_quotes(name),
                   " contains a NUL.");
    HALFSTEP_CHECK(header_.entries.size() < limits_.tensor_count, where_, ": more than ",
                   limits_.tensor_count, " tensors. SafetensorsLimits::tensor_count raises the limit.");
    name_ = name;
    type_.reset();
    shape_.clear();
    offset_count_ = 0;
    shape_seen_ = offsets_seen_ = false;
  }

  void start_field(const std::string& key) {
    const auto once = [&](bool seen) {
      HALFSTEP_CHECK(!seen, where_, ": ", tensor(), ": the key ", in_quotes(key), " is a duplicate.");
    };
    if (key == "dtype") {
      once(type_.has_value());
      field_ = Field::Type;
    } else if (key == "shape") {
      once(shape_seen_);
      field_ = Field::Shape;
      shape_seen_ = true;
    } else if (key == "data_offsets") {
      once(offsets_seen_);
      field_ = Field::Offsets;
      offsets_seen_ = true;
    } else {
      HALFSTEP_CHECK(false, where_, ": ", tensor(), ": unknown key ", in_quotes(key),
                     ". An entry has dtype, shape and data_offsets.");
    }
  }

  void start_metadata(const std::string& key) {
    HALFSTEP_CHECK(header_.metadata.size() < limits_.metadata_count, where_, ": __metadata__ has more than ",
                   limits_.metadata_count, " keys. SafetensorsLimits::metadata_count raises the limit.");
    HALFSTEP_CHECK(header_.metadata.emplace(key, "").second, where_, ": the key ", in_quotes(key),
                   " of __metadata__ is a duplicate.");
    metadata_key_ = key;
  }

  void finish_tensor() {
    HALFSTEP_CHECK(type_, where_, ": ", tensor(), ": has no dtype.");
    HALFSTEP_CHECK(shape_seen_, where_, ": ", tensor(), ": has no shape.");
    HALFSTEP_CHECK(offsets_seen_, where_, ": ", tensor(), ": has no data_offsets.");
    HALFSTEP_CHECK(offset_count_ == 2, where_, ": ", tensor(), ": data_offsets has ", offset_count_,
                   " numbers; 2 are needed.");
    HALFSTEP_CHECK(begin_ <= end_, where_, ": ", tensor(), ": ends before it begins: data_offsets [", begin_,
                   ", ", end_, "].");
    dimension_count_ += shape_.size();
    HALFSTEP_CHECK(dimension_count_ <= limits_.header_bytes / 8, where_, ": its shapes have more than ",
                   limits_.header_bytes / 8,
                   " dimensions in all. One for every 8 bytes of SafetensorsLimits::header_bytes are read.");
    const TensorSize size = size_of_tensor(*type_, shape_);
    HALFSTEP_CHECK(!size.fault, where_, ": ", tensor(), ": its shape ", shape_text(shape_), " of ",
                   to_string(*type_), " ", size.fault, ".");
    HALFSTEP_CHECK(size.bytes == end_ - begin_, where_, ": ", tensor(), ": its shape ", shape_text(shape_),
                   " of ", to_string(*type_), " takes ", size.bytes, " bytes, but its data_offsets [", begin_,
                   ", ", end_, "] span ", end_ - begin_, ".");
    header_.entries.push_back({.name = name_, .type = *type_, .shape = shape_, .begin = begin_, .end = end_});
  }

  std::string_view where_;
  const SafetensorsLimits& limits_;
  SafetensorsHeader& header_;
  Place place_ = Place::Text;
  bool metadata_seen_ = false;
  uint64_t dimension_count_ = 0;

  // Of the entry that is being read.
  bool is_metadata_ = false;
  std::string metadata_key_;
  std::string name_;
  Field field_ = Field::None;
  std::optional<TensorType> type_;
  std::vector<int64_t> shape_;
  bool shape_seen_ = false, offsets_seen_ = false;
  int offset_count_ = 0;
  uint64_t begin_ = 0, end_ = 0;
};

}  // namespace

void read_header_text(std::string_view text, std::string_view where, const SafetensorsLimits& limits,
                      SafetensorsHeader& header) {
  // Spaces may fill a header up to its length, as many as they like.
  text = text.substr(0, text.find_last_not_of(' ') + 1);
  const size_t object_count = check_header_tokens(text, where, limits);
  // Room for all at once: a vector that doubles holds three times its elements while it moves.
  header.entries.reserve(std::min(object_count, text.size() / kSmallestEntryBytes));
  HeaderEvents events(where, limits, header);
  nlohmann::json::sax_parse(text, &events);
}

}  // namespace halfstep::files
