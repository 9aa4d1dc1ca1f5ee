// The fields of one record of a log, by name and type.
#pragma once

#include <halfstep/error.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace halfstep::report {

/// What a log may hold that this reader cannot use: told with file and line by whoever knows them.
class BadRecord : public Error {
 public:
  using Error::Error;
};

/// One line after another, kept flat as the parser tells of it: a tree of JSON takes three times as long, and
/// a log has a line for each step. The memory of a line is used again for the next.
class RecordReader : private nlohmann::json_sax<nlohmann::json> {
 public:
  struct Object {};
  struct Other {};  // null, or an array: no record of this version has one
  struct Field {
    std::string name{};
    size_t within = 0;  // index of the object that holds it
    std::variant<Object, Other, bool, int64_t, double, std::string> value{};
  };

  /// The fields of `line` until the next call; the first is the record itself.
  const std::vector<Field>& read(std::string_view line);
  size_t count() const { return count_; }

 private:
  template <typename Value>
  bool put(Value&& value);

  bool null() override { return put(Other{}); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(int64_t{value}); }
  bool number_unsigned(number_unsigned_t value) override;
  bool number_float(number_float_t value, const string_t&) override { return put(double{value}); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override;
  bool end_object() override;
  bool start_array(size_t) override;
  bool end_array() override;
  bool key(string_t& name) override;
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& fault) override;

  std::vector<Field> fields_{};
  size_t count_ = 0;
  std::vector<size_t> open_{};
  int arrays_ = 0;
};

/// An object of the record that was read last. Fields that nobody asks for are left alone: later versions may
/// add some.
class Fields {
 public:
  Fields(RecordReader& reader, std::string_view line) : all_(reader.read(line)), count_(reader.count()) {}

  int64_t integer(std::string_view name) const;
  /// A number, or one of the words for those that JSON has not.
  double number(std::string_view name) const;
  bool flag(std::string_view name) const;
  const std::string& text(std::string_view name) const;
  std::optional<double> perhaps(std::string_view name) const;
  bool has(std::string_view name) const { return find(name) != nullptr; }
  Fields within(std::string_view name) const;

  /// In the order of the line.
  std::vector<std::string_view> names() const;

 private:
  Fields(const Fields& outer, size_t object)
      : all_(outer.all_), count_(outer.count_), object_(object), next_(object) {}
  const RecordReader::Field* find(std::string_view name) const;
  const RecordReader::Field& at(std::string_view name) const;

  const std::vector<RecordReader::Field>& all_;
  size_t count_;
  size_t object_ = 0;
  mutable size_t next_ = 0;  // where to look first: fields are mostly asked for in the order of the line
};

}  // namespace halfstep::report
