// Reads tokenizer.json, and GPT-2's pair of files.
#include <halfstep/error.h>

#include <algorithm>

#include "io/input_file.h"
#include "io/json.h"
#include "io/json_place.h"
#include "text/definition.h"
#include "words/names.h"

namespace halfstep::text {
namespace {

using nlohmann::json;
using Place = files::JsonPlace;

// Encoding goes one call deeper for each. Tokenizers in use have up to four.
constexpr size_t kMaxStages = 16;

void read_vocabulary(const Place& vocabulary, DefinitionBuilder& builder) {
  HALFSTEP_CHECK(vocabulary.value().is_object(), vocabulary.where(), ": is not an object of tokens and ids.");
  for (const auto& [token, id] : vocabulary.value().items())
    builder.add_to_vocabulary(token, Place(id, vocabulary.where()).integer());
}

void read_merge_line(std::string_view line, const std::string& where, DefinitionBuilder& builder) {
  const size_t space = line.find(' ');
  HALFSTEP_CHECK(space != line.npos && line.find(' ', space + 1) == line.npos, where, ": the merge ",
                 in_quotes(line), " is not two tokens with a space between them.");
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
    HALFSTEP_CHECK(pair, merges.where(), ": ", in_quotes(merge.dump()),
                   " is neither \"a b\" nor a pair of strings.");
    builder.add_merge(merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>());
  }
}

void read_model(const Place& model, DefinitionBuilder& builder) {
  model.expect_keys({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                     "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"});
  // Older files name no type; those with merges are of this one.
  if (!model.at("type").is_null() && model.at("type").text() != "BPE") model.refuse_type("BPE");
  for (const char* const key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"})
    model.expect_nothing(key);
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

std::string names_of_known_patterns() {
  std::string names;
  for (const KnownPattern& known : known_patterns())
    names.append(names.empty() ? "" : ", ").append(known.name);
  return names;
}

void read_pre_tokenizer(const Place& place, std::vector<Stage>& stages, bool may_be_sequence = true) {
  const std::string& type = place.at("type").text();
  if (type == "Sequence" && may_be_sequence) {
    place.expect_keys({"type", "pretokenizers"});
    for (const Place& element : place.at("pretokenizers").elements())
      read_pre_tokenizer(element, stages, false);
    return;
  }
  HALFSTEP_CHECK(stages.size() < kMaxStages, place.where(), ": pre_tokenizer has more than ", kMaxStages,
                 " stages, which no tokenizer in use has. Is the file damaged or malicious?");
  if (type == "Digits") {
    place.expect_keys({"type", "individual_digits"});
    stages.push_back(
        {.kind = Stage::Kind::Digits, .digits_one_by_one = place.at("individual_digits").truth()});
  } else if (type == "ByteLevel") {
    place.expect_keys({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    stages.push_back({.kind = Stage::Kind::ByteLevel,
                      .add_prefix_space = place.at("add_prefix_space").truth(),
                      .pattern = place.at("use_regex").truth(true) ? Pattern::gpt2() : nullptr});
  } else if (type == "Split") {
    place.expect_keys({"type", "pattern", "behavior", "invert"});
    place.expect_false("invert");
    const std::string& behavior = place.at("behavior").text();
    HALFSTEP_CHECK(behavior == "Isolated", place.where(), ".behavior: ", in_quotes(behavior),
                   " is not known to this Halfstep; Isolated is.");
    const Place pattern = place.at("pattern");
    pattern.expect_keys({"Regex"});
    const std::string& expression = pattern.at("Regex").text();
    stages.push_back({.kind = Stage::Kind::Split, .pattern = Pattern::named_by(expression)});
    HALFSTEP_CHECK(stages.back().pattern, pattern.where(), ": the expression ", in_quotes(expression),
                   " is none of those that Halfstep cuts exactly as `tokenizers` does: ",
                   names_of_known_patterns(), ".");
  } else {
    place.refuse_type("ByteLevel, Digits, Split and a Sequence of them");
  }
}

/// Whether the file asks for NFC, the only normalizer that is known.
bool read_normalizer(const Place& place, bool may_be_sequence = true) {
  if (place.is_null()) return false;
  const std::string& type = place.at("type").text();
  if (type == "Sequence" && may_be_sequence) {
    place.expect_keys({"type", "normalizers"});
    bool nfc = false;
    for (const Place& element : place.at("normalizers").elements()) nfc |= read_normalizer(element, false);
    return nfc;
  }
  if (type != "NFC") place.refuse_type("NFC and a Sequence of it");
  place.expect_keys({"type"});
  return true;
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
  // Before all else that such a file has and others have not: this says most.
  const Place byte_fallback = file.at("model").at("byte_fallback");
  HALFSTEP_CHECK(
      !byte_fallback.truth(false), byte_fallback.where(),
      ": is true, as in files made from SentencePiece (Llama-2's, Mistral-7B's); this Halfstep knows "
      "byte-level tokenizers only.");
  file.expect_keys({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                    "post_processor", "decoder", "model"});
  for (const char* const key : {"truncation", "padding"}) file.expect_nothing(key);
  DefinitionBuilder builder(where, read_normalizer(file.at("normalizer")));
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
