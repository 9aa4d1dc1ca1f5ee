// Filters, tests, functions and methods of Jinja templates.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "jinja/value.h"

namespace halfstep::jinja {

struct MacroStatement;

struct Arguments {
  std::vector<Value> values;
  std::vector<std::pair<std::string, Value>> named;
};

/// A filter of `self | name(...)`, a test of `self is name(...)`, a method of `self.name(...)`, a function.
struct Builtin {
  /// One for each parameter; empty where none is given.
  using Given = std::vector<std::optional<Value>>;

  std::string_view name;
  std::vector<std::string_view> parameters;  ///< "": by place only
  size_t required;
  Value (*call)(Run& run, const Value& self, const Given& given);
  /// Instead of `call`, for those that pass their arguments on.
  Value (*call_with_all)(Run& run, const Value& self, const Arguments& arguments) = nullptr;
};

/// Null if there is none.
const Builtin* find_filter(std::string_view name);
const Builtin* find_test(std::string_view name);
const Builtin* find_function(std::string_view name);
/// Whether any type has a method of this name.
bool is_method(std::string_view name);

Value call(Run& run, const Builtin& builtin, const Value& self, const Arguments& arguments);

/// What can be called: a function, a method of a value, a macro, or, without either, `namespace`.
struct Callable {
  const Builtin* builtin = nullptr;
  Value self = None{};
  const MacroStatement* macro = nullptr;
};

/// `value.name`: a method, or else what `value['name']` is.
Value get_attribute(Run& run, const Value& value, std::string_view name);
/// `value[key]`; undefined if there is none.
Value get_item(Run& run, const Value& value, const Value& key);

}  // namespace halfstep::jinja
