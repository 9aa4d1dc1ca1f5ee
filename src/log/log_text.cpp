#include "log/log_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "words/utf8.h"

namespace halfstep::log {
namespace {

using nlohmann::json;

bool is_plain(char letter) { return letter >= 0x20 && letter < 0x7f; }

bool append_if_not_finite(std::string& out, double value, std::string_view quote) {
  if (std::isfinite(value)) return false;
  out += quote;
  out += std::isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity";
  out += quote;
  return true;
}

std::string escaped(std::string_view text) {
  return json(text).dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace

void append_integer(std::string& out, int64_t value) {
  char digits[24];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

void append_number(std::string& out, double value, std::string_view quote) {
  if (append_if_not_finite(out, value, quote)) return;
  char digits[32];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

void append_seconds(std::string& out, double seconds, std::string_view quote) {
  constexpr double kMostFixed = 1e15;  // thirty million years; above it the digits would not fit
  if (!(std::abs(seconds) < kMostFixed)) return append_number(out, seconds, quote);
  char digits[32];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, seconds, std::chars_format::fixed, 6).ptr);
}

void append_json_text(std::string& out, std::string_view text) {
  const auto stands_for_itself = [](char letter) {
    return is_plain(letter) && letter != '"' && letter != '\\';
  };
  if (!std::ranges::all_of(text, stands_for_itself)) {
    out += escaped(text);
    return;
  }
  out += '"';
  out += text;
  out += '"';
}

void append_csv_text(std::string& out, std::string_view text) {
  if (text.find_first_of(",\"") == std::string_view::npos && std::ranges::all_of(text, is_plain)) {
    out += text;
    return;
  }
  out += '"';
  for (const char letter : valid_utf8(text)) {
    const auto code = static_cast<unsigned char>(letter);
    if (letter == '"') out += '"';
    out += code < 0x20 || code == 0x7f ? ' ' : letter;
  }
  out += '"';
}

void JsonLine::begin(std::string_view kind, int64_t step) {
  line_.clear();
  line_ += '{';
  text("kind", kind);
  integer("step", step);
}

void JsonLine::key(std::string_view key) {
  if (line_.back() != '{') line_ += ',';
  append_json_text(line_, key);
  line_ += ':';
}

void JsonLine::integer(std::string_view name, int64_t value) {
  key(name);
  append_integer(line_, value);
}

void JsonLine::number(std::string_view name, double value) {
  key(name);
  append_number(line_, value, "\"");
}

void JsonLine::seconds(std::string_view name, double value) {
  key(name);
  append_seconds(line_, value, "\"");
}

void JsonLine::flag(std::string_view name, bool value) {
  key(name);
  line_ += value ? "true" : "false";
}

void JsonLine::text(std::string_view name, std::string_view value) {
  key(name);
  append_json_text(line_, value);
}

void JsonLine::open(std::string_view name) {
  key(name);
  line_ += '{';
}

void JsonLine::close() { line_ += '}'; }

std::string_view JsonLine::end() {
  line_ += "}\n";
  return line_;
}

}  // namespace halfstep::log
