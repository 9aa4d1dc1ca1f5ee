// Whatever is read as a template renders twice to the same text, which is valid UTF-8 if the template is, or
// is refused with its line.
#include "fuzz/fuzz_target.h"
#include "jinja/template.h"
#include "words/utf8.h"

namespace {

using namespace halfstep;
using namespace halfstep::jinja;

std::string rendered(const Template& parsed) {
  Run run(parsed.where(), 1 << 18);  // less than users have: an input may take a second
  const auto message = [&](const char* role, const char* content) {
    DictBuilder fields(run);
    fields.add(Value::text("role"), Value::text(role));
    fields.add(Value::text("content"), Value::text(content));
    return fields.build();
  };
  const Value messages =
      make_list(run, {message("system", "Be brief."), message("user", " Gr\u00fc\u00dfe, \U0001F600\n"),
                      message("assistant", "<think>a</think>b")});
  return parsed.render(run, {{"messages", messages},
                             {"tools", None{}},
                             {"add_generation_prompt", true},
                             {"bos_token", Value::text("<s>")}});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view source = testing::text_of(data, size);
  testing::read_or_refuse([&] {
    try {
      const Template parsed(source, "input");
      const std::string text = rendered(parsed);
      if (source.find("strftime_now") == source.npos)
        testing::require(rendered(parsed) == text, "the same text again");
      if (valid_bytes_from(source, 0) == source.size())
        testing::require(valid_bytes_from(text, 0) == text.size(), "valid UTF-8 stays valid");
    } catch (const Error& error) {
      testing::require(std::string_view(error.what()).starts_with("input, line "),
                       "a refusal names the line");
      throw;
    }
  });
  return 0;
}
