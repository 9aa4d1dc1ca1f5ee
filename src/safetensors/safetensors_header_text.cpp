// The JSON of a safetensors header, event by event: no tree is built, so that a header of 16 MiB cannot ask
// for a gigabyte, and what the format does not allow is refused where it stands.
#include <halfstep/error.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "safetensors/header_tokens.h"
#include "words/names.h"
#include "safetensors/safetensors_header.h"
#include "safetensors/tensor_size.h"

namespace halfstep::files {
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
