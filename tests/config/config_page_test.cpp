// docs/configuration.md tells the table of keys as it is.
#include <gtest/gtest.h>
#include <halfstep/run_config.h>

#include "config/key_text.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

std::string presets_as_markdown() {
  std::string page = "| preset | what it trains |\n|---|---|\n";
  for (const ConfigPreset& preset : config_presets())
    page += "| `" + std::string(preset.name) + "` | " + std::string(preset.summary) + " |\n";
  return page;
}

/// The page with `text` between "<!-- name -->" and the "<!-- end -->" behind it.
std::string with_part(const std::string& page, const std::string& name, const std::string& text) {
  const std::string begin = "<!-- " + name + " -->\n";
  const size_t from = page.find(begin);
  const size_t to = page.find("<!-- end -->", from);
  if (from == page.npos || to == page.npos) return "the page has no part " + name;
  return page.substr(0, from) + begin + text + page.substr(to);
}

TEST(ConfigPage, HasTheTableOfKeysAndThePresets) {
  const std::string page =
      testing::read_text(std::filesystem::path(HALFSTEP_SOURCE_DIR) / "docs" / "configuration.md");
  const std::string expected =
      with_part(with_part(page, "keys", config::keys_as_markdown()), "presets", presets_as_markdown());
  if (page == expected) return;
  const auto made = std::filesystem::current_path() / "configuration.md";
  testing::write_text(made, expected);
  ADD_FAILURE() << "docs/configuration.md is not what the table says. Copy " << made << " there.";
}

TEST(ConfigKeys, AreDistinctAndExplained) {
  std::map<std::string_view, int> count;
  for (const ConfigKey& key : config_keys()) {
    EXPECT_EQ(++count[key.path], 1) << key.path;
    EXPECT_TRUE(key.help.ends_with('.')) << key.path;
    EXPECT_EQ(config::find_key(key.path), &key);
  }
}

// Two rows that point to one field would let one key overwrite another.
TEST(ConfigKeys, HaveAFieldEach) {
  RunConfig config;
  std::map<const void*, std::string_view> owner;
  for (const ConfigKey& key : config_keys()) {
    const void* field = std::visit([](auto* at) { return static_cast<const void*>(at); }, key.field(config));
    EXPECT_TRUE(owner.emplace(field, key.path).second) << key.path << " and " << owner[field];
  }
}

}  // namespace
}  // namespace halfstep
