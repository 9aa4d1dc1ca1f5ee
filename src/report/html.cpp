#include "report/html.h"

#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "report/page_parts.h"
#include "words/names.h"
#include "words/numbers.h"
#include "words/utf8.h"

namespace halfstep::report {
namespace {

std::string_view entity_of(char letter) {
  switch (letter) {
    case '&':
      return "&amp;";
    case '<':
      return "&lt;";
    case '>':
      return "&gt;";
    case '"':
      return "&quot;";
    case '\'':
      return "&#39;";
    default:
      return {};
  }
}

/// U+202A to U+202E and U+2066 to U+2069, as UTF-8: they show text in another order than it has.
bool turns_direction(std::string_view rest) {
  if (!rest.starts_with("\xe2\x80") && !rest.starts_with("\xe2\x81")) return false;
  if (rest.size() < 3) return false;
  const auto last = static_cast<unsigned char>(rest[2]);
  return rest[1] == '\x80' ? last >= 0xaa && last <= 0xae : last >= 0xa6 && last <= 0xa9;
}

}  // namespace

std::string escaped(std::string_view text) {
  const std::string valid = valid_utf8(text);
  std::string result;
  result.reserve(valid.size());
  for (size_t i = 0; i < valid.size(); ++i) {
    const auto code = static_cast<unsigned char>(valid[i]);
    if (const std::string_view entity = entity_of(valid[i]); !entity.empty()) {
      result += entity;
    } else if ((code < 0x20 && code != '\n' && code != '\t') || code == 0x7f) {
      result += "\xe2\x90";
      result += static_cast<char>(code == 0x7f ? 0xa1 : 0x80 + code);
    } else if (turns_direction(std::string_view(valid).substr(i))) {
      result += "\xef\xbf\xbd";
      i += 2;
    } else {
      result += valid[i];
    }
  }
  return result;
}

std::string bounded(std::string_view text, size_t most) {
  const std::string_view shown = beginning_of(text, most);
  if (shown.size() == text.size()) return escaped(text);
  return escaped(shown) + " <span class=\"quiet\">… (" +
         with_commas(static_cast<int64_t>(text.size() - shown.size())) + " bytes more)</span>";
}

std::string json_text(std::string_view text) {
  std::string result = nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  for (size_t i = result.find('<'); i != std::string::npos; i = result.find('<', i))
    result.replace(i, 1, "\\u003c");
  return result;
}

std::string json_number(double value) {
  if (!std::isfinite(value)) return "null";
  char text[40];
  const auto end = std::to_chars(text, text + sizeof text, value, std::chars_format::general, 6).ptr;
  return {text, end};
}

std::string table(const std::vector<std::string>& headings, const std::vector<std::vector<Cell>>& rows) {
  std::string html = "<div class=\"scroll\"><table><thead><tr>";
  for (size_t i = 0; i < headings.size(); ++i) {
    const bool number = !rows.empty() && rows.front()[i].number;
    html += (number ? "<th scope=\"col\" class=\"number\">" : "<th scope=\"col\">") + headings[i] + "</th>";
  }
  html += "</tr></thead><tbody>";
  for (const auto& row : rows) {
    html += "<tr>";
    for (const Cell& cell : row)
      html += (cell.number ? "<td class=\"number\">" : "<td>") + cell.html + "</td>";
    html += "</tr>\n";
  }
  return html + "</tbody></table></div>\n";
}

std::string page(std::string_view title, std::string_view body) {
  std::string html =
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta name=\"color-scheme\" content=\"light dark\">\n"
      // Should a text get past escaping after all: it may run nothing but our script, and fetch nothing.
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
      "script-src 'sha256-";
  html += script_hash();
  html += "'\">\n<title>";
  html += escaped(title);
  html += "</title>\n<style>\n";
  html += kStyle;
  html += "</style>\n</head>\n<body>\n";
  html += body;
  html += "<script>";
  html += kScript;
  html += "</script>\n</body>\n</html>\n";
  return html;
}

}  // namespace halfstep::report
