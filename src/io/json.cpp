#include "io/json.h"

#include <halfstep/error.h>
#include <halfstep/printable.h>

#include <string>
#include <vector>

#include "words/names.h"

namespace halfstep::files {
namespace {

using nlohmann::json;

/// Builds the tree as the parser tells of it. nlohmann 3.11's own parser with a callback looks through all
/// elements of an array at the end of each object in it: 100,000 objects took a minute.
class TreeBuilder : public nlohmann::json_sax<json> {
 public:
  TreeBuilder(std::string_view where, bool is_one_line, const JsonLimits& limits)
      : where_(where), is_one_line_(is_one_line), limits_(limits) {}

  json take() { return std::move(root_); }

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { HALFSTEP_BUG("binary data in a text of JSON."); }
  bool start_object(size_t) override { return open(json::object()); }
  bool start_array(size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& key) override {
    const auto [member, is_new] = open_.back()->get_ref<json::object_t&>().try_emplace(key);
    HALFSTEP_CHECK(is_new, where_, ": the key ", in_quotes(key), " occurs twice in one object.");
    member_ = &member->second;
    return true;
  }

  bool parse_error(size_t, const std::string&, const json::exception& fault) override {
    std::string what = fault.what();
    // Of JSON Lines the caller names the line of the file, which this one would contradict.
    constexpr std::string_view kLine = "line 1, column";
    if (const size_t at = what.find(kLine); is_one_line_ && at != what.npos)
      what.replace(at, kLine.size(), "column");
    // The message repeats the token at fault, however long it is.
    throw Error(detail::concat(where_, ": is not valid JSON: ",
                               printable(std::string_view(what).substr(0, 300), Unprintable::Escaped)));
  }

 private:
  json& place(json value) {
    HALFSTEP_CHECK(++values_ <= limits_.values, where_, ": has more than ", limits_.values,
                   " values of JSON.");
    if (open_.empty()) return root_ = std::move(value);
    if (open_.back()->is_object()) return *member_ = std::move(value);
    auto& elements = open_.back()->get_ref<json::array_t&>();
    elements.push_back(std::move(value));
    return elements.back();
  }
  bool put(json value) {
    place(std::move(value));
    return true;
  }
  bool open(json value) {
    HALFSTEP_CHECK(open_.size() < static_cast<size_t>(limits_.nesting), where_, ": nested deeper than ",
                   limits_.nesting, " levels.");
    open_.push_back(&place(std::move(value)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view where_;
  bool is_one_line_;
  const JsonLimits& limits_;
  json root_;
  std::vector<json*>
      open_;                // an array does not grow while one inside it is open, so they stay where they are
  json* member_ = nullptr;  // the value of the key that was read last
  size_t values_ = 0;
};

}  // namespace

nlohmann::json read_json(std::string_view text, std::string_view where, const JsonLimits& limits) {
  HALFSTEP_CHECK(text.size() <= limits.bytes, where, ": ", text.size(), " bytes of JSON; at most ",
                 limits.bytes, " are read.");
  // nlohmann 3.11 takes a NUL for the end of the text, and would leave what follows unread.
  HALFSTEP_CHECK(text.find('\0') == std::string_view::npos, where, ": a NUL byte in JSON, at byte ",
                 text.find('\0'), ".");
  const bool is_one_line = text.find('\n') == text.npos;
  TreeBuilder builder(where, is_one_line, limits);
  json::sax_parse(text, &builder);
  return builder.take();
}

}  // namespace halfstep::files
