// The values of a Jinja template: Python's, as far as templates use them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "jinja/run.h"

namespace halfstep::jinja {

struct Sequence;
struct Dict;
struct Namespace;
struct Callable;

struct Undefined {
  std::shared_ptr<const std::string> why;  ///< the Error of whoever uses it
};
struct None {};

using TextPointer = std::shared_ptr<const std::string>;
using SequencePointer = std::shared_ptr<const Sequence>;
using DictPointer = std::shared_ptr<const Dict>;
using CallablePointer = std::shared_ptr<const Callable>;

/// Copies share what they hold, and only a Namespace can change: a rendering owns its namespaces, so that
/// values are never rings.
struct Value : std::variant<Undefined, None, bool, int64_t, double, TextPointer, SequencePointer, DictPointer,
                            Namespace*, CallablePointer> {
  using variant::variant;

  static Value undefined(std::string why);
  static Value text(std::string_view text);
  static Value text(std::string&& text);
  static Value text(const char* text) { return Value::text(std::string_view(text)); }

  template <typename T>
  bool is() const {
    return std::holds_alternative<T>(*this);
  }
  template <typename T>
  const T& as() const {
    return std::get<T>(*this);
  }
  bool is_text() const { return is<TextPointer>(); }
  std::string_view text() const { return *as<TextPointer>(); }
  const Sequence* sequence() const { return is<SequencePointer>() ? as<SequencePointer>().get() : nullptr; }
  const Dict* dict() const { return is<DictPointer>() ? as<DictPointer>().get() : nullptr; }
};

struct Sequence {
  enum class Kind : uint8_t { List, Tuple, Range, Keys, Values, Items, Iterator };
  Kind kind;
  std::vector<Value> items;
  int depth = 1;            ///< of sequences and dicts in each other
  mutable size_t used = 0;  ///< of an Iterator: it gives each item once
};

/// In the order of insertion.
struct Dict {
  std::vector<std::pair<Value, Value>> items;
  int depth = 1;
};

struct Namespace {
  std::map<std::string, Value, std::less<>> attributes;
};

Value make_sequence(Run& run, Sequence::Kind kind, std::vector<Value> items);
Value make_list(Run& run, std::vector<Value> items);
Value make_list(Run& run, const std::vector<std::string_view>& texts);

/// Puts entries into a dict: the last value of a key counts.
class DictBuilder {
 public:
  explicit DictBuilder(Run& run) : run_(run) {}
  void add(Value key, Value value);
  Value build();

 private:
  Run& run_;
  Dict dict_;
};

const Value* find(Run& run, const Dict& dict, const Value& key);

/// "'dict object'", "'str object'", for errors.
std::string type_name(const Value& value);

bool truth(const Value& value);
/// bool counts as int, as in Python.
std::optional<int64_t> as_integer(const Value& value);
bool is_number(const Value& value);
/// Of a number.
double as_double(const Value& value);

/// What `str` makes of it; of an undefined value, nothing.
std::string to_text(Run& run, const Value& value);
/// The same, without a copy of what is text already.
Value to_text_value(Run& run, const Value& value);

/// What a loop goes through. An Iterator is used up.
std::vector<Value> items_of(Run& run, const Value& value);
/// Python's len; an Error for what has none.
int64_t length_of(Run& run, const Value& value);

bool equal(Run& run, const Value& left, const Value& right);
bool less(Run& run, const Value& left, const Value& right);
bool contains(Run& run, const Value& container, const Value& item);
bool is_hashable(const Value& value);

Value add(Run& run, const Value& left, const Value& right);
Value subtract(Run& run, const Value& left, const Value& right);
Value multiply(Run& run, const Value& left, const Value& right);
Value divide(Run& run, const Value& left, const Value& right);
Value floor_divide(Run& run, const Value& left, const Value& right);
Value modulo(Run& run, const Value& left, const Value& right);
Value power(Run& run, const Value& left, const Value& right);
Value negate(Run& run, const Value& value);
Value positive(Run& run, const Value& value);

/// `value[start:stop:step]`; None or undefined where nothing is given.
Value slice(Run& run, const Value& value, const Value& start, const Value& stop, const Value& step);

struct JsonStyle {
  bool ascii_only = false;
  std::optional<std::string> indent;
  std::string item_separator = ", ", key_separator = ": ";
  bool sorted = false;
};
/// Python's json.dumps.
std::string to_json(Run& run, const Value& value, const JsonStyle& style);

}  // namespace halfstep::jinja
