#include "jinja/builtins.h"

#include <halfstep/printable.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <limits>
#include <list>
#include <span>

#include "jinja/python_text.h"
#include "words/names.h"

namespace halfstep::jinja {
namespace {

using Given = Builtin::Given;
using Kind = Sequence::Kind;

// Arguments
// ------------------------------------------------------------------------------------------------------

bool flag(const std::optional<Value>& given) { return given && truth(*given); }

int64_t integer(Run& run, const std::optional<Value>& given, int64_t absent) {
  if (!given) return absent;
  const auto number = as_integer(*given);
  if (!number) run.fail(type_name(*given), " is given where a whole number is expected.");
  return *number;
}

bool is_given(const std::optional<Value>& given) { return given && !given->is<None>(); }

std::string_view text_argument(Run& run, const Value& given) {
  if (!given.is_text()) run.fail(type_name(given), " is given where a string is expected.");
  return given.text();
}

void check_defined(Run& run, const Value& value) {
  if (value.is<Undefined>()) run.fail(*value.as<Undefined>().why);
}

Given bind(Run& run, const Builtin& builtin, const Arguments& arguments) {
  const size_t most = builtin.parameters.size();
  if (arguments.values.size() > most)
    run.fail("'", builtin.name, "' is given ", arguments.values.size(), " arguments; up to ", most,
             " are supported.");
  Given given(most);
  for (size_t i = 0; i < arguments.values.size(); ++i) given[i] = arguments.values[i];
  for (const auto& [name, value] : arguments.named) {
    const auto place = std::ranges::find(builtin.parameters, name);
    if (place == builtin.parameters.end())
      run.fail("'", builtin.name, "' has no argument ", in_quotes(name), ".");
    std::optional<Value>& slot = given[static_cast<size_t>(place - builtin.parameters.begin())];
    if (slot) run.fail("'", builtin.name, "' is given ", in_quotes(name), " twice.");
    slot = value;
  }
  for (size_t i = 0; i < builtin.required; ++i)
    if (!given[i]) run.fail("'", builtin.name, "' needs ", builtin.required, " arguments.");
  return given;
}

// Text
// -----------------------------------------------------------------------------------------------------------

Value made(Run& run, std::string text) {
  run.charge_text(text.size());
  return Value::text(std::move(text));
}

Value made(Run& run, std::optional<std::string> text, std::string_view name) {
  if (!text)
    run.fail("'", name, "' of this text is not supported: it has letters whose case depends on others.");
  return made(run, std::move(*text));
}

// What a filter takes for text, whatever it is given.
struct TextOf {
  TextOf(Run& run, const Value& value) : value(to_text_value(run, value)) {
    run.charge_text(this->value.text().size());
  }
  std::string_view operator*() const { return value.text(); }
  Value value;
};

Value upper(Run& run, const Value& self, const Given&) {
  return made(run, python::upper(*TextOf(run, self)));
}
Value lower(Run& run, const Value& self, const Given&) {
  return made(run, python::lower(*TextOf(run, self)), "lower");
}
Value capitalize(Run& run, const Value& self, const Given&) {
  return made(run, python::capitalize(*TextOf(run, self)), "capitalize");
}
Value title_method(Run& run, const Value& self, const Given&) {
  return made(run, python::title(self.text()), "title");
}

// Jinja's words begin behind spaces, hyphens and opening brackets: Python's str.title goes by letters.
Value title_filter(Run& run, const Value& self, const Given&) {
  const TextOf text(run, self);
  const auto separates = [](std::string_view one) {
    return python::strip(one).empty() || std::string_view("-({[<").find(one) != std::string_view::npos;
  };
  std::string result;
  std::string_view rest = *text;
  const std::vector<std::string_view> all = python::characters(*text);
  for (size_t at = 0; at < all.size();) {
    size_t bytes = 0;
    const bool separator = separates(all[at]);
    const size_t first_bytes = all[at].size();
    while (at < all.size() && separates(all[at]) == separator) bytes += all[at++].size();
    const std::string_view part = rest.substr(0, bytes);
    rest.remove_prefix(bytes);
    result += python::upper(part.substr(0, first_bytes));
    const auto lower_part = python::lower(part.substr(first_bytes));
    result += made(run, lower_part, "title").text();
  }
  return made(run, std::move(result));
}

enum class Sides : uint8_t { Left = 1, Right = 2, Both = 3 };

template <Sides sides>
Value strip(Run& run, const Value& self, const Given& given) {
  const TextOf whole(run, self);
  std::string_view text = *whole;
  constexpr bool left = static_cast<uint8_t>(sides) & 1, right = static_cast<uint8_t>(sides) & 2;
  if (!is_given(given[0])) {
    if (left) text = python::lstrip(text);
    if (right) text = python::rstrip(text);
  } else {
    const std::string_view set = text_argument(run, *given[0]);
    run.charge_text(set.size());
    if (left) text = python::lstrip(text, set);
    if (right) text = python::rstrip(text, set);
  }
  return Value::text(text);
}

Value replace_text(Run& run, std::string_view text, std::string_view old, std::string_view with,
                   int64_t most) {
  run.charge_text(text.size());
  const size_t times = python::count(text, old);
  // Bounded before it is made.
  const size_t bytes = text.size() + times * (with.size() > old.size() ? with.size() - old.size() : 0);
  run.charge_text(with.size() > kMaxTextBytes ? kMaxTextBytes + 1 : bytes);
  return Value::text(python::replace(text, old, with, most));
}

Value replace_filter(Run& run, const Value& self, const Given& given) {
  const TextOf text(run, self), old(run, *given[0]), with(run, *given[1]);
  return replace_text(run, *text, *old, *with, is_given(given[2]) ? integer(run, given[2], -1) : -1);
}

Value replace_method(Run& run, const Value& self, const Given& given) {
  return replace_text(run, self.text(), text_argument(run, *given[0]), text_argument(run, *given[1]),
                      integer(run, given[2], -1));
}

Value joined(Run& run, std::string_view separator, const std::vector<Value>& items, bool texts_only) {
  std::string result;
  for (size_t i = 0; i < items.size(); ++i) {
    if (texts_only) text_argument(run, items[i]);
    const TextOf text(run, items[i]);
    if (i > 0) result += separator;
    result += *text;
    run.charge_text(separator.size());
    run.check_text(result.size());
  }
  return Value::text(std::move(result));
}

Value indent(Run& run, const Value& self, const Given& given) {
  check_defined(run, self);
  std::string by(given[0] && given[0]->is_text() ? given[0]->text() : "");
  if (!given[0] || !given[0]->is_text()) {
    const int64_t width = integer(run, given[0], 4);
    run.charge_text(static_cast<size_t>(std::clamp<int64_t>(width, 0, kMaxTextBytes + 1)));
    by.assign(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
  }
  const bool first = flag(given[1]), blank = flag(given[2]);
  run.charge_text(text_argument(run, self).size());
  const std::string text = std::string(self.text()) + "\n";
  std::string result = first ? by : "";
  const std::vector<std::string_view> lines = python::splitlines(text, false);
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) {
      result += '\n';
      if (blank || !lines[i].empty()) result += by;
    }
    result += lines[i];
    run.charge_text(by.size() + lines[i].size());
    run.check_text(result.size());
  }
  return Value::text(std::move(result));
}

template <bool from_right>
Value split(Run& run, const Value& self, const Given& given) {
  std::optional<std::string_view> separator;
  if (is_given(given[0])) {
    separator = text_argument(run, *given[0]);
    if (separator->empty()) run.fail("'split' is given an empty separator.");
  }
  run.charge_text(self.text().size());
  const auto cut = from_right ? python::rsplit : python::split;
  return make_list(run, cut(self.text(), separator, integer(run, given[1], -1)));
}

template <bool from_right>
Value partition(Run& run, const Value& self, const Given& given) {
  const std::string_view text = self.text(), separator = text_argument(run, *given[0]);
  if (separator.empty()) run.fail("'partition' is given an empty separator.");
  run.charge_text(text.size());
  const size_t at = from_right ? python::rfind(text, separator) : python::find(text, separator);
  const auto tuple = [&](std::string_view before, std::string_view middle, std::string_view behind) {
    return make_sequence(run, Kind::Tuple, {Value::text(before), Value::text(middle), Value::text(behind)});
  };
  if (at == text.npos) return from_right ? tuple("", "", text) : tuple(text, "", "");
  return tuple(text.substr(0, at), separator, text.substr(at + separator.size()));
}

// -1, or an Error for those that must find.
template <bool from_right, bool must>
Value find_text(Run& run, const Value& self, const Given& given) {
  const std::string_view text = self.text(), part = text_argument(run, *given[0]);
  run.charge_text(text.size());
  const size_t at = from_right ? python::rfind(text, part) : python::find(text, part);
  if (at != text.npos) return static_cast<int64_t>(python::length(text.substr(0, at)));
  if (must) run.fail("'index' finds no ", in_quotes(part), ".");
  return int64_t{-1};
}

template <bool at_end>
Value begins_or_ends(Run& run, const Value& self, const Given& given) {
  const auto matches = [&](const Value& part) {
    const std::string_view wanted = text_argument(run, part);
    return at_end ? self.text().ends_with(wanted) : self.text().starts_with(wanted);
  };
  const Sequence* several = given[0]->sequence();
  if (several == nullptr || several->kind != Kind::Tuple) return matches(*given[0]);
  run.charge_values(several->items.size());
  return std::ranges::any_of(several->items, matches);
}

Value remove_prefix(Run& run, const Value& self, const Given& given) {
  const std::string_view part = text_argument(run, *given[0]);
  return self.text().starts_with(part) ? made(run, std::string(self.text().substr(part.size()))) : self;
}

Value remove_suffix(Run& run, const Value& self, const Given& given) {
  const std::string_view part = text_argument(run, *given[0]), text = self.text();
  return text.ends_with(part) ? made(run, std::string(text.substr(0, text.size() - part.size()))) : self;
}

Value count_text(Run& run, const Value& self, const Given& given) {
  run.charge_text(self.text().size());
  return static_cast<int64_t>(python::count(self.text(), text_argument(run, *given[0])));
}

template <bool left>
Value justify(Run& run, const Value& self, const Given& given) {
  const std::string_view fill = given[1] ? text_argument(run, *given[1]) : " ";
  if (python::length(fill) != 1)
    run.fail("text is filled up with one character, not with ", in_quotes(fill), ".");
  const int64_t missing = integer(run, given[0], 0) - length_of(run, self);
  if (missing <= 0) return self;
  const size_t bytes = missing > static_cast<int64_t>(kMaxTextBytes)
                           ? kMaxTextBytes + 1
                           : fill.size() * static_cast<size_t>(missing);
  run.charge_text(self.text().size() + bytes);
  std::string filling;
  for (int64_t i = 0; i < missing; ++i) filling += fill;
  return Value::text(left ? std::string(self.text()) + filling : filling += self.text());
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_letter_or_digit(char c) { return is_digit(c) || is_letter(c); }

template <bool (*is_one)(char)>
Value all_are(Run& run, const Value& self, const Given&) {
  run.charge_text(self.text().size());
  for (const char c : self.text())
    if (static_cast<uint8_t>(c) >= 0x80) run.fail("this test of characters is supported for ASCII only.");
  return !self.text().empty() && std::ranges::all_of(self.text(), is_one);
}

template <char from, char to>
Value has_only_case(Run& run, const Value& self, const Given&) {
  bool any = false;
  for (const char c : self.text()) {
    if (static_cast<uint8_t>(c) >= 0x80) run.fail("this test of characters is supported for ASCII only.");
    if (is_letter(c) && (c < from || c > to)) return false;
    any |= is_letter(c);
  }
  return any;
}

// Numbers
// --------------------------------------------------------------------------------------------------------

// Python's float(text).
std::optional<double> read_double(std::string_view text) {
  std::string plain(python::strip(text));
  std::string word = plain;
  std::ranges::transform(word, word.begin(),
                         [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c | 0x20) : c; });
  if (word.starts_with('+') || word.starts_with('-')) word.erase(0, 1);
  const double sign = plain.starts_with('-') ? -1 : 1;
  if (word == "inf" || word == "infinity") return sign * std::numeric_limits<double>::infinity();
  if (word == "nan") return std::numeric_limits<double>::quiet_NaN();
  for (size_t i = 0; i < word.size(); ++i)
    if (word[i] == '_' &&
        (i == 0 || i + 1 == word.size() || !is_digit(word[i - 1]) || !is_digit(word[i + 1])))
      return std::nullopt;
  std::erase(word, '_');
  if (word.empty() || !(is_digit(word[0]) || word[0] == '.')) return std::nullopt;
  double number = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  if (end != word.data() + word.size()) return std::nullopt;
  // Out of range: strtod says on which side.
  if (error == std::errc::result_out_of_range) number = std::strtod(word.c_str(), nullptr);
  return sign * number;
}

// Python's int(text): nothing if it is not one.
std::optional<int64_t> read_integer(Run& run, std::string_view text) {
  std::string digits(python::strip(text));
  const bool negative = digits.starts_with('-');
  if (negative || digits.starts_with('+')) digits.erase(0, 1);
  for (size_t i = 0; i < digits.size(); ++i) {
    const bool between = i > 0 && i + 1 < digits.size() && digits[i - 1] != '_';
    if (!is_digit(digits[i]) && !(digits[i] == '_' && between)) return std::nullopt;
  }
  std::erase(digits, '_');
  if (digits.empty()) return std::nullopt;
  if (negative) digits.insert(0, "-");
  int64_t number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc{}) run.fail("the number ", in_quotes(digits), " needs more than 64 bits.");
  return number;
}

int64_t truncated(Run& run, double number) {
  if (!(std::abs(number) < 0x1p63)) run.fail("the number ", number, " needs more than 64 bits.");
  return static_cast<int64_t>(number);
}

Value to_integer(Run& run, const Value& self, const Given& given) {
  check_defined(run, self);
  if (integer(run, given[1], 10) != 10) run.fail("'int' is supported with base 10 only.");
  const Value otherwise = given[0] ? *given[0] : Value(int64_t{0});
  if (const auto number = as_integer(self)) return *number;
  if (self.is<double>())
    return std::isnan(self.as<double>()) ? otherwise : Value(truncated(run, self.as<double>()));
  if (!self.is_text()) return otherwise;
  run.charge_text(self.text().size());
  if (const auto number = read_integer(run, self.text())) return *number;
  const auto number = read_double(self.text());
  if (!number || !std::isfinite(*number)) return otherwise;
  return truncated(run, *number);
}

Value to_double(Run& run, const Value& self, const Given& given) {
  check_defined(run, self);
  if (is_number(self)) return as_double(self);
  if (self.is_text()) {
    run.charge_text(self.text().size());
    if (const auto number = read_double(self.text())) return *number;
  }
  return given[0] ? *given[0] : Value(0.0);
}

Value absolute(Run& run, const Value& self, const Given&) {
  check_defined(run, self);
  if (!is_number(self)) run.fail("'abs' of ", type_name(self), ".");
  if (const auto number = as_integer(self)) return *number < 0 ? negate(run, *number) : Value(*number);
  return std::abs(self.as<double>());
}

Value round_number(Run& run, const Value& self, const Given& given) {
  check_defined(run, self);
  if (!is_number(self)) run.fail("'round' of ", type_name(self), ".");
  const int64_t places = integer(run, given[0], 0);
  if (places < 0 || places > 15) run.fail("'round' to ", places, " places; 0 to 15 are supported.");
  const std::string_view method = given[1] ? text_argument(run, *given[1]) : "common";
  if (method == "common") {
    if (const auto number = as_integer(self)) return *number;
    // Printing rounds the exact value, ties to even, as Python's round does.
    std::array<char, 400> digits{};
    std::snprintf(digits.data(), digits.size(), "%.*f", static_cast<int>(places), self.as<double>());
    return std::strtod(digits.data(), nullptr);
  }
  if (method != "ceil" && method != "floor")
    run.fail("'round' by ", in_quotes(method), "; common, ceil or floor.");
  const double power = std::pow(10.0, static_cast<double>(places));
  const double scaled = as_double(self) * power;
  return static_cast<double>(truncated(run, method == "ceil" ? std::ceil(scaled) : std::floor(scaled))) /
         power;
}

// Sequences
// ------------------------------------------------------------------------------------------------------

Value iterator(Run& run, std::vector<Value> items) {
  return make_sequence(run, Kind::Iterator, std::move(items));
}

Value first(Run& run, const Value& self, const Given&) {
  if (const Sequence* sequence = self.sequence(); sequence != nullptr && sequence->kind == Kind::Iterator) {
    if (sequence->used < sequence->items.size()) return sequence->items[sequence->used++];
    return Value::undefined("No first item, the sequence is empty.");
  }
  const std::vector<Value> items = items_of(run, self);
  return items.empty() ? Value::undefined("No first item, the sequence is empty.") : items.front();
}

bool is_iterator(const Value& value) { return value.sequence() && value.sequence()->kind == Kind::Iterator; }

Value last(Run& run, const Value& self, const Given&) {
  if (is_iterator(self)) run.fail("'last' of the result of a filter such as 'map'; add '| list'.");
  const std::vector<Value> items = items_of(run, self);
  return items.empty() ? Value::undefined("No last item, the sequence is empty.") : items.back();
}

Value reverse(Run& run, const Value& self, const Given&) {
  std::vector<Value> items = items_of(run, self);
  std::ranges::reverse(items);
  if (self.is_text()) return joined(run, "", items, true);
  return is_iterator(self) ? make_list(run, std::move(items)) : iterator(run, std::move(items));
}

Value length(Run& run, const Value& self, const Given&) { return length_of(run, self); }
Value to_list(Run& run, const Value& self, const Given&) { return make_list(run, items_of(run, self)); }

// "a.b.0": the attributes of an attribute; a number is an index.
class AttributePath {
 public:
  AttributePath(Run& run, const Value& attribute) {
    if (attribute.is<None>()) return;
    if (!attribute.is_text()) {
      parts_.push_back(attribute);
      return;
    }
    run.charge_text(attribute.text().size());
    for (const std::string_view part : python::split(attribute.text(), ".", -1)) {
      const bool index = !part.empty() && part.size() < 10 && std::ranges::all_of(part, is_digit);
      parts_.push_back(index ? Value(int64_t{std::atoi(std::string(part).c_str())}) : Value::text(part));
    }
  }
  Value of(Run& run, Value item, const Value& otherwise = None{}) const {
    for (const Value& part : parts_) {
      item = get_item(run, item, part);
      if (item.is<Undefined>() && !otherwise.is<None>()) item = otherwise;
    }
    return item;
  }

 private:
  std::vector<Value> parts_;
};

Value without_case(Run& run, Value value) {
  return value.is_text() ? lower(run, value, {}) : std::move(value);
}

// A list, because its sort is stable and stays within its items even when the order contradicts itself (NaN).
using Keyed = std::list<std::pair<std::vector<Value>, Value>>;

// By keys that were computed once, stable, also when reversed.
std::vector<Value> sorted(Run& run, Keyed keyed, bool reversed) {
  const auto before = [&](const std::vector<Value>& a, const std::vector<Value>& b) {
    for (size_t i = 0; i < a.size(); ++i)
      if (!equal(run, a[i], b[i])) return less(run, a[i], b[i]);
    return false;
  };
  keyed.sort([&](const auto& a, const auto& b) {
    return reversed ? before(b.first, a.first) : before(a.first, b.first);
  });
  std::vector<Value> items;
  items.reserve(keyed.size());
  for (auto& item : keyed) items.push_back(std::move(item.second));
  return items;
}

Value sort(Run& run, const Value& self, const Given& given) {
  const bool reversed = flag(given[0]), with_case = flag(given[1]);
  std::vector<AttributePath> paths;
  if (given[2] && given[2]->is_text())
    for (const std::string_view attribute : python::split(given[2]->text(), ",", -1))
      paths.emplace_back(run, Value::text(attribute));
  else
    paths.emplace_back(run, given[2].value_or(None{}));
  Keyed keyed;
  for (Value& item : items_of(run, self)) {
    std::vector<Value> keys;
    run.charge_values(paths.size());
    for (const AttributePath& path : paths) {
      Value key = path.of(run, item);
      keys.push_back(with_case ? std::move(key) : without_case(run, std::move(key)));
    }
    keyed.emplace_back(std::move(keys), std::move(item));
  }
  return make_list(run, sorted(run, std::move(keyed), reversed));
}

Value pair_of(Run& run, const std::pair<Value, Value>& item) {
  return make_sequence(run, Kind::Tuple, {item.first, item.second});
}

const Dict& dict_of(Run& run, const Value& value, std::string_view what) {
  check_defined(run, value);
  if (value.dict() == nullptr) run.fail("'", what, "' of ", type_name(value), "; only dicts have items.");
  return *value.dict();
}

Value dictsort(Run& run, const Value& self, const Given& given) {
  const std::string_view by = given[1] ? text_argument(run, *given[1]) : "key";
  if (by != "key" && by != "value") run.fail("'dictsort' by ", in_quotes(by), "; key or value.");
  Keyed keyed;
  for (const auto& item : dict_of(run, self, "dictsort").items) {
    Value key = by == "key" ? item.first : item.second;
    if (!flag(given[0])) key = without_case(run, std::move(key));
    keyed.emplace_back(std::vector<Value>{std::move(key)}, pair_of(run, item));
  }
  return make_list(run, sorted(run, std::move(keyed), flag(given[2])));
}

std::vector<Value> pairs_of(Run& run, const Dict& dict) {
  std::vector<Value> pairs;
  for (const auto& item : dict.items) pairs.push_back(pair_of(run, item));
  return pairs;
}

Value items_filter(Run& run, const Value& self, const Given&) {
  if (self.is<Undefined>()) return iterator(run, {});
  return iterator(run, pairs_of(run, dict_of(run, self, "items")));
}

Value unique(Run& run, const Value& self, const Given& given) {
  const AttributePath path(run, given[1].value_or(None{}));
  std::vector<Value> seen, items;
  for (Value& item : items_of(run, self)) {
    Value key = path.of(run, item);
    if (!flag(given[0])) key = without_case(run, std::move(key));
    if (!is_hashable(key)) run.fail("'unique' compares ", type_name(key), "; lists and dicts cannot be.");
    if (std::ranges::any_of(seen, [&](const Value& one) { return equal(run, one, key); })) continue;
    seen.push_back(std::move(key));
    items.push_back(std::move(item));
  }
  return iterator(run, std::move(items));
}

template <bool largest>
Value extreme(Run& run, const Value& self, const Given& given) {
  const AttributePath path(run, given[1].value_or(None{}));
  std::optional<std::pair<Value, Value>> best;
  for (Value& item : items_of(run, self)) {
    Value key = path.of(run, item);
    if (!flag(given[0])) key = without_case(run, std::move(key));
    if (!best || (largest ? less(run, best->first, key) : less(run, key, best->first)))
      best.emplace(std::move(key), std::move(item));
  }
  return best ? best->second : Value::undefined("No item to choose, the sequence is empty.");
}

Value sum(Run& run, const Value& self, const Given& given) {
  const AttributePath path(run, given[0].value_or(None{}));
  Value total = given[1].value_or(int64_t{0});
  if (total.is_text()) run.fail("'sum' does not add strings; use 'join'.");
  for (const Value& item : items_of(run, self)) total = add(run, total, path.of(run, item));
  return total;
}

Value join(Run& run, const Value& self, const Given& given) {
  std::vector<Value> items = items_of(run, self);
  if (is_given(given[1])) {
    const AttributePath path(run, *given[1]);
    for (Value& item : items) item = path.of(run, std::move(item));
  }
  const TextOf separator(run, given[0].value_or(Value::text("")));
  return joined(run, *separator, items, false);
}

// A filter or a test by the name that another one is given.
const Builtin& named_by(Run& run, const Value& name, const Builtin* (*find)(std::string_view),
                        std::string_view kind) {
  const Builtin* found = find(text_argument(run, name));
  if (found == nullptr) run.fail("the ", kind, " ", in_quotes(name.text()), " is not supported.");
  return *found;
}

Arguments without_first(const Arguments& arguments, size_t count) {
  Arguments rest{.values = {}, .named = arguments.named};
  if (arguments.values.size() > count)
    rest.values.assign(arguments.values.begin() + static_cast<std::ptrdiff_t>(count), arguments.values.end());
  return rest;
}

Value map(Run& run, const Value& self, const Arguments& arguments) {
  std::vector<Value> results;
  if (!truth(self)) return iterator(run, {});
  if (!arguments.values.empty()) {
    const Builtin& filter = named_by(run, arguments.values[0], find_filter, "filter");
    const Arguments rest = without_first(arguments, 1);
    for (const Value& item : items_of(run, self)) results.push_back(call(run, filter, item, rest));
    return iterator(run, std::move(results));
  }
  std::optional<Value> attribute;
  Value otherwise = None{};
  for (const auto& [name, value] : arguments.named) {
    if (name != "attribute" && name != "default") run.fail("'map' has no argument ", in_quotes(name), ".");
    (name == "attribute" ? attribute.emplace() : otherwise) = value;
  }
  if (!attribute) run.fail("'map' needs the name of a filter, or attribute=.");
  const AttributePath path(run, *attribute);
  for (Value& item : items_of(run, self)) results.push_back(path.of(run, std::move(item), otherwise));
  return iterator(run, std::move(results));
}

template <bool by_attribute, bool keeps>
Value choose(Run& run, const Value& self, const Arguments& arguments) {
  if (!truth(self)) return iterator(run, {});
  constexpr size_t place = by_attribute ? 1 : 0;
  if (arguments.values.size() < place) run.fail("the name of an attribute is missing.");
  const AttributePath path(run, by_attribute ? arguments.values[0] : Value(None{}));
  const Builtin* test = nullptr;
  if (arguments.values.size() > place) test = &named_by(run, arguments.values[place], find_test, "test");
  const Arguments rest = without_first(arguments, place + 1);
  std::vector<Value> chosen;
  for (Value& item : items_of(run, self)) {
    const Value value = path.of(run, item);
    if (truth(test ? call(run, *test, value, rest) : value) == keeps) chosen.push_back(std::move(item));
  }
  return iterator(run, std::move(chosen));
}

Value default_value(Run&, const Value& self, const Given& given) {
  if (!self.is<Undefined>() && !(flag(given[1]) && !truth(self))) return self;
  return given[0].value_or(Value::text(""));
}

Value to_json_filter(Run& run, const Value& self, const Given& given) {
  JsonStyle style;
  style.ascii_only = flag(given[0]);
  style.sorted = flag(given[3]);
  if (is_given(given[1])) {
    const int64_t width = given[1]->is_text() ? 0 : integer(run, given[1], 0);
    if (width > 64) run.fail("'tojson' is given an indent of ", width, "; up to 64 is supported.");
    style.indent = given[1]->is_text() ? std::string(given[1]->text())
                                       : std::string(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
    style.item_separator = ",";
  }
  if (is_given(given[2])) {
    const Sequence* pair = given[2]->sequence();
    if (pair == nullptr || pair->items.size() != 2)
      run.fail("'tojson' is given separators that are not two strings.");
    style.item_separator = text_argument(run, pair->items[0]);
    style.key_separator = text_argument(run, pair->items[1]);
    run.charge_text(style.item_separator.size() + style.key_separator.size());
    if (style.item_separator.size() + style.key_separator.size() > 64)
      run.fail("'tojson' is given separators of more than 64 bytes.");
  }
  return Value::text(to_json(run, self, style));
}

Value to_string(Run& run, const Value& self, const Given&) { return to_text_value(run, self); }
Value itself(Run&, const Value& self, const Given&) { return self; }

// Methods of dicts and lists
// -------------------------------------------------------------------------------------

Value get(Run& run, const Value& self, const Given& given) {
  if (!is_hashable(*given[0]))
    run.fail("'get' looks for ", type_name(*given[0]), " among the keys of a dict.");
  const Value* found = find(run, *self.dict(), *given[0]);
  return found != nullptr ? *found : given[1].value_or(None{});
}

Value keys(Run& run, const Value& self, const Given&) {
  return make_sequence(run, Kind::Keys, items_of(run, self));
}
Value values(Run& run, const Value& self, const Given&) {
  std::vector<Value> all;
  for (const auto& item : self.dict()->items) all.push_back(item.second);
  return make_sequence(run, Kind::Values, std::move(all));
}
Value items_method(Run& run, const Value& self, const Given&) {
  return make_sequence(run, Kind::Items, pairs_of(run, *self.dict()));
}

Value index_of(Run& run, const Value& self, const Given& given) {
  const std::vector<Value>& items = self.sequence()->items;
  for (size_t i = 0; i < items.size(); ++i)
    if (equal(run, items[i], *given[0])) return static_cast<int64_t>(i);
  run.fail("'index' finds no such item.");
}
Value count_items(Run& run, const Value& self, const Given& given) {
  return static_cast<int64_t>(std::ranges::count_if(
      self.sequence()->items, [&](const Value& item) { return equal(run, item, *given[0]); }));
}

// Functions
// ------------------------------------------------------------------------------------------------------

Value range(Run& run, const Value&, const Given& given) {
  const int64_t a = integer(run, given[0], 0);
  const int64_t start = given[1] ? a : 0, stop = given[1] ? integer(run, given[1], 0) : a;
  const int64_t step = integer(run, given[2], 1);
  if (step == 0) run.fail("'range' has the step 0.");
  constexpr int64_t kMost = 100'000;  // Jinja2's own limit
  std::vector<Value> items;
  for (int64_t at = start; step > 0 ? at < stop : at > stop;) {
    if (static_cast<int64_t>(items.size()) == kMost) run.fail("'range' has more than ", kMost, " numbers.");
    items.emplace_back(at);
    if (__builtin_add_overflow(at, step, &at)) break;
  }
  return make_sequence(run, Kind::Range, std::move(items));
}

Value dict(Run& run, const Value&, const Arguments& arguments) {
  DictBuilder builder(run);
  if (arguments.values.size() > 1)
    run.fail("'dict' is given ", arguments.values.size(), " arguments; one is supported.");
  for (const Value& value : arguments.values)
    for (const auto& item : dict_of(run, value, "dict").items) builder.add(item.first, item.second);
  for (const auto& [name, value] : arguments.named) builder.add(Value::text(name), value);
  return builder.build();
}

Value raise_exception(Run& run, const Value&, const Given& given) {
  run.fail("the template refuses this conversation: ",
           printable(to_text(run, *given[0]), Unprintable::Escaped));
}

Value strftime_now(Run& run, const Value&, const Given& given) {
  std::string format(text_argument(run, *given[0]));
  // Python's datetime answers these itself; a time without a zone has none.
  for (const std::string_view zone : {"%z", "%Z"}) format = python::replace(format, zone, "");
  if (format.find("%f") != format.npos) run.fail("'strftime_now' with %f is not supported.");
  if (format.size() > 256)
    run.fail("'strftime_now' is given a format of ", format.size(), " bytes; up to 256.");
  if (format.empty()) return Value::text("");
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  std::array<char, 4096> text{};
  const size_t bytes = std::strftime(text.data(), text.size(), format.c_str(), &local);
  if (bytes == 0) run.fail("'strftime_now' cannot apply ", in_quotes(format), ".");
  return Value::text(std::string_view(text.data(), bytes));
}

// Tests
// ----------------------------------------------------------------------------------------------------------

template <typename T>
Value holds(Run&, const Value& self, const Given&) {
  return self.is<T>();
}

template <bool wanted>
Value is_bool(Run&, const Value& self, const Given&) {
  return self.is<bool>() && self.as<bool>() == wanted;
}

Value is_sequence(Run&, const Value& self, const Given&) {
  const Sequence* sequence = self.sequence();
  return self.is<Undefined>() || self.is_text() || self.dict() != nullptr ||
         (sequence != nullptr &&
          (sequence->kind == Kind::List || sequence->kind == Kind::Tuple || sequence->kind == Kind::Range));
}

Value is_iterable(Run&, const Value& self, const Given&) {
  return self.is<Undefined>() || self.is_text() || self.dict() != nullptr || self.sequence() != nullptr;
}

Value is_same(Run& run, const Value& self, const Given& given) {
  const auto single = [](const Value& value) { return value.is<bool>() || value.is<None>(); };
  if (!single(self) && !single(*given[0])) run.fail("'sameas' is supported with true, false and none only.");
  return self.index() == given[0]->index() && equal(run, self, *given[0]);
}

template <int64_t rest>
Value is_parity(Run& run, const Value& self, const Given&) {
  return equal(run, modulo(run, self, int64_t{2}), rest);
}

Value divisible(Run& run, const Value& self, const Given& given) {
  return equal(run, modulo(run, self, *given[0]), int64_t{0});
}

template <bool wanted>
Value is_equal(Run& run, const Value& self, const Given& given) {
  return equal(run, self, *given[0]) == wanted;
}
template <bool swapped, bool wanted>
Value is_less(Run& run, const Value& self, const Given& given) {
  return (swapped ? less(run, *given[0], self) : less(run, self, *given[0])) == wanted;
}

Value is_in(Run& run, const Value& self, const Given& given) { return contains(run, *given[0], self); }

// Tables
// ---------------------------------------------------------------------------------------------------------

const Builtin kFilters[] = {
    {"abs", {}, 0, absolute},
    {"capitalize", {}, 0, capitalize},
    {"count", {}, 0, length},
    {"d", {"default_value", "boolean"}, 0, default_value},
    {"default", {"default_value", "boolean"}, 0, default_value},
    {"dictsort", {"case_sensitive", "by", "reverse"}, 0, dictsort},
    {"first", {}, 0, first},
    {"float", {"default"}, 0, to_double},
    {"indent", {"width", "first", "blank"}, 0, indent},
    {"int", {"default", "base"}, 0, to_integer},
    {"items", {}, 0, items_filter},
    {"join", {"d", "attribute"}, 0, join},
    {"last", {}, 0, last},
    {"length", {}, 0, length},
    {"list", {}, 0, to_list},
    {"lower", {}, 0, lower},
    {"map", {}, 0, nullptr, map},
    {"max", {"case_sensitive", "attribute"}, 0, extreme<true>},
    {"min", {"case_sensitive", "attribute"}, 0, extreme<false>},
    {"reject", {}, 0, nullptr, choose<false, false>},
    {"rejectattr", {}, 0, nullptr, choose<true, false>},
    {"replace", {"old", "new", "count"}, 2, replace_filter},
    {"reverse", {}, 0, reverse},
    {"round", {"precision", "method"}, 0, round_number},
    {"safe", {}, 0, itself},
    {"select", {}, 0, nullptr, choose<false, true>},
    {"selectattr", {}, 0, nullptr, choose<true, true>},
    {"sort", {"reverse", "case_sensitive", "attribute"}, 0, sort},
    {"string", {}, 0, to_string},
    {"sum", {"attribute", "start"}, 0, sum},
    {"title", {}, 0, title_filter},
    {"tojson", {"ensure_ascii", "indent", "separators", "sort_keys"}, 0, to_json_filter},
    {"trim", {"chars"}, 0, strip<Sides::Both>},
    {"unique", {"case_sensitive", "attribute"}, 0, unique},
    {"upper", {}, 0, upper},
};

const Builtin kTests[] = {
    {"!=", {""}, 1, is_equal<false>},
    {"<", {""}, 1, is_less<false, true>},
    {"<=", {""}, 1, is_less<true, false>},
    {"==", {""}, 1, is_equal<true>},
    {">", {""}, 1, is_less<true, true>},
    {">=", {""}, 1, is_less<false, false>},
    {"boolean", {}, 0, holds<bool>},
    {"callable",
     {},
     0,
     [](Run&, const Value& self, const Given&) -> Value {
       return self.is<Undefined>() || self.is<CallablePointer>();
     }},
    {"defined", {}, 0, [](Run&, const Value& self, const Given&) -> Value { return !self.is<Undefined>(); }},
    {"divisibleby", {"num"}, 1, divisible},
    {"eq", {""}, 1, is_equal<true>},
    {"equalto", {""}, 1, is_equal<true>},
    {"even", {}, 0, is_parity<0>},
    {"false", {}, 0, is_bool<false>},
    {"float", {}, 0, holds<double>},
    {"ge", {""}, 1, is_less<false, false>},
    {"greaterthan", {""}, 1, is_less<true, true>},
    {"gt", {""}, 1, is_less<true, true>},
    {"in", {"seq"}, 1, is_in},
    {"integer", {}, 0, holds<int64_t>},
    {"iterable", {}, 0, is_iterable},
    {"le", {""}, 1, is_less<true, false>},
    {"lessthan", {""}, 1, is_less<false, true>},
    {"lt", {""}, 1, is_less<false, true>},
    {"mapping", {}, 0, holds<DictPointer>},
    {"ne", {""}, 1, is_equal<false>},
    {"none", {}, 0, holds<None>},
    {"number", {}, 0, [](Run&, const Value& self, const Given&) -> Value { return is_number(self); }},
    {"odd", {}, 0, is_parity<1>},
    {"sameas", {"other"}, 1, is_same},
    {"sequence", {}, 0, is_sequence},
    {"string", {}, 0, holds<TextPointer>},
    {"true", {}, 0, is_bool<true>},
    {"undefined", {}, 0, holds<Undefined>},
};

const Builtin kFunctions[] = {
    {"dict", {}, 0, nullptr, dict},
    {"raise_exception", {"message"}, 1, raise_exception},
    {"range", {"", "", ""}, 1, range},
    {"strftime_now", {"format"}, 1, strftime_now},
};

const Builtin kTextMethods[] = {
    {"capitalize", {}, 0, capitalize},
    {"count", {""}, 1, count_text},
    {"endswith", {""}, 1, begins_or_ends<true>},
    {"find", {""}, 1, find_text<false, false>},
    {"index", {""}, 1, find_text<false, true>},
    {"isalnum", {}, 0, all_are<is_letter_or_digit>},
    {"isalpha", {}, 0, all_are<is_letter>},
    {"isdecimal", {}, 0, all_are<is_digit>},
    {"isdigit", {}, 0, all_are<is_digit>},
    {"islower", {}, 0, has_only_case<'a', 'z'>},
    {"isnumeric", {}, 0, all_are<is_digit>},
    {"isspace",
     {},
     0,
     [](Run&, const Value& self, const Given&) -> Value {
       return !self.text().empty() && python::lstrip(self.text()).empty();
     }},
    {"isupper", {}, 0, has_only_case<'A', 'Z'>},
    {"join",
     {""},
     1,
     [](Run& run, const Value& self, const Given& given) -> Value {
       return joined(run, self.text(), items_of(run, *given[0]), true);
     }},
    {"ljust", {"", ""}, 1, justify<true>},
    {"lower", {}, 0, lower},
    {"lstrip", {""}, 0, strip<Sides::Left>},
    {"partition", {""}, 1, partition<false>},
    {"removeprefix", {""}, 1, remove_prefix},
    {"removesuffix", {""}, 1, remove_suffix},
    {"replace", {"", "", ""}, 2, replace_method},
    {"rfind", {""}, 1, find_text<true, false>},
    {"rindex", {""}, 1, find_text<true, true>},
    {"rjust", {"", ""}, 1, justify<false>},
    {"rpartition", {""}, 1, partition<true>},
    {"rsplit", {"sep", "maxsplit"}, 0, split<true>},
    {"rstrip", {""}, 0, strip<Sides::Right>},
    {"split", {"sep", "maxsplit"}, 0, split<false>},
    {"splitlines",
     {"keepends"},
     0,
     [](Run& run, const Value& self, const Given& given) -> Value {
       run.charge_text(self.text().size());
       return make_list(run, python::splitlines(self.text(), flag(given[0])));
     }},
    {"startswith", {""}, 1, begins_or_ends<false>},
    {"strip", {""}, 0, strip<Sides::Both>},
    {"title", {}, 0, title_method},
    {"upper", {}, 0, upper},
};

const Builtin kDictMethods[] = {
    {"copy", {}, 0, itself}, {"get", {"", ""}, 1, get}, {"items", {}, 0, items_method},
    {"keys", {}, 0, keys},   {"values", {}, 0, values},
};

const Builtin kListMethods[] = {
    {"copy", {}, 0, itself}, {"count", {""}, 1, count_items}, {"index", {""}, 1, index_of}};
const Builtin kTupleMethods[] = {{"count", {""}, 1, count_items}, {"index", {""}, 1, index_of}};

// Python has them, and templates would see them; here they are refused.
constexpr std::string_view kOtherTextAttributes[] = {
    "casefold",     "center",  "encode",      "expandtabs", "format",   "format_map", "isascii",
    "isidentifier", "istitle", "isprintable", "maketrans",  "swapcase", "translate",  "zfill"};
constexpr std::string_view kOtherNumberAttributes[] = {
    "as_integer_ratio", "bit_count", "bit_length", "conjugate", "denominator",
    "from_bytes",       "fromhex",   "hex",        "imag",      "is_integer",
    "numerator",        "real",      "to_bytes"};
// What would change a value: Jinja's sandbox calls them unsafe.
constexpr std::string_view kDictChanges[] = {"clear", "pop", "popitem", "setdefault", "update"};
constexpr std::string_view kListChanges[] = {"append", "clear",  "pop",  "reverse",
                                             "insert", "extend", "sort", "remove"};

const Builtin* find_in(std::span<const Builtin> table, std::string_view name) {
  const auto found = std::ranges::find(table, name, &Builtin::name);
  return found == table.end() ? nullptr : &*found;
}

std::span<const Builtin> methods_of(const Value& value) {
  if (value.is_text()) return kTextMethods;
  if (value.dict()) return kDictMethods;
  const Sequence* sequence = value.sequence();
  if (sequence == nullptr) return {};
  if (sequence->kind == Kind::List) return kListMethods;
  return sequence->kind == Kind::Tuple ? std::span<const Builtin>(kTupleMethods) : std::span<const Builtin>();
}

bool is_among(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

// Python's getattr: nothing if there is no such attribute.
std::optional<Value> attribute_of(Run& run, const Value& value, std::string_view name) {
  if (value.is<Namespace*>()) {
    const auto& attributes = value.as<Namespace*>()->attributes;
    const auto found = attributes.find(name);
    return found == attributes.end() ? std::nullopt : std::optional(found->second);
  }
  if (const Builtin* method = find_in(methods_of(value), name))
    return Value(std::make_shared<const Callable>(Callable{.builtin = method, .self = value}));
  const Sequence* sequence = value.sequence();
  const bool changes = (value.dict() && is_among(kDictChanges, name)) ||
                       (sequence && sequence->kind == Kind::List && is_among(kListChanges, name));
  if (changes)
    return Value::undefined(detail::concat("'", name, "' would change ", type_name(value),
                                           ", which templates may not; use a namespace."));
  if ((value.is_text() && is_among(kOtherTextAttributes, name)) ||
      (is_number(value) && is_among(kOtherNumberAttributes, name)) || value.is<CallablePointer>() ||
      (value.dict() && name == "fromkeys"))
    run.fail("'", name, "' of ", type_name(value), " is not supported.");
  return std::nullopt;
}

std::optional<Value> item_of(Run& run, const Value& value, const Value& key) {
  if (const Dict* dict = value.dict()) {
    const Value* found = is_hashable(key) ? find(run, *dict, key) : nullptr;
    return found != nullptr ? std::optional(*found) : std::nullopt;
  }
  const auto index = as_integer(key);
  const Sequence* sequence = value.sequence();
  const bool indexed =
      value.is_text() || (sequence && (sequence->kind == Kind::List || sequence->kind == Kind::Tuple ||
                                       sequence->kind == Kind::Range));
  if (!index || !indexed) return std::nullopt;
  const int64_t length = length_of(run, value);
  const int64_t at = *index < 0 ? *index + length : *index;
  if (at < 0 || at >= length) return std::nullopt;
  if (sequence != nullptr) return sequence->items[static_cast<size_t>(at)];
  const std::string_view rest =
      value.text().substr(python::byte_offset(value.text(), static_cast<size_t>(at)));
  return Value::text(rest.substr(0, python::byte_offset(rest, 1)));
}

Value no_item(Run& run, const Value& value, const Value& key) {
  return Value::undefined(detail::concat(type_name(value), " has no ", key.is_text() ? "attribute " : "item ",
                                         key.is_text()    ? in_quotes(key.text())
                                         : is_number(key) ? to_text(run, key)
                                                          : type_name(key),
                                         "."));
}

}  // namespace

const Builtin* find_filter(std::string_view name) { return find_in(kFilters, name); }
const Builtin* find_test(std::string_view name) { return find_in(kTests, name); }
const Builtin* find_function(std::string_view name) { return find_in(kFunctions, name); }
bool is_method(std::string_view name) {
  return find_in(kTextMethods, name) || find_in(kDictMethods, name) || find_in(kListMethods, name);
}

Value call(Run& run, const Builtin& builtin, const Value& self, const Arguments& arguments) {
  const Run::Level level(run);
  run.charge(1);
  if (builtin.call_with_all != nullptr) return builtin.call_with_all(run, self, arguments);
  return builtin.call(run, self, bind(run, builtin, arguments));
}

Value get_attribute(Run& run, const Value& value, std::string_view name) {
  check_defined(run, value);
  if (auto attribute = attribute_of(run, value, name)) return *std::move(attribute);
  const Value key = Value::text(name);
  if (value.dict() != nullptr)
    if (auto item = item_of(run, value, key)) return *std::move(item);
  return no_item(run, value, key);
}

Value get_item(Run& run, const Value& value, const Value& key) {
  check_defined(run, value);
  if (auto item = item_of(run, value, key)) return *std::move(item);
  if (key.is_text())
    if (auto attribute = attribute_of(run, value, key.text())) return *std::move(attribute);
  return no_item(run, value, key);
}

}  // namespace halfstep::jinja
