#include "checkpoint_format/manifest.h"

#include <halfstep/error.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/json.h"
#include "io/json_place.h"
#include "safetensors/tensor_size.h"
#include "words/names.h"

namespace halfstep::files {
namespace {

constexpr size_t kMostDimensions = 64;

// A view whose elements are all apart and without gaps: sorted by stride, each is the product of the sizes
// below it.
bool dense(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  std::vector<std::pair<int64_t, int64_t>> dimensions;
  for (size_t i = 0; i < shape.size(); ++i)
    if (shape[i] != 1) dimensions.emplace_back(strides[i], shape[i]);
  std::sort(dimensions.begin(), dimensions.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dimensions) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

std::vector<int64_t> counts_of(const JsonPlace& list) {
  list.expect(list.value().is_array() && list.value().size() <= kMostDimensions, "an array of at most 64");
  std::vector<int64_t> counts;
  for (const JsonPlace& element : list.elements()) counts.push_back(element.count());
  return counts;
}

Sha256Text sha256_in(const JsonPlace& field) {
  field.expect(is_sha256(field.text()), "a SHA-256");
  return field.text();
}

/// The type of that name; an Error for an unknown one.
TensorType tensor_type(std::string_view name, std::string_view where) {
  const std::optional<TensorType> type = type_named(name);
  HALFSTEP_CHECK(type, where, ": unknown type ", in_quotes(name), ". There are ", type_names(), ".");
  return *type;
}

/// That type, shape, strides and byte range of a tensor agree, without overflow.
void check_extent(const ManifestTensor& tensor, std::string_view where) {
  const TensorSize size = size_of_tensor(tensor.type, tensor.shape);
  HALFSTEP_CHECK(!size.fault, where, ": its shape ", shape_text(tensor.shape), " ", size.fault, ".");
  HALFSTEP_CHECK(size.bytes == tensor.end - tensor.begin, where, ": ", tensor.end - tensor.begin,
                 " bytes, but its type and shape take ", size.bytes, ".");
  const std::vector<int64_t>& strides = tensor.strides;
  HALFSTEP_CHECK(
      strides.empty() ||
          (strides.size() == tensor.shape.size() && size.bytes > 0 && dense(tensor.shape, strides)),
      where, ": its strides ", shape_text(strides), " do not fit its shape ", shape_text(tensor.shape), ".");
}

using nlohmann::json;

// How every manifest ends. A reader rebuilds it from the bytes before, so that no bit of it is free.
std::string seal_of(std::string_view body) { return ",\n\"sha256\":\"" + sha256_of(body) + "\"}\n"; }

json json_of(const Scalar& scalar) {
  if (const auto* number = std::get_if<int64_t>(&scalar)) return *number;
  if (const auto* real = std::get_if<double>(&scalar)) return {{"real", to_text(*real)}};
  return std::get<std::string>(scalar);
}

json json_of(const ManifestTensor& tensor) {
  json out = {{"name", tensor.name},
              {"type", to_string(tensor.type)},
              {"shape", tensor.shape},
              {"sha256", tensor.sha256},
              {"bytes", {tensor.begin, tensor.end}}};
  if (!tensor.strides.empty()) out["strides"] = tensor.strides;
  return out;
}

json json_of(const ManifestPart& part) {
  json scalars = json::object(), tensors = json::array();
  for (const auto& [name, scalar] : part.scalars) scalars[name] = json_of(scalar);
  for (const ManifestTensor& tensor : part.tensors) tensors.push_back(json_of(tensor));
  return {{"name", part.name}, {"scalars", scalars}, {"tensors", tensors}};
}

json json_of(const Manifest& manifest) {
  json parts = json::array();
  for (const ManifestPart& part : manifest.parts) parts.push_back(json_of(part));
  const json file = {{"name", kTensorsName},
                     {"header_bytes", manifest.file.header_bytes},
                     {"header_sha256", manifest.file.header_sha256},
                     {"data_bytes", manifest.file.data_bytes}};
  json out = {{"halfstep_checkpoint", kManifestFormat},
              {"step", manifest.step},
              {"fingerprint", manifest.fingerprint},
              {"files", json::array({file})},
              {"parts", parts}};
  if (!manifest.healthy) out["healthy"] = false;
  if (manifest.score) out["score"] = to_text(*manifest.score);
  if (!manifest.ranks.empty()) out["ranks"] = manifest.ranks;
  return out;
}

Scalar scalar_of(const JsonPlace& field) {
  if (field.value().is_string()) return field.text();
  if (!field.value().is_object()) return field.integer();
  field.expect_fields({"real"});
  return parse_real(field.at("real").text(), field.where());
}

ManifestTensor tensor_of(const JsonPlace& entry) {
  entry.expect_fields({"name", "type", "shape", "sha256", "bytes"}, {"strides"});
  ManifestTensor tensor;
  tensor.name = entry.at("name").text();
  const std::string of = detail::concat(entry.where(), " ", in_quotes(tensor.name));
  tensor.type = tensor_type(entry.at("type").text(), of);
  tensor.shape = counts_of(entry.at("shape"));
  if (entry.has("strides")) tensor.strides = counts_of(entry.at("strides"));
  const std::vector<int64_t> range = counts_of(entry.at("bytes"));
  HALFSTEP_CHECK(range.size() == 2 && range[0] <= range[1], of, ": 'bytes' is not a range.");
  tensor.begin = static_cast<uint64_t>(range[0]);
  tensor.end = static_cast<uint64_t>(range[1]);
  tensor.sha256 = sha256_in(entry.at("sha256"));
  check_extent(tensor, of);
  return tensor;
}

ManifestPart part_of(const JsonPlace& entry) {
  entry.expect_fields({"name", "scalars", "tensors"});
  ManifestPart part;
  part.name = entry.at("name").text();
  check_part_name(part.name, entry.where());
  const std::string of = detail::concat(entry.where(), " ", in_quotes(part.name));
  for (const auto& [name, scalar] : entry.at("scalars").fields())
    part.scalars.emplace(name, scalar_of(scalar));
  std::set<std::string, std::less<>> names;
  for (const JsonPlace& tensor : entry.at("tensors").elements()) {
    part.tensors.push_back(tensor_of(tensor));
    const std::string& name = part.tensors.back().name;
    HALFSTEP_CHECK(names.insert(name).second && !part.scalars.contains(name), of, ": ", in_quotes(name),
                   " occurs twice.");
  }
  return part;
}

// Every byte behind the header belongs to exactly one tensor, so that the hashes cover the whole file.
void check_tiling(const Manifest& manifest, std::string_view where) {
  std::vector<const ManifestTensor*> by_place;
  for (const ManifestPart& part : manifest.parts)
    for (const ManifestTensor& tensor : part.tensors) by_place.push_back(&tensor);
  std::sort(by_place.begin(), by_place.end(), [](const ManifestTensor* a, const ManifestTensor* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  uint64_t reached = 0;
  for (const ManifestTensor* tensor : by_place) {
    HALFSTEP_CHECK(tensor->begin == reached, where, ": tensor ", in_quotes(tensor->name), " begins at byte ",
                   tensor->begin, " of the data; the one before it ends at ", reached, ".");
    reached = tensor->end;
  }
  HALFSTEP_CHECK(reached == manifest.file.data_bytes, where, ": the tensors end at byte ", reached, " of ",
                 manifest.file.data_bytes, ".");
}

ManifestFile file_of(const JsonPlace& files) {
  const std::vector<JsonPlace> list = files.elements();
  HALFSTEP_CHECK(list.size() == 1, files.where(), ": lists ", list.size(),
                 " files; a checkpoint of this format has one.");
  const JsonPlace& file = list.front();
  file.expect_fields({"name", "header_bytes", "header_sha256", "data_bytes"});
  const std::string& name = file.at("name").text();
  HALFSTEP_CHECK(name == kTensorsName, file.where(), ": names a file ", in_quotes(name),
                 "; a checkpoint of this format has '", kTensorsName, "' alone.");
  return {.header_bytes = static_cast<uint64_t>(file.at("header_bytes").count()),
          .header_sha256 = sha256_in(file.at("header_sha256")),
          .data_bytes = static_cast<uint64_t>(file.at("data_bytes").count())};
}

}  // namespace

std::string to_text(const Manifest& manifest) {
  std::string body;
  try {
    body = json_of(manifest).dump();
  } catch (const json::exception&) {
    throw Error(
        "checkpoint: a name or text in it is not valid UTF-8; a manifest holds texts, not bytes. Save "
        "bytes as a tensor of type uint8.");
  }
  body.pop_back();  // the '}' comes after the seal
  return sealed(body);
}

std::string sealed(std::string_view body) { return std::string(body) + seal_of(body); }

Manifest parse_manifest(std::string_view text, std::string_view where) {
  HALFSTEP_CHECK(text.size() <= kLargestManifest, where, ": ", text.size(), " bytes; at most ",
                 kLargestManifest, " are read. Save long texts as tensors of type uint8.");
  const size_t seal_bytes = seal_of("").size();
  HALFSTEP_CHECK(text.size() > seal_bytes, where, ": ", text.size(), " bytes are not a manifest.");
  const std::string_view body = text.substr(0, text.size() - seal_bytes);
  HALFSTEP_CHECK(text.substr(body.size()) == seal_of(body), where,
                 ": its SHA-256 does not fit its text: it was changed or cut short after it was written.");
  const json value = read_json(text, where);
  const JsonPlace root(value, std::string(where));

  // Before anything else: what else a future format may have, only a future Halfstep knows.
  HALFSTEP_CHECK(root.has("halfstep_checkpoint"), where, ": is not the manifest of a Halfstep checkpoint.");
  const int64_t format = root.at("halfstep_checkpoint").integer();
  HALFSTEP_CHECK(format == kManifestFormat, where, ": is of format ", format, "; this Halfstep reads format ",
                 kManifestFormat, ". Read it with the version of Halfstep that wrote it, or a later one.");

  root.expect_fields({"halfstep_checkpoint", "step", "fingerprint", "files", "parts", "sha256"},
                     {"healthy", "score", "ranks"});
  Manifest manifest;
  manifest.step = root.at("step").count();
  if (root.has("healthy")) manifest.healthy = root.at("healthy").truth();
  if (root.has("score")) manifest.score = parse_real(root.at("score").text(), root.at("score").where());
  if (root.has("ranks"))
    for (const JsonPlace& rank : root.at("ranks").elements()) manifest.ranks.push_back(rank.text());
  for (const auto& [name, answer] : root.at("fingerprint").fields())
    manifest.fingerprint.emplace(name, answer.text());
  manifest.file = file_of(root.at("files"));
  std::set<std::string, std::less<>> names;
  for (const JsonPlace& part : root.at("parts").elements()) {
    manifest.parts.push_back(part_of(part));
    HALFSTEP_CHECK(names.insert(manifest.parts.back().name).second, where, ": part ",
                   in_quotes(manifest.parts.back().name), " occurs twice.");
  }
  check_tiling(manifest, where);
  return manifest;
}

std::string rank_folder_name(std::size_t rank) {
  std::string digits = std::to_string(rank);
  return "rank-" + std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
}

std::string name_in_file(std::string_view part, std::string_view tensor) {
  return detail::concat(part, "/", tensor);
}

void check_part_name(std::string_view name, std::string_view where) {
  HALFSTEP_CHECK(!name.empty() && name.find('/') == std::string_view::npos, where, ": a part is called ",
                 in_quotes(name),
                 "; a part's name is not empty and has no '/', which separates it from a tensor's.");
}

std::string to_text(double value) {
  char text[40];
  if (std::isnan(value)) {
    std::snprintf(text, sizeof text, "nan:%016llx",
                  static_cast<unsigned long long>(std::bit_cast<uint64_t>(value)));
    return text;
  }
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

double parse_real(std::string_view text, std::string_view where) {
  constexpr std::string_view kNan = "nan:";
  const bool nan = text.starts_with(kNan);
  const std::string_view digits = nan ? text.substr(kNan.size()) : text;
  const char *const begin = digits.data(), *const end = begin + digits.size();
  double value = 0;
  uint64_t bits = 0;
  const auto [stop, fault] = nan ? std::from_chars(begin, end, bits, 16) : std::from_chars(begin, end, value);
  if (nan) value = std::bit_cast<double>(bits);
  HALFSTEP_CHECK(fault == std::errc{} && stop == end && std::isnan(value) == nan, where, ": ",
                 in_quotes(text), " is not a real number.");
  return value;
}

}  // namespace halfstep::files
