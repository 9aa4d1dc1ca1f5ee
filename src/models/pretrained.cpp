#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <halfstep/error.h>
#include <halfstep/models.h>
#include <halfstep/safetensors.h>
#include <halfstep/tensor_file.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "io/durable_file.h"
#include "io/input_file.h"
#include "io/json.h"
#include "io/json_place.h"
#include "models/family.h"
#include "tensor/faults.h"
#include "words/names.h"

namespace halfstep {
namespace {

using nlohmann::json;
using Path = std::filesystem::path;

using models::Family;

constexpr const char* kHead = "lm_head.weight";

const Family& family_named(const json& model_type, const std::string& where) {
  std::string names;
  for (const Family& family : models::families()) {
    if (model_type == family.model_type) return family;
    names += (names.empty() ? "" : ", ") + std::string(family.model_type);
  }
  throw Error(detail::concat(where, ": model_type ",
                             model_type.is_null() ? "is missing" : "is " + in_quotes(model_type.dump()),
                             "; Halfstep has: ", names, "."));
}

const Family& family_of(const json& config, const std::string& where) {
  return family_named(files::JsonPlace(config, where).at("model_type").value(), where);
}

/// config.json is a few kilobytes.
json parse_config(std::string_view text, const std::string& where) {
  json config = files::read_json(text, where, {.bytes = size_t{1} << 20});
  files::JsonPlace(config, where).expect_object();
  return config;
}

json read_config(const Path& path) {
  const files::MappedFile file(path);
  return parse_config({reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()},
                      path.string());
}

constexpr std::pair<TensorType, const char*> kWeightTypes[] = {
    {TensorType::F32, "float32"}, {TensorType::BF16, "bfloat16"}, {TensorType::F16, "float16"}};

/// The file's tensor for each name of the model.
std::map<std::string, std::string> by_model_name(const SafetensorsFolder& source, const Family& family) {
  const auto names = source.names();
  const bool bare = std::none_of(names.begin(), names.end(),
                                 [&](const auto& name) { return name.starts_with(family.prefix); });
  std::map<std::string, std::string> found;
  for (const std::string& name : names) {
    if (std::any_of(family.derived.begin(), family.derived.end(),
                    [&](const char* end) { return name.ends_with(end); }))
      continue;
    found.emplace(bare && name != kHead ? family.prefix + name : name, name);
  }
  return found;
}

/// A file may hold the head beside the embedding that it is tied to, or alone. It must be the same tensor
/// then.
void drop_tied_head(std::map<std::string, std::string>& found, const Family& family,
                    const SafetensorsFolder& source, Faults& faults) {
  const auto head = found.find(kHead);
  if (head == found.end()) return;
  const auto embedding = found.find(family.embedding);
  if (embedding == found.end()) {
    found.emplace(family.embedding, head->second);
  } else {
    const auto a = source.bytes(head->second), b = source.bytes(embedding->second);
    const bool equal = a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
    faults.expect(equal, "'", kHead, "' differs from '", family.embedding,
                  "', and tie_word_embeddings says that they are one");
  }
  found.erase(head);
}

/// One line for everything that is in the files or in the model and not alike in both.
void compare(const CausalLM& model, const std::map<std::string, std::string>& found,
             const SafetensorsFolder& source, Faults& faults) {
  const auto wanted = model.named_parameters();
  for (const auto& [name, file_name] : found)
    faults.expect(wanted.contains(name), in_quotes(file_name), " is not a tensor of this model");
  for (const auto& item : wanted) {
    const auto at = found.find(item.key());
    if (at == found.end()) {
      faults.expect(false, "'", item.key(), "' is missing");
      continue;
    }
    const TensorEntry& entry = source.entry(at->second);
    // Each its own type: config.json's is a hint, and published files keep norms in F32 beside BF16.
    const bool known = std::any_of(std::begin(kWeightTypes), std::end(kWeightTypes),
                                   [&](const auto& row) { return row.first == entry.type; });
    const at::IntArrayRef shape = entry.shape;
    faults.expect(known && shape == item.value().sizes(), in_quotes(at->second), " is ",
                  to_string(entry.type), " of shape ", shape, ", expected F32, BF16 or F16 of shape ",
                  item.value().sizes());
  }
}

void fill(CausalLM& model, const std::map<std::string, std::string>& found, const SafetensorsFolder& source) {
  const at::NoGradGuard no_grad;
  std::vector<TensorFill> fills;
  for (auto& item : model.named_parameters()) {
    const TensorEntry& entry = source.entry(found.at(item.key()));
    const auto bytes = source.bytes(entry.name);
    const auto type = scalar_type_of(entry.type);
    if (type == item.value().scalar_type()) {
      fills.push_back({item.value(), bytes});
    } else {
      const at::Tensor as_stored = at::empty(item.value().sizes(), at::TensorOptions(type));
      fill_tensors_({{as_stored, bytes}});
      item.value().copy_(as_stored);
    }
  }
  fill_tensors_(fills);
}

}  // namespace

std::shared_ptr<CausalLM> load_pretrained(const Path& folder, const LoadOptions& options) {
  const Path config_path = folder / "config.json";
  json config = read_config(config_path);
  const Family& family = family_of(config, config_path.string());
  const bool only_pickle = std::filesystem::exists(folder / "pytorch_model.bin") &&
                           !std::filesystem::exists(folder / "model.safetensors") &&
                           !std::filesystem::exists(folder / "model.safetensors.index.json");
  HALFSTEP_CHECK(!only_pickle, folder.string(),
                 ": holds its weights as pytorch_model.bin only, a pickle: opening it would run the code in "
                 "it. Save it again from transformers, with safe_serialization.");
  const SafetensorsFolder source(folder);
  // The file's, not the model's: saved again, it has the type that its parameters have then.
  config.erase("dtype");
  config.erase("torch_dtype");
  const files::JsonPlace place(config, config_path.string());

  // First without memory: a config that asks for more than the files hold is refused before it gets any.
  const auto plan = family.open(place, {.device = at::kMeta});
  auto found = by_model_name(source, family);
  Faults faults;
  if (!plan->named_parameters().contains(kHead)) drop_tied_head(found, family, source, faults);
  compare(*plan, found, source, faults);
  faults.throw_if_any(("load_pretrained: " + folder.string()).c_str());

  auto model = family.open(place, {.device = at::kCPU, .type = options.type});
  fill(*model, found, source);
  return model;
}

std::string config_json_of(const std::string& family, const CausalLMSizes& sizes) {
  const Family& row = family_named(family, "config_json_of");
  for (const int64_t size : {sizes.vocabulary, sizes.context, sizes.layers, sizes.width, sizes.heads})
    HALFSTEP_CHECK(size >= 1, "config_json_of: a size is ", size,
                   "; vocabulary, context, layers, width and heads must be positive.");
  return row.config_of(sizes).dump(2);
}

std::shared_ptr<CausalLM> make_causal_lm(const std::string& config_json, uint64_t seed) {
  const std::string where = "make_causal_lm";
  const json config = parse_config(config_json, where);
  auto model = family_of(config, where).open(files::JsonPlace(config, where), Uninitialized{});
  model->reset_parameters(seed);
  return model;
}

void save_pretrained(const CausalLM& model, const Path& folder) {
  std::vector<at::Tensor> kept;
  std::vector<TensorToWrite> writes;
  for (const auto& item : model.named_parameters()) {
    kept.push_back(item.value().detach().to(at::kCPU).contiguous());
    writes.push_back(to_write(item.key(), kept.back()));
    HALFSTEP_CHECK(writes.back().type == writes.front().type, "save_pretrained: '", item.key(), "' is ",
                   to_string(writes.back().type), " and '", writes.front().name, "' ",
                   to_string(writes.front().type), "; config.json has one type for all.");
  }
  auto config = json::parse(model.config_json());
  for (const auto& [type, name] : kWeightTypes)
    if (type == writes.front().type) config["dtype"] = config["torch_dtype"] = name;
  HALFSTEP_CHECK(config.contains("dtype"), "save_pretrained: the parameters are ",
                 to_string(writes.front().type), ", expected F32, BF16 or F16.");

  files::make_folders(folder);
  write_safetensors_folder(folder, writes);
  files::write_durably(folder / "config.json", config.dump(2) + "\n");
}

}  // namespace halfstep
