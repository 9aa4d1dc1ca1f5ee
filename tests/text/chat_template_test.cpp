// What a template may not do, and says so by name and line. What it renders is compared with transformers by
// chat_template_oracle.py.
#include <gtest/gtest.h>
#include <halfstep/chat_template.h>

#include <algorithm>
#include <string>
#include <vector>

#include "support/error_of.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

using testing::error_of;
using testing::ScratchFolder;
using testing::write_text;

const std::vector<ChatMessage> kMessages{{"system", "Be brief."}, {"user", "Hello"}};

std::string rendered(std::string_view jinja, const std::vector<ChatMessage>& messages = kMessages) {
  return ChatTemplate(jinja).render(messages, true);
}

std::string refusal(std::string_view jinja) {
  return error_of([&] { ChatTemplate{jinja}; });
}

std::string failure(const std::string& jinja) {
  const ChatTemplate parsed(jinja);
  return error_of([&] { parsed.render(kMessages, true); });
}

std::string repeated(std::string_view text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

TEST(ChatTemplate, WritesAConversation) {
  EXPECT_EQ(rendered("{% for m in messages %}\n"
                     "{{ m.role }}: {{ m.content | trim }}{{ ';' if not loop.last }}\n"
                     "{% endfor %}\n"),
            "system: Be brief.;\nuser: Hello\n");
}

TEST(ChatTemplate, HasSpecialTokensAsVariables) {
  const ChatTemplate chat("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}",
                          {{"bos_token", "<s>"}, {"eos_token", "</s>"}});
  EXPECT_EQ(chat.render(kMessages, false), "<s>|</s>|");
  EXPECT_EQ(chat.eos_token(), "</s>");
  EXPECT_EQ(ChatTemplate("").eos_token(), std::nullopt);
}

TEST(ChatTemplate, KeepsBytesThatAreNotUtf8) {
  const std::string bytes = " \xff\xc3 \xe2\x82";
  EXPECT_EQ(
      rendered("{{ messages[0].content }}|{{ messages[0].content | trim | length }}", {{"user", bytes}}),
      bytes + "|5");
}

TEST(ChatTemplate, RefusesAnEmptyConversation) {
  const ChatTemplate parsed("x");
  const std::string message = error_of([&] { parsed.render({}, true); });
  EXPECT_NE(message.find("at least one message"), std::string::npos) << message;
}

TEST(ChatTemplate, ErrorsBeginWithThePlace) {
  EXPECT_EQ(refusal("a\nb\n{% if %}{% endif %}"),
            "chat template, line 3: an expression is expected, not '%}'.");
  EXPECT_EQ(failure("a\n{{ raise_exception('Roles\\x1b must\\nalternate') }}"),
            "chat template, line 2: the template refuses this conversation: Roles\\x1b must\\x0aalternate");
  EXPECT_EQ(failure("\n\n{{ messages[9].role }}"), "chat template, line 3: a list has no item 9.");
  EXPECT_TRUE(error_of([] {
                ChatTemplate("{{", {}, "model/chat_template.jinja");
              }).starts_with("model/chat_template.jinja, line 1: "));
}

struct Unsupported {
  const char* jinja;
  const char* named;
};
void PrintTo(const Unsupported& unsupported, std::ostream* out) { *out << unsupported.jinja; }

class UnsupportedTemplate : public ::testing::TestWithParam<Unsupported> {};

TEST_P(UnsupportedTemplate, IsRefusedByNameWhenItIsParsed) {
  const std::string message = refusal(std::string("\n{% if false %}") + GetParam().jinja + "{% endif %}");
  EXPECT_TRUE(message.starts_with("chat template, line 2: ")) << message;
  EXPECT_NE(message.find(GetParam().named), std::string::npos) << message;
}

INSTANTIATE_TEST_SUITE_P(
    ChatTemplate, UnsupportedTemplate,
    ::testing::Values(
        Unsupported{"{% include 'x' %}", "tag 'include'"},
        Unsupported{"{% import 'x' as y %}", "tag 'import'"},
        Unsupported{"{% extends 'x' %}", "tag 'extends'"},
        Unsupported{"{% block x %}{% endblock %}", "tag 'block'"},
        Unsupported{"{% call f() %}{% endcall %}", "tag 'call'"}, Unsupported{"{% do f() %}", "tag 'do'"},
        Unsupported{"{{ x | urlize }}", "filter 'urlize'"},
        Unsupported{"{{ x | map('groupby') }}", "filter 'groupby'"},
        Unsupported{"{{ x is escaped }}", "test 'escaped'"},
        Unsupported{"{{ x | select('lower') }}", "test 'lower'"},
        Unsupported{"{{ x.encode() }}", "method 'encode'"},
        Unsupported{"{{ x.format(1) }}", "method 'format'"},
        Unsupported{"{{ messages.append(1) }}", "method 'append'"}, Unsupported{"{{ f(*x) }}", "'*'"},
        Unsupported{"{{ f(**x) }}", "'**'"}, Unsupported{"{{ cycler(1) }}", "'cycler'"},
        Unsupported{"{% for x in y recursive %}{% endfor %}", "recursive"},
        Unsupported{"{{ f(loop) }}", "'loop'"}, Unsupported{"{{ loop.nope }}", "'loop.nope'"},
        Unsupported{"{{ 'a' + (x | safe) }}", "'safe'"}, Unsupported{"{% set y = x | safe %}", "'safe'"},
        Unsupported{"{{ '\\N{BULLET}' }}", "\\N"}, Unsupported{"{{ '\\ud83d' }}", "\\ud83d"},
        Unsupported{"{{ 99999999999999999999 }}", "64 bits"},
        Unsupported{"{% for x in y %}{% macro f() %}{% endmacro %}{% endfor %}", "macro inside a loop"},
        Unsupported{"{% macro f() %}{{ caller() }}{% endmacro %}", "'caller'"},
        Unsupported{"{% break %}", "break"}, Unsupported{"{% set ns._x = 1 %}", "'_x'"},
        Unsupported{"{% set loop = 1 %}", "'loop'"}, Unsupported{"{{ \u00e9 }}", "\u00e9"},
        Unsupported{"{{ x; }}", "';'"}));

// Templates from the internet: whatever they are, parsing and rendering end with text or an Error.

TEST(ChatTemplate, RefusesDeepNesting) {
  for (const auto& [open, close] : std::vector<std::pair<std::string, std::string>>{{"(", ")"},
                                                                                    {"[", "]"},
                                                                                    {"{1: ", "}"},
                                                                                    {"-", ""},
                                                                                    {"not ", ""},
                                                                                    {"1 if ", ""},
                                                                                    {"1 if 1 else ", ""},
                                                                                    {"x[", "]"},
                                                                                    {"f(", ")"}}) {
    const std::string jinja = "{{ " + repeated(open, 50'000) + "1" + repeated(close, 50'000) + " }}";
    EXPECT_NE(refusal(jinja).find("nests deeper than 64 levels"), std::string::npos)
        << open << refusal(jinja);
  }
  EXPECT_NE(refusal(repeated("{% if x %}", 50'000)).find("nests deeper"), std::string::npos);
  EXPECT_NE(refusal("{{ x" + repeated(".a", 50'000) + " }}").find("nests deeper"), std::string::npos);
  EXPECT_NE(refusal("{{ x" + repeated("|abs", 50'000) + " }}").find("nests deeper"), std::string::npos);
  EXPECT_NE(refusal("{% set " + repeated("(", 50'000) + "a" + repeated(")", 50'000) + " = 1 %}")
                .find("nests deeper"),
            std::string::npos);
}

TEST(ChatTemplate, TakesLongChains) {
  EXPECT_EQ(rendered("{{ 1" + repeated(" + 1", 10'000) + " }}"), "10001");
  EXPECT_EQ(rendered("{{ false" + repeated(" or false", 10'000) + " }}"), "False");
  EXPECT_EQ(rendered("{{ 'a'" + repeated(" ~ 'a'", 1'000) + " }}"), repeated("a", 1'001));
  EXPECT_EQ(rendered("{% if false %}" + repeated("{% elif false %}", 10'000) + "{% else %}x{% endif %}"),
            "x");
}

TEST(ChatTemplate, EndsARecursionWithoutEnd) {
  EXPECT_NE(failure("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").find("nest deeper than 1000"),
            std::string::npos);
  EXPECT_NE(failure("{% macro f(x=f()) %}{% endmacro %}{{ f() }}").find("nest deeper than 1000"),
            std::string::npos);
  EXPECT_NE(failure("{{ 'a' | map('map'" + repeated(", 'map'", 50'000) + ") | list }}").find("nest deeper"),
            std::string::npos);
  EXPECT_EQ(rendered("{% macro f(n) %}{{ f(n - 1) if n else 'end' }}{% endmacro %}{{ f(100) }}"), "end");
}

TEST(ChatTemplate, EndsAfterManySteps) {
  const std::string loop = "{% for a in range(100000) %}{% for b in range(100000) %}";
  EXPECT_NE(failure(loop + "{% endfor %}{% endfor %}").find("16777216 steps"), std::string::npos);
  EXPECT_NE(failure("{% set ns = namespace(l=[1]) %}" + loop +
                    "{% set ns.l = ns.l + ns.l %}{% endfor %}{% endfor %}")
                .find("steps"),
            std::string::npos);
  // Every level has the one below twice.
  std::string doubled = "{% set x = ['a'] %}";
  for (int i = 0; i < 50; ++i) doubled += "{% set x = [x, x] %}";
  std::string again = doubled;
  std::ranges::replace(again, 'x', 'y');
  for (const char* use : {"{{ x }}", "{{ x | tojson }}", "{{ x == y }}", "{{ x < y }}"})
    EXPECT_NE(failure(doubled + again + use).find("steps"), std::string::npos) << use;
}

TEST(ChatTemplate, BoundsTextsAndLists) {
  EXPECT_NE(failure("{{ 'a' * 100000000 }}").find("67108864"), std::string::npos);
  EXPECT_NE(failure("{{ 'a' * 9223372036854775807 }}").find("67108864"), std::string::npos);
  EXPECT_NE(failure("{{ [1] * 9223372036854775807 }}").find("steps"), std::string::npos);
  EXPECT_NE(
      failure(
          "{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}")
          .find("67108864"),
      std::string::npos);
  EXPECT_NE(failure("{% set s = 'a' * 60000000 %}{{ s }}{{ s }}").find("67108864"), std::string::npos);
  EXPECT_NE(failure("{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}").find("67108864"), std::string::npos);
  EXPECT_NE(failure("{{ 'a'.ljust(9223372036854775807) }}").find("67108864"), std::string::npos);
  EXPECT_NE(failure("{{ 'a' | indent(9223372036854775807) }}").find("67108864"), std::string::npos);
  EXPECT_NE(failure("{{ ('a,' * 30000000) | list }}").find("steps"), std::string::npos);
  EXPECT_NE(
      failure("{% set ns = namespace(l=[]) %}{% for i in range(100) %}{% set ns.l = [ns.l] %}{% endfor %}")
          .find("64 levels"),
      std::string::npos);
  EXPECT_NE(failure("{{ range(100001) | list }}").find("100000"), std::string::npos);
  EXPECT_NE(refusal(repeated("a", (1 << 20) + 1)).find("1048576"), std::string::npos);
  // Two megabytes that almost match at every place.
  EXPECT_EQ(
      rendered(
          "{% set s = 'a' * 2000000 %}{{ ('a' * 1000000 ~ 'b') in s }}{{ s.rfind('b' ~ 'a' * 1000000) }}"),
      "False-1");
}

TEST(ChatTemplate, RefusesNumbersBeyond64Bits) {
  for (const char* expression :
       {"9223372036854775807 + 1", "-9223372036854775807 - 2", "9223372036854775807 * 2", "2 ** 63",
        "3 ** 9223372036854775807", "-(-9223372036854775807 - 1)", "(-9223372036854775807 - 1) // -1",
        "1e30 | int", "'99999999999999999999' | int", "(-9223372036854775807 - 1) | abs"})
    EXPECT_NE(failure("{{ " + std::string(expression) + " }}").find("64 bits"), std::string::npos)
        << expression;
  EXPECT_EQ(rendered("{{ (-9223372036854775807 - 1) % -1 }}{{ (-1) ** 9223372036854775807 }}"), "0-1");
  EXPECT_EQ(rendered("{{ 'abc'[-9223372036854775807 - 1:9223372036854775807:9223372036854775807] }}"), "a");
}

TEST(ChatTemplate, ANamespaceInItselfIsNoLeak) {
  EXPECT_EQ(
      rendered(
          "{% set ns = namespace() %}{% set ns.a = [ns] %}{% set ns.b = {'c': ns.a} %}{{ ns.b.c[0] == ns }}"),
      "True");
}

// Folders.

TEST(ChatTemplateFolder, WithoutATemplateIsNothing) {
  const ScratchFolder folder;
  EXPECT_FALSE(ChatTemplate::from_folder(folder.path()));
  write_text(folder / "tokenizer_config.json", R"({"eos_token": "</s>"})");
  EXPECT_FALSE(ChatTemplate::from_folder(folder.path()));
}

TEST(ChatTemplateFolder, HasTheTokenThatEndsAText) {
  const ScratchFolder folder;
  write_text(folder / "tokenizer_config.json",
             R"({"eos_token": {"content": "</s>"}, "chat_template": "{{ eos_token }}"})");
  EXPECT_EQ(ChatTemplate::from_folder(folder.path())->eos_token(), "</s>");
}

TEST(ChatTemplateFolder, ErrorsNameTheFile) {
  const ScratchFolder folder;
  const auto error = [&] { return error_of([&] { ChatTemplate::from_folder(folder.path()); }); };
  const std::string config = (folder / "tokenizer_config.json").string();
  write_text(folder / "tokenizer_config.json", "{");
  EXPECT_TRUE(error().starts_with(config + ": ")) << error();
  write_text(folder / "tokenizer_config.json", R"({"chat_template": 5})");
  EXPECT_EQ(error(), config + ": chat_template: is 5, expected a string.");
  write_text(folder / "tokenizer_config.json", R"({"chat_template": [{"name": "rag", "template": "x"}]})");
  EXPECT_EQ(error(), config + ": chat_template: has no template with the name 'default'.");
  write_text(folder / "tokenizer_config.json", R"({"chat_template": "a\n{% x %}"})");
  EXPECT_EQ(error(), config + ": chat_template, line 2: the tag 'x' is not supported.");
  write_text(folder / "chat_template.jinja", "{{");
  EXPECT_TRUE(error().starts_with((folder / "chat_template.jinja").string() + ", line 1: ")) << error();
}

}  // namespace
}  // namespace halfstep
