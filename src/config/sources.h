// What the sources of a configuration say, and what is wrong with it.
#pragma once

#include <halfstep/error.h>
#include <halfstep/run_config.h>

#include <algorithm>
#include <string>
#include <vector>

#include "config/toml.h"

namespace halfstep::config {

class Faults {
 public:
  /// "run.toml:12: " and the parts.
  template <typename... Parts>
  void add(const std::string& origin, const Parts&... parts) {
    messages_.push_back(detail::concat(origin, ": ", parts...));
  }
  /// What another part has refused, as it says it.
  void add(const Error& error) { messages_.push_back(error.what()); }

  bool none() const { return messages_.empty(); }

  void throw_if_any() const {
    if (none()) return;
    if (messages_.size() == 1) throw Error(messages_.front());
    std::string all = std::to_string(messages_.size()) + " faults in the configuration:";
    const size_t shown = std::min(messages_.size(), kMostShown);
    for (size_t i = 0; i < shown; ++i) all += "\n  " + messages_[i];
    if (shown < messages_.size()) all += "\n  and " + std::to_string(messages_.size() - shown) + " more";
    throw Error(all);
  }

 private:
  static constexpr size_t kMostShown = 50;  // a screen of them, and enough to correct at a time

  std::vector<std::string> messages_;
};

struct Setting {
  std::string path;
  TomlValue value;
  std::string origin;  ///< "run.toml:12"
};

/// Every setting of a known key, those that win last; what is no setting is a fault.
std::vector<Setting> settings_of(const ConfigSources& sources, Faults& faults);

struct Contradiction {
  std::string path;  ///< of the key that does not go with others
  std::string why;   ///< "has no meaning with a constant schedule. Use ..."
};

/// Goes by the values alone, never by where they came from: what is printed and read again fares alike.
std::vector<Contradiction> contradictions(const ResolvedConfig& resolved);

}  // namespace halfstep::config
