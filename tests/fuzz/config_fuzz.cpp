// A configuration that is taken is printed as TOML that gives the same one, with its origins or without. The
// input is a file; from a line "#set" on, every line is a flag --set, and from "#env" on, NAME=value.
#include <halfstep/run_config.h>

#include <algorithm>
#include <string>

#include "fuzz/fuzz_target.h"

namespace {

using namespace halfstep;

ConfigSources sources_of(std::string_view input) {
  ConfigSources sources{.file = ConfigText{"input", ""}};
  enum { File, Set, Environment } part = File;
  while (!input.empty()) {
    const size_t end = std::min(input.find('\n'), input.size());
    const std::string line(input.substr(0, end));
    input.remove_prefix(std::min(end + 1, input.size()));
    const size_t equals = line.find('=');
    if (line == "#set")
      part = Set;
    else if (line == "#env")
      part = Environment;
    else if (part == File)
      sources.file->text += line + "\n";
    else if (part == Set)
      sources.set.push_back(line);
    else if (equals != line.npos)
      sources.environment.emplace_back(line.substr(0, equals), line.substr(equals + 1));
  }
  return sources;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ResolvedConfig resolved;
  bool taken = false;
  testing::read_or_refuse([&] {
    resolved = resolve_config(sources_of(testing::text_of(data, size)));
    taken = true;
  });
  for (const bool with_origins : {false, true}) {
    if (!taken) break;
    const std::string text = to_toml(resolved, with_origins);
    bool same = false;
    testing::read_or_refuse(
        [&] { same = resolve_config({.file = ConfigText{"printed", text}}).config == resolved.config; });
    testing::require(same, "a printed configuration comes back");
  }
  return 0;
}
