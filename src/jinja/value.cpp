#include "jinja/value.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <list>

#include "jinja/builtins.h"
#include "jinja/python_text.h"
#include "words/names.h"
#include "words/utf8.h"

namespace halfstep::jinja {
namespace {

int depth_of(const Value& value) {
  if (const Sequence* sequence = value.sequence()) return sequence->depth;
  if (const Dict* dict = value.dict()) return dict->depth;
  return 0;
}

void check_depth(Run& run, int depth) {
  if (depth > kMaxValueDepth) run.fail("lists nest deeper than ", kMaxValueDepth, " levels.");
}

[[noreturn]] void fail_undefined(Run& run, const Undefined& undefined) { run.fail(*undefined.why); }

// An undefined value may be printed, looped over and compared for equality; nothing else.
void check_defined(Run& run, const Value& value) {
  if (value.is<Undefined>()) fail_undefined(run, value.as<Undefined>());
}

std::string repr(Run& run, const Value& value);

std::string repr_items(Run& run, const std::vector<Value>& items) {
  std::string text;
  for (const Value& item : items) {
    if (!text.empty()) text += ", ";
    text += repr(run, item);
    run.check_text(text.size());
  }
  run.charge_text(text.size());
  return text;
}

std::string repr(Run& run, const Sequence& sequence) {
  const std::string items = repr_items(run, sequence.items);
  switch (sequence.kind) {
    case Sequence::Kind::List:
      return "[" + items + "]";
    case Sequence::Kind::Tuple:
      return "(" + items + (sequence.items.size() == 1 ? ",)" : ")");
    case Sequence::Kind::Keys:
      return "dict_keys([" + items + "])";
    case Sequence::Kind::Values:
      return "dict_values([" + items + "])";
    case Sequence::Kind::Items:
      return "dict_items([" + items + "])";
    case Sequence::Kind::Range:
    case Sequence::Kind::Iterator:
      break;
  }
  run.fail("a range or the result of a filter such as 'map' is printed; add '| list'.");
}

std::string repr(Run& run, const Dict& dict) {
  std::string text = "{";
  for (const auto& [key, value] : dict.items) {
    if (text.size() > 1) text += ", ";
    (text += repr(run, key) += ": ") += repr(run, value);
    run.check_text(text.size());
  }
  run.charge_text(text.size());
  return text += "}";
}

std::string repr(Run& run, const Value& value) {
  run.charge(1);
  if (value.is_text()) {
    run.charge_text(value.text().size());
    return python::repr(value.text());
  }
  if (value.is<Undefined>()) return "Undefined";
  return to_text(run, value);
}

// A number of either kind as a type that holds both exactly.
long double exact(const Value& value) {
  if (const auto integer = as_integer(value)) return static_cast<long double>(*integer);
  return static_cast<long double>(value.as<double>());
}

[[noreturn]] void fail_operands(Run& run, std::string_view what, const Value& left, const Value& right) {
  check_defined(run, left);
  check_defined(run, right);
  run.fail("'", what, "' does not go with ", type_name(left), " and ", type_name(right), ".");
}

bool less_items(Run& run, const Sequence& left, const Sequence& right) {
  const size_t common = std::min(left.items.size(), right.items.size());
  for (size_t i = 0; i < common; ++i)
    if (!equal(run, left.items[i], right.items[i])) return less(run, left.items[i], right.items[i]);
  return left.items.size() < right.items.size();
}

bool same_items(Run& run, const std::vector<Value>& left, const std::vector<Value>& right) {
  if (left.size() != right.size()) return false;
  for (size_t i = 0; i < left.size(); ++i)
    if (!equal(run, left[i], right[i])) return false;
  return true;
}

bool equal_sequences(Run& run, const Sequence& left, const Sequence& right) {
  using Kind = Sequence::Kind;
  if (&left == &right) return true;
  for (const Sequence* one : {&left, &right})
    if (one->kind == Kind::Keys || one->kind == Kind::Items)
      run.fail("keys() and items() are compared; that is not supported. Add '| list'.");
  if (left.kind != right.kind || left.kind == Kind::Values || left.kind == Kind::Iterator) return false;
  return same_items(run, left.items, right.items);
}

bool equal_dicts(Run& run, const Dict& left, const Dict& right) {
  if (left.items.size() != right.items.size()) return false;
  return std::ranges::all_of(left.items, [&](const auto& item) {
    const Value* other = find(run, right, item.first);
    return other != nullptr && equal(run, item.second, *other);
  });
}

Value checked(Run& run, bool overflows, int64_t result) {
  if (overflows) run.fail("a whole number needs more than 64 bits.");
  return result;
}

// Python's //, and % with the sign of the divisor.
Value floor_divide_integers(Run& run, int64_t left, int64_t right) {
  if (right == -1) return negate(run, left);
  const int64_t quotient = left / right;
  return quotient - (left % right != 0 && (left < 0) != (right < 0));
}

double modulo_doubles(double left, double right) {
  const double rest = std::fmod(left, right);
  if (rest == 0) return std::copysign(0.0, right);
  return (rest < 0) != (right < 0) ? rest + right : rest;
}

double floor_divide_doubles(double left, double right) {
  const double rest = std::fmod(left, right);
  const double quotient = (left - rest) / right - (rest != 0 && (rest < 0) != (right < 0) ? 1 : 0);
  if (quotient == 0) return std::copysign(0.0, left / right);
  const double floor = std::floor(quotient);
  return quotient - floor > 0.5 ? floor + 1 : floor;
}

Value repeat(Run& run, const Value& value, int64_t times) {
  const auto count = static_cast<uint64_t>(std::max<int64_t>(times, 0));
  if (value.is_text()) {
    const std::string_view text = value.text();
    if (text.empty() || count == 0) return Value::text("");
    run.charge_text(count > kMaxTextBytes ? kMaxTextBytes + 1 : text.size() * static_cast<size_t>(count));
    std::string all;
    for (uint64_t i = 0; i < count; ++i) all += text;
    return Value::text(std::move(all));
  }
  const Sequence& sequence = *value.sequence();
  if (sequence.items.empty()) return value;
  run.charge_values(count > kMaxSteps ? kMaxSteps : sequence.items.size() * static_cast<size_t>(count));
  std::vector<Value> all;
  for (uint64_t i = 0; i < count; ++i) all.insert(all.end(), sequence.items.begin(), sequence.items.end());
  return make_sequence(run, sequence.kind, std::move(all));
}

bool can_be_repeated(const Value& value) {
  if (value.is_text()) return true;
  const Sequence* sequence = value.sequence();
  return sequence != nullptr &&
         (sequence->kind == Sequence::Kind::List || sequence->kind == Sequence::Kind::Tuple);
}

Value power_of_integers(Run& run, int64_t base, int64_t exponent) {
  if (exponent < 0) {
    if (base == 0) run.fail("0 has no negative power.");
    return std::pow(static_cast<double>(base), static_cast<double>(exponent));
  }
  int64_t result = 1;
  bool overflows = false;
  // 64 squarings suffice: a larger exponent overflows, or the base is 0, 1 or -1.
  for (uint64_t rest = static_cast<uint64_t>(exponent); rest > 0; rest >>= 1) {
    if (rest & 1) overflows |= __builtin_mul_overflow(result, base, &result);
    if (rest > 1) overflows |= __builtin_mul_overflow(base, base, &base);
  }
  return checked(run, overflows, result);
}

// The indices that a slice takes: Python's PySlice_AdjustIndices.
struct SliceBounds {
  int64_t start, stop, step;
  int64_t count() const {
    if (step > 0) return start < stop ? (stop - start - 1) / step + 1 : 0;
    return stop < start ? (start - stop - 1) / -step + 1 : 0;
  }
};

SliceBounds slice_bounds(Run& run, int64_t length, const Value& start, const Value& stop, const Value& step) {
  const auto given = [&](const Value& value) -> std::optional<int64_t> {
    if (value.is<None>()) return std::nullopt;
    const auto integer = as_integer(value);
    if (!integer) run.fail("a slice is bounded by ", type_name(value), "; whole numbers do.");
    return integer;
  };
  // Beyond any length, and still to be negated and added.
  constexpr int64_t kFar = int64_t{1} << 40;
  const int64_t by = std::clamp(given(step).value_or(1), -kFar, kFar);
  if (by == 0) run.fail("a slice has the step 0.");
  const int64_t lowest = by > 0 ? 0 : -1, highest = by > 0 ? length : length - 1;
  const auto adjusted = [&](const Value& value, int64_t absent) {
    const auto at = given(value);
    if (!at) return absent;
    const int64_t near = std::clamp(*at, -kFar, kFar);
    return std::clamp(near < 0 ? near + length : near, lowest, highest);
  };
  return {adjusted(start, by > 0 ? lowest : highest), adjusted(stop, by > 0 ? highest : lowest), by};
}

void append_json_text(std::string_view text, bool ascii_only, std::string& json) {
  json += '"';
  for (const std::string_view one : python::characters(text)) {
    constexpr std::string_view kEscaped = "\"\\\n\r\t\b\f", kLetters = "\"\\nrtbf";
    const CodePoint point = code_point_at(one, 0);
    char digits[16];
    if (const size_t escape = one.size() == 1 ? kEscaped.find(one[0]) : kEscaped.npos;
        escape != kEscaped.npos) {
      (json += '\\') += kLetters[escape];
    } else if (point.bytes == 1 && point.value < 0x20) {
      std::snprintf(digits, sizeof digits, "\\u%04x", point.value);
      json += digits;
    } else if (ascii_only && point.bytes > 1) {
      const uint32_t above = point.value - 0x10000;
      if (point.value < 0x10000)
        std::snprintf(digits, sizeof digits, "\\u%04x", point.value);
      else
        std::snprintf(digits, sizeof digits, "\\u%04x\\u%04x", 0xD800 + (above >> 10),
                      0xDC00 + (above & 0x3FF));
      json += digits;
    } else {
      json += one;
    }
  }
  json += '"';
}

class JsonWriter {
 public:
  JsonWriter(Run& run, const JsonStyle& style) : run_(run), style_(style) {}

  std::string write(const Value& value) {
    append(value);
    return std::move(json_);
  }

 private:
  void append(const Value& value) {
    run_.charge(1);
    if (value.is_text()) {
      run_.charge_text(value.text().size());
      append_json_text(value.text(), style_.ascii_only, json_);
    } else if (const Sequence* sequence = value.sequence()) {
      append_list(*sequence);
    } else if (const Dict* dict = value.dict()) {
      append_dict(*dict);
    } else if (const auto word = json_word(value)) {
      json_ += *word;
    } else {
      run_.fail("'tojson' of ", type_name(value), "; JSON has no such value.");
    }
  }

  // None, bool and numbers.
  std::optional<std::string> json_word(const Value& value) {
    if (value.is<None>()) return "null";
    if (value.is<bool>()) return value.as<bool>() ? "true" : "false";
    if (value.is<int64_t>()) return std::to_string(value.as<int64_t>());
    if (!value.is<double>()) return std::nullopt;
    const double number = value.as<double>();
    if (std::isnan(number)) return "NaN";
    if (std::isinf(number)) return number < 0 ? "-Infinity" : "Infinity";
    return python::repr(number);
  }

  void append_list(const Sequence& list) {
    if (list.kind != Sequence::Kind::List && list.kind != Sequence::Kind::Tuple)
      run_.fail(
          "'tojson' of a range, a view of a dict or the result of a filter such as 'map'; add '| list'.");
    append_all('[', ']', list.items.size(), [&](size_t i) { append(list.items[i]); });
  }

  void append_dict(const Dict& dict) {
    std::list<const std::pair<Value, Value>*> sorted;
    for (const auto& item : dict.items) sorted.push_back(&item);
    if (style_.sorted) sorted.sort([&](auto* a, auto* b) { return less(run_, a->first, b->first); });
    const std::vector<const std::pair<Value, Value>*> order(sorted.begin(), sorted.end());
    append_all('{', '}', order.size(), [&](size_t i) {
      const Value& key = order[i]->first;
      const auto word = key.is_text() ? std::string(key.text()) : json_word(key);
      if (!word) run_.fail("'tojson' of a dict with a key that is ", type_name(key), ".");
      append_json_text(*word, style_.ascii_only, json_);
      json_ += style_.key_separator;
      append(order[i]->second);
    });
  }

  void append_all(char open, char close, size_t count, auto&& append_one) {
    json_ += open;
    ++level_;
    for (size_t i = 0; i < count; ++i) {
      if (i > 0) json_ += style_.item_separator;
      if (style_.indent) append_line();
      append_one(i);
      run_.check_text(json_.size());
    }
    --level_;
    if (style_.indent && count > 0) append_line();
    json_ += close;
  }

  void append_line() {
    run_.charge_text(level_ * style_.indent->size());
    json_ += '\n';
    for (size_t i = 0; i < level_; ++i) json_ += *style_.indent;
  }

  Run& run_;
  const JsonStyle& style_;
  std::string json_;
  size_t level_ = 0;
};

}  // namespace

Value Value::undefined(std::string why) {
  return Undefined{std::make_shared<const std::string>(std::move(why))};
}
Value Value::text(std::string_view text) { return std::make_shared<const std::string>(text); }
Value Value::text(std::string&& text) { return std::make_shared<const std::string>(std::move(text)); }

Value make_sequence(Run& run, Sequence::Kind kind, std::vector<Value> items) {
  run.charge_values(items.size());
  auto sequence = std::make_shared<Sequence>();
  for (const Value& item : items) sequence->depth = std::max(sequence->depth, 1 + depth_of(item));
  check_depth(run, sequence->depth);
  sequence->kind = kind;
  sequence->items = std::move(items);
  return SequencePointer(std::move(sequence));
}

Value make_list(Run& run, std::vector<Value> items) {
  return make_sequence(run, Sequence::Kind::List, std::move(items));
}

Value make_list(Run& run, const std::vector<std::string_view>& texts) {
  std::vector<Value> items;
  items.reserve(texts.size());
  for (const std::string_view text : texts) {
    run.charge_text(text.size());
    items.push_back(Value::text(text));
  }
  return make_list(run, std::move(items));
}

void DictBuilder::add(Value key, Value value) {
  if (!is_hashable(key))
    run_.fail("a dict has a key that is ", type_name(key), "; lists and dicts cannot be keys.");
  run_.charge_values(1);
  dict_.depth = std::max({dict_.depth, 1 + depth_of(key), 1 + depth_of(value)});
  check_depth(run_, dict_.depth);
  const auto present =
      std::ranges::find_if(dict_.items, [&](const auto& item) { return equal(run_, item.first, key); });
  if (present != dict_.items.end())
    present->second = std::move(value);
  else
    dict_.items.emplace_back(std::move(key), std::move(value));
}

Value DictBuilder::build() { return std::make_shared<const Dict>(std::move(dict_)); }

const Value* find(Run& run, const Dict& dict, const Value& key) {
  for (const auto& [name, value] : dict.items)
    if (equal(run, name, key)) return &value;
  return nullptr;
}

std::string type_name(const Value& value) {
  struct Names {
    std::string operator()(const Undefined&) const { return "an undefined value"; }
    std::string operator()(const None&) const { return "none"; }
    std::string operator()(bool) const { return "a boolean"; }
    std::string operator()(int64_t) const { return "a whole number"; }
    std::string operator()(double) const { return "a fraction"; }
    std::string operator()(const TextPointer&) const { return "a string"; }
    std::string operator()(const SequencePointer& sequence) const {
      switch (sequence->kind) {
        case Sequence::Kind::List:
          return "a list";
        case Sequence::Kind::Tuple:
          return "a tuple";
        case Sequence::Kind::Range:
          return "a range";
        case Sequence::Kind::Iterator:
          return "the result of a filter";
        default:
          return "a view of a dict";
      }
    }
    std::string operator()(const DictPointer&) const { return "a dict"; }
    std::string operator()(Namespace*) const { return "a namespace"; }
    std::string operator()(const CallablePointer&) const { return "a function"; }
  };
  return std::visit(Names{}, value);
}

bool truth(const Value& value) {
  if (value.is<Undefined>() || value.is<None>()) return false;
  if (is_number(value)) return as_double(value) != 0;
  if (value.is_text()) return !value.text().empty();
  if (const Sequence* sequence = value.sequence())
    return sequence->kind == Sequence::Kind::Iterator || !sequence->items.empty();
  if (const Dict* dict = value.dict()) return !dict->items.empty();
  return true;
}

std::optional<int64_t> as_integer(const Value& value) {
  if (value.is<bool>()) return value.as<bool>();
  if (value.is<int64_t>()) return value.as<int64_t>();
  return std::nullopt;
}

bool is_number(const Value& value) { return value.is<bool>() || value.is<int64_t>() || value.is<double>(); }

double as_double(const Value& value) {
  const auto integer = as_integer(value);
  return integer ? static_cast<double>(*integer) : value.as<double>();
}

std::string to_text(Run& run, const Value& value) {
  run.charge(1);
  if (value.is<Undefined>()) return "";
  if (value.is<None>()) return "None";
  if (value.is<bool>()) return value.as<bool>() ? "True" : "False";
  if (value.is<int64_t>()) return std::to_string(value.as<int64_t>());
  if (value.is<double>()) return python::repr(value.as<double>());
  if (value.is_text()) {
    run.charge_text(value.text().size());
    return std::string(value.text());
  }
  if (const Sequence* sequence = value.sequence()) return repr(run, *sequence);
  if (const Dict* dict = value.dict()) return repr(run, *dict);
  run.fail(type_name(value), " is printed; that is not supported.");
}

Value to_text_value(Run& run, const Value& value) {
  return value.is_text() ? value : Value::text(to_text(run, value));
}

std::vector<Value> items_of(Run& run, const Value& value) {
  if (value.is<Undefined>()) return {};
  if (value.is_text()) return items_of(run, make_list(run, python::characters(value.text())));
  if (const Dict* dict = value.dict()) {
    run.charge_values(dict->items.size());
    std::vector<Value> keys;
    for (const auto& item : dict->items) keys.push_back(item.first);
    return keys;
  }
  const Sequence* sequence = value.sequence();
  if (sequence == nullptr) run.fail(type_name(value), " cannot be looped over.");
  run.charge_values(sequence->items.size());
  if (sequence->kind != Sequence::Kind::Iterator) return sequence->items;
  const auto begin = sequence->items.begin() + static_cast<std::ptrdiff_t>(sequence->used);
  sequence->used = sequence->items.size();
  return {begin, sequence->items.end()};
}

int64_t length_of(Run& run, const Value& value) {
  if (value.is<Undefined>()) return 0;
  if (value.is_text()) {
    run.charge_text(value.text().size());
    return static_cast<int64_t>(python::length(value.text()));
  }
  if (const Dict* dict = value.dict()) return static_cast<int64_t>(dict->items.size());
  const Sequence* sequence = value.sequence();
  if (sequence == nullptr || sequence->kind == Sequence::Kind::Iterator)
    run.fail(type_name(value), " has no length.");
  return static_cast<int64_t>(sequence->items.size());
}

bool equal(Run& run, const Value& left, const Value& right) {
  run.charge(1);
  if (is_number(left) && is_number(right)) return exact(left) == exact(right);
  if (left.index() != right.index()) return false;
  if (left.is_text()) {
    run.charge_text(std::min(left.text().size(), right.text().size()));
    return left.text() == right.text();
  }
  if (left.sequence()) return equal_sequences(run, *left.sequence(), *right.sequence());
  if (left.dict()) return equal_dicts(run, *left.dict(), *right.dict());
  if (left.is<Namespace*>()) return left.as<Namespace*>() == right.as<Namespace*>();
  if (left.is<CallablePointer>()) run.fail("functions are compared; that is not supported.");
  return true;  // undefined and undefined, none and none
}

bool less(Run& run, const Value& left, const Value& right) {
  run.charge(1);
  if (is_number(left) && is_number(right)) return exact(left) < exact(right);
  if (left.is_text() && right.is_text()) {
    run.charge_text(std::min(left.text().size(), right.text().size()));
    return left.text() < right.text();  // the order of bytes in UTF-8 is that of code points
  }
  const Sequence *a = left.sequence(), *b = right.sequence();
  if (a != nullptr && b != nullptr && a->kind == b->kind && can_be_repeated(left))
    return less_items(run, *a, *b);
  fail_operands(run, "<", left, right);
}

bool contains(Run& run, const Value& container, const Value& item) {
  if (container.is_text()) {
    if (!item.is_text())
      run.fail("'in' looks for ", type_name(item), " in a string; only strings are in it.");
    run.charge_text(container.text().size());
    return python::find(container.text(), item.text()) != std::string_view::npos;
  }
  if (const Dict* dict = container.dict()) {
    if (!is_hashable(item)) run.fail("'in' looks for ", type_name(item), " among the keys of a dict.");
    return find(run, *dict, item) != nullptr;
  }
  return std::ranges::any_of(items_of(run, container),
                             [&](const Value& one) { return equal(run, one, item); });
}

bool is_hashable(const Value& value) {
  if (value.dict()) return false;
  const Sequence* sequence = value.sequence();
  if (sequence == nullptr) return true;
  return sequence->kind != Sequence::Kind::List && std::ranges::all_of(sequence->items, is_hashable);
}

Value add(Run& run, const Value& left, const Value& right) {
  const auto a = as_integer(left), b = as_integer(right);
  int64_t sum = 0;
  if (a && b) {
    const bool overflows = __builtin_add_overflow(*a, *b, &sum);
    return checked(run, overflows, sum);
  }
  if (is_number(left) && is_number(right)) return as_double(left) + as_double(right);
  if (left.is_text() && right.is_text()) {
    run.charge_text(left.text().size() + right.text().size());
    return Value::text(std::string(left.text()) += right.text());
  }
  const Sequence *x = left.sequence(), *y = right.sequence();
  if (x != nullptr && y != nullptr && x->kind == y->kind && can_be_repeated(left)) {
    run.charge_values(x->items.size() + y->items.size());
    std::vector<Value> all = x->items;
    all.insert(all.end(), y->items.begin(), y->items.end());
    return make_sequence(run, x->kind, std::move(all));
  }
  fail_operands(run, "+", left, right);
}

Value subtract(Run& run, const Value& left, const Value& right) {
  const auto a = as_integer(left), b = as_integer(right);
  int64_t difference = 0;
  if (a && b) {
    const bool overflows = __builtin_sub_overflow(*a, *b, &difference);
    return checked(run, overflows, difference);
  }
  if (is_number(left) && is_number(right)) return as_double(left) - as_double(right);
  fail_operands(run, "-", left, right);
}

Value multiply(Run& run, const Value& left, const Value& right) {
  const auto a = as_integer(left), b = as_integer(right);
  int64_t product = 0;
  if (a && b) {
    const bool overflows = __builtin_mul_overflow(*a, *b, &product);
    return checked(run, overflows, product);
  }
  if (is_number(left) && is_number(right)) return as_double(left) * as_double(right);
  if (can_be_repeated(left) && b) return repeat(run, left, *b);
  if (can_be_repeated(right) && a) return repeat(run, right, *a);
  fail_operands(run, "*", left, right);
}

Value divide(Run& run, const Value& left, const Value& right) {
  if (!is_number(left) || !is_number(right)) fail_operands(run, "/", left, right);
  if (as_double(right) == 0) run.fail("a division by zero.");
  const auto a = as_integer(left), b = as_integer(right);
  // Of whole numbers Python rounds the exact quotient once.
  if (a && b) return static_cast<double>(static_cast<long double>(*a) / static_cast<long double>(*b));
  return as_double(left) / as_double(right);
}

Value floor_divide(Run& run, const Value& left, const Value& right) {
  if (!is_number(left) || !is_number(right)) fail_operands(run, "//", left, right);
  if (as_double(right) == 0) run.fail("a division by zero.");
  const auto a = as_integer(left), b = as_integer(right);
  if (a && b) return floor_divide_integers(run, *a, *b);
  return floor_divide_doubles(as_double(left), as_double(right));
}

Value modulo(Run& run, const Value& left, const Value& right) {
  if (left.is_text()) {
    check_defined(run, right);
    run.fail("'%' with a string formats it in Python; that is not supported. Use '~'.");
  }
  if (!is_number(left) || !is_number(right)) fail_operands(run, "%", left, right);
  if (as_double(right) == 0) run.fail("a division by zero.");
  const auto a = as_integer(left), b = as_integer(right);
  if (!a || !b) return modulo_doubles(as_double(left), as_double(right));
  if (*b == -1) return int64_t{0};
  const int64_t rest = *a % *b;
  return rest != 0 && (rest < 0) != (*b < 0) ? rest + *b : rest;
}

Value power(Run& run, const Value& left, const Value& right) {
  if (!is_number(left) || !is_number(right)) fail_operands(run, "**", left, right);
  const auto a = as_integer(left), b = as_integer(right);
  if (a && b) return power_of_integers(run, *a, *b);
  const double base = as_double(left), exponent = as_double(right);
  if (base == 0 && exponent < 0) run.fail("0 has no negative power.");
  const double result = std::pow(base, exponent);
  if (std::isnan(result) && !std::isnan(base) && !std::isnan(exponent))
    run.fail("a root of a negative number.");
  if (std::isinf(result) && std::isfinite(base) && std::isfinite(exponent))
    run.fail("a power is too large for a fraction of 64 bits.");
  return result;
}

Value negate(Run& run, const Value& value) {
  if (const auto integer = as_integer(value)) return subtract(run, int64_t{0}, *integer);
  if (value.is<double>()) return -value.as<double>();
  check_defined(run, value);
  run.fail("'-' does not go with ", type_name(value), ".");
}

Value positive(Run& run, const Value& value) {
  if (const auto integer = as_integer(value)) return *integer;
  if (value.is<double>()) return value;
  check_defined(run, value);
  run.fail("'+' does not go with ", type_name(value), ".");
}

Value slice(Run& run, const Value& value, const Value& start, const Value& stop, const Value& step) {
  check_defined(run, value);
  const Sequence* sequence = value.sequence();
  const bool indexed =
      sequence != nullptr && (can_be_repeated(value) || sequence->kind == Sequence::Kind::Range);
  if (!value.is_text() && !indexed) run.fail(type_name(value), " cannot be sliced.");
  const SliceBounds bounds = slice_bounds(run, length_of(run, value), start, stop, step);
  if (!value.is_text()) {
    run.charge_values(static_cast<size_t>(bounds.count()));
    std::vector<Value> taken;
    for (int64_t i = 0, at = bounds.start; i < bounds.count(); ++i, at += bounds.step)
      taken.push_back(sequence->items[static_cast<size_t>(at)]);
    return make_sequence(run, sequence->kind, std::move(taken));
  }
  run.charge_text(value.text().size());
  if (bounds.step == 1) {
    const size_t begin = python::byte_offset(value.text(), static_cast<size_t>(bounds.start));
    const size_t bytes = python::byte_offset(value.text().substr(begin), static_cast<size_t>(bounds.count()));
    return Value::text(value.text().substr(begin, bytes));
  }
  const std::vector<std::string_view> characters = python::characters(value.text());
  std::string taken;
  for (int64_t i = 0, at = bounds.start; i < bounds.count(); ++i, at += bounds.step)
    taken += characters[static_cast<size_t>(at)];
  return Value::text(std::move(taken));
}

std::string to_json(Run& run, const Value& value, const JsonStyle& style) {
  return JsonWriter(run, style).write(value);
}

}  // namespace halfstep::jinja
