// Reads tokenizer.json, and GPT-2's pair of files.
#include <halfstep/error.h>

#include <algorithm>
#include <initializer_list>

#include "files/json.h"
#include "files/mapped_file.h"
#include "text/definition_builder.h"

namespace halfstep::text {
namespace {

using nlohmann::json;

/// A value of the file and the way to it: "tokenizer.json: added_tokens[7].id".
class Place {
 public:
  Place(const json& value, std::string where, bool inside = false)
      : value_(value), where_(std::move(where)), inside_(inside) {}

  const std::string& where() const { return where_; }
  bool is_null() const { return value_.is_null(); }

  /// A key that is not named here is refused: ignoring it could change the tokens.
  void expect_keys(std::initializer_list<std::string_view> known) const {
    HALFSTEP_CHECK(value_.is_object(), where_, ": is ", value_.type_name(), ", expected an object.");
    for (const auto& [key, unused] : value_.items())
      HALFSTEP_CHECK(std::ranges::find(known, key) != known.end(), where_, ": the key '", key,
                     "' is not known to this Halfstep.");
  }
  bool has(const char* key) const { return value_.is_object() && value_.contains(key); }
  Place at(const char* key) const {
    static const json null;
    return {has(key) ? value_.at(key) : null, way_to(key), true};
  }
  const std::string& text() const {
    HALFSTEP_CHECK(value_.is_string(), where_, ": is ", value_.type_name(), ", expected a string.");
    return value_.get_ref<const std::string&>();
  }
  bool truth(bool absent) const {
    if (value_.is_null()) return absent;
    HALFSTEP_CHECK(value_.is_boolean(), where_, ": is ", value_.type_name(), ", expected true or false.");
    return value_.get<bool>();
  }
  int64_t integer() const {
    HALFSTEP_CHECK(
        value_.is_number_integer() && (!value_.is_number_unsigned() || value_.get<uint64_t>() >> 63 == 0),
        where_, ": ", value_.type_name(), " is not a whole number of 64 bits.");
    return value_.get<int64_t>();
  }
  std::vector<Place> elements() const {
    HALFSTEP_CHECK(value_.is_array(), where_, ": is ", value_.type_name(), ", expected an array.");
    std::vector<Place> all;
    for (const json& element : value_)
      all.emplace_back(element, where_ + "[" + std::to_string(all.size()) + "]", true);
    return all;
  }
  const json& value() const { return value_; }

  void expect_false(const char* key) const {
    HALFSTEP_CHECK(!at(key).truth(false), way_to(key), ": true is not known to this Halfstep.");
  }
  void expect_nothing(const char* key) const {
    const json& value = at(key).value();
    HALFSTEP_CHECK(value.is_null() || value == "" || value == 0, way_to(key), ": ",
                   value.dump().substr(0, 80), " is not known to this Halfstep; null is.");
  }
  [[noreturn]] void refuse_type(std::string_view known) const {
    detail::throw_error(detail::concat(where_, ": the type '", at("type").text(),
                                       "' is not known to this Halfstep. Known: ", known, "."));
  }

 private:
  std::string way_to(std::string_view key) const { return (where_ + (inside_ ? "." : ": ")).append(key); }

  const json& value_;
  std::string where_;
  bool inside_;  // a file; else the file itself
};

void read_vocabulary(const Place& vocabulary, DefinitionBuilder& builder) {
  HALFSTEP_CHECK(vocabulary.value().is_object(), vocabulary.where(), ": is not an object of tokens and ids.");
  for (const auto& [token, id] : vocabulary.value().items())
    builder.add_to_vocabulary(token, Place(id, vocabulary.where()).integer());
}

void read_merge_line(std::string_view line, const std::string& where, DefinitionBuilder& builder) {
  const size_t space = line.find(' ');
  HALFSTEP_CHECK(space != line.npos && line.find(' ', space + 1) == line.npos, where, ": the merge '",
                 line.substr(0, 80), "' is not two tokens with a space between them.");
  builder.add_merge(line.substr(0, space), line.substr(space + 1));
}

void read_merges(const Place& merges, DefinitionBuilder& builder) {
  HALFSTEP_CHECK(merges.value().is_array(), merges.where(), ": is not an array.");
  for (const json& merge : merges.value()) {
    if (merge.is_string()) {
      const auto& line = merge.get_ref<const std::string&>();
      if (!line.starts_with("#version")) read_merge_line(line, merges.where(), builder);
      continue;
    }
    const bool pair = merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string();
    HALFSTEP_CHECK(pair, merges.where(), ": ", merge.dump().substr(0, 80),
                   " is neither \"a b\" nor a pair of strings.");
    builder.add_merge(merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>());
  }
}

void read_model(const Place& model, DefinitionBuilder& builder) {
  model.expect_keys({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                     "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"});
  if (model.at("type").text() != "BPE") model.refuse_type("BPE");
  for (const char* const key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"})
    model.expect_nothing(key);
  model.expect_false("byte_fallback");
  model.at("fuse_unk").truth(false);
  read_vocabulary(model.at("vocab"), builder);
  read_merges(model.at("merges"), builder);
  // Where every byte has its token nothing is ever unknown, and the token for it does not matter.
  if (!builder.has_every_byte()) model.expect_nothing("unk_token");
}

void read_added_tokens(const Place& tokens, DefinitionBuilder& builder) {
  if (tokens.is_null()) return;
  for (const Place& token : tokens.elements()) {
    token.expect_keys({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    for (const char* const key : {"single_word", "lstrip", "rstrip"}) token.expect_false(key);
    const bool special = token.at("special").truth(false);
    builder.add_added_token(token.at("content").text(), token.at("id").integer(),
                            token.at("normalized").truth(!special));
  }
}

void read_pre_tokenizer(const Place& place, std::vector<Stage>& stages, bool may_be_sequence = true) {
  const std::string& type = place.at("type").text();
  if (type == "Sequence" && may_be_sequence) {
    place.expect_keys({"type", "pretokenizers"});
    for (const Place& element : place.at("pretokenizers").elements())
      read_pre_tokenizer(element, stages, false);
  } else if (type == "Digits") {
    place.expect_keys({"type", "individual_digits"});
    stages.push_back(
        {.kind = Stage::Kind::Digits, .digits_one_by_one = place.at("individual_digits").truth(false)});
  } else if (type == "ByteLevel") {
    place.expect_keys({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    stages.push_back({.kind = Stage::Kind::ByteLevel,
                      .add_prefix_space = place.at("add_prefix_space").truth(true),
                      .pattern = place.at("use_regex").truth(true) ? Pattern::gpt2() : nullptr});
  } else if (type == "Split") {
    place.expect_keys({"type", "pattern", "behavior", "invert"});
    place.expect_false("invert");
    const std::string& behavior = place.at("behavior").text();
    HALFSTEP_CHECK(behavior == "Isolated", place.where(), ".behavior: '", behavior,
                   "' is not known to this Halfstep; Isolated is.");
    const Place pattern = place.at("pattern");
    pattern.expect_keys({"Regex"});
    const std::string& expression = pattern.at("Regex").text();
    stages.push_back({.kind = Stage::Kind::Split, .pattern = Pattern::named_by(expression)});
    HALFSTEP_CHECK(
        stages.back().pattern, pattern.where(), ": the expression '", expression.substr(0, 200),
        "' is none of those that Halfstep cuts exactly as `tokenizers` does: ", Pattern::known_names(), ".");
  } else {
    place.refuse_type("ByteLevel, Digits, Split and a Sequence of them");
  }
}

// They put special tokens around a text, which `encode` never does.
void check_post_processor(const Place& place) {
  if (place.is_null()) return;
  const std::string& type = place.at("type").text();
  if (type == "Sequence") {
    for (const Place& element : place.at("processors").elements()) check_post_processor(element);
  } else if (type != "ByteLevel" && type != "TemplateProcessing" && type != "RobertaProcessing" &&
             type != "BertProcessing") {
    place.refuse_type(
        "ByteLevel, TemplateProcessing, RobertaProcessing, BertProcessing and a Sequence of them");
  }
}

std::string_view text_of(const files::MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

}  // namespace

Definition parse_tokenizer_json(std::string_view text, const std::string& where) {
  const json parsed = files::read_json(text, where);
  const Place file(parsed, where);
  file.expect_keys({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                    "post_processor", "decoder", "model"});
  for (const char* const key : {"truncation", "padding", "normalizer"}) file.expect_nothing(key);
  DefinitionBuilder builder(where);
  read_model(file.at("model"), builder);
  read_added_tokens(file.at("added_tokens"), builder);
  std::vector<Stage> stages;
  read_pre_tokenizer(file.at("pre_tokenizer"), stages);
  const auto is_byte_level = [](const Stage& stage) { return stage.kind == Stage::Kind::ByteLevel; };
  HALFSTEP_CHECK(
      std::ranges::count_if(stages, is_byte_level) == 1 && is_byte_level(stages.back()), where,
      ": pre_tokenizer: one ByteLevel must stand at its end; only byte-level tokenizers are known to this "
      "Halfstep.");
  const Place decoder = file.at("decoder");
  HALFSTEP_CHECK(decoder.has("type"), where, ": decoder: null is not known to this Halfstep; ByteLevel is.");
  if (decoder.at("type").text() != "ByteLevel") decoder.refuse_type("ByteLevel");
  check_post_processor(file.at("post_processor"));
  Definition definition = builder.build();
  definition.whole_words_first = file.at("model").at("ignore_merges").truth(false);
  definition.stages = std::move(stages);
  return definition;
}

Definition read_tokenizer_json(const std::filesystem::path& path) {
  const files::MappedFile file(path);
  return parse_tokenizer_json(text_of(file), path.string());
}

Definition read_gpt2_files(const std::filesystem::path& vocabulary, const std::filesystem::path& merges) {
  const files::MappedFile vocabulary_file(vocabulary), merges_file(merges);
  DefinitionBuilder builder(vocabulary.string());
  const json parsed = files::read_json(text_of(vocabulary_file), vocabulary.string());
  read_vocabulary(Place(parsed, vocabulary.string()), builder);
  for (std::string_view rest = text_of(merges_file); !rest.empty();) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (!line.empty() && !line.starts_with("#version")) read_merge_line(line, merges.string(), builder);
  }
  const std::string end_of_text = "<|endoftext|>";
  if (builder.has(end_of_text))
    builder.add_added_token(end_of_text, parsed.at(end_of_text).get<int64_t>(), false);
  Definition definition = builder.build();
  definition.stages = {{.kind = Stage::Kind::ByteLevel, .pattern = Pattern::gpt2()}};
  return definition;
}

}  // namespace halfstep::text
