#include "files/json.h"

#include <halfstep/error.h>

#include <set>
#include <string>
#include <vector>

#include "files/in_quotes.h"

namespace halfstep::files {

nlohmann::json read_json(std::string_view text, std::string_view where, const JsonLimits& limits) {
  HALFSTEP_CHECK(text.size() <= limits.bytes, where, ": ", text.size(), " bytes of JSON; at most ",
                 limits.bytes, " are read.");
  // nlohmann 3.11 takes a NUL for the end of the text, and would leave what follows unread.
  HALFSTEP_CHECK(text.find('\0') == std::string_view::npos, where, ": a NUL byte in JSON, at byte ",
                 text.find('\0'), ".");
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::set<std::string, std::less<>>> keys;  // of each object that is open
  const auto look = [&](int depth, Event event, nlohmann::json& value) {
    switch (event) {
      case Event::object_start:
      case Event::array_start:
        HALFSTEP_CHECK(depth < limits.nesting, where, ": nested deeper than ", limits.nesting, " levels.");
        if (event == Event::object_start) keys.emplace_back();
        break;
      case Event::object_end:
        keys.pop_back();
        break;
      case Event::key: {
        const auto& key = value.get_ref<const std::string&>();
        HALFSTEP_CHECK(keys.back().insert(key).second, where, ": the key ", in_quotes(key),
                       " stands twice in one object.");
        break;
      }
      case Event::array_end:
      case Event::value:
        break;
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text, look);
  } catch (const nlohmann::json::exception& fault) {
    // The message repeats the token at fault, however long it is.
    throw Error(
        detail::concat(where, ": is not valid JSON: ", std::string_view(fault.what()).substr(0, 300)));
  }
}

}  // namespace halfstep::files
