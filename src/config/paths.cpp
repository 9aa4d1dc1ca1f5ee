#include <halfstep/run_config.h>

#include "config/faults.h"
#include "words/names.h"

namespace halfstep {
namespace {

std::vector<std::string> texts_of(const ConfigField& field) {
  if (auto* const* list = std::get_if<std::vector<std::string>*>(&field)) return **list;
  auto* const* text = std::get_if<std::optional<std::string>*>(&field);
  return text && **text ? std::vector{***text} : std::vector<std::string>();
}

}  // namespace

void check_paths(const ResolvedConfig& resolved) {
  config::Faults faults;
  RunConfig config = resolved.config;
  if (config.data.tokenizer == "bytes") config.data.tokenizer.reset();
  for (const ConfigKey& key : config_keys()) {
    if (!key.names_file) continue;
    for (const std::string& path : texts_of(key.field(config))) {
      std::error_code error;
      if (!std::filesystem::exists(path, error))
        faults.add(resolved.origin(key.path), key.path, ": there is no ", in_quotes(path), " in ",
                   std::filesystem::current_path(error).string(),
                   ". Paths go by the folder in which the command runs.");
    }
  }
  faults.throw_if_any();
}

}  // namespace halfstep
