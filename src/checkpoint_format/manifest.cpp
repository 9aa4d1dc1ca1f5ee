#include "checkpoint_format/manifest.h"

#include <halfstep/error.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <set>

#include "words/names.h"
#include "io/json.h"
#include "checkpoint_format/manifest_fields.h"

namespace halfstep::files {
namespace {

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
  return out;
}

Scalar scalar_of(const json& value, const Fields& in, const std::string& name) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_object()) {
    const Fields real(value, detail::concat(in.where(), ": ", in_quotes(name)), {"real"});
    return parse_real(real.text("real"), real.where());
  }
  return whole_number(value, detail::concat(in.where(), ": ", in_quotes(name)));
}

ManifestTensor tensor_of(const json& value, const std::string& where) {
  const Fields fields(value, where, {"name", "type", "shape", "sha256", "bytes"}, {"strides"});
  ManifestTensor tensor;
  tensor.name = fields.text("name");
  const std::string of = detail::concat(where, " ", in_quotes(tensor.name));
  tensor.type = tensor_type(fields.text("type"), of);
  tensor.shape = fields.counts("shape");
  if (fields.has("strides")) tensor.strides = fields.counts("strides");
  const std::vector<int64_t> range = fields.counts("bytes");
  HALFSTEP_CHECK(range.size() == 2 && range[0] <= range[1], of, ": 'bytes' is not a range.");
  tensor.begin = static_cast<uint64_t>(range[0]);
  tensor.end = static_cast<uint64_t>(range[1]);
  tensor.sha256 = fields.sha256("sha256");
  check_extent(tensor, of);
  return tensor;
}

ManifestPart part_of(const json& value, const std::string& where) {
  const Fields fields(value, where, {"name", "scalars", "tensors"});
  ManifestPart part;
  part.name = fields.text("name");
  check_part_name(part.name, where);
  const std::string of = detail::concat(where, " ", in_quotes(part.name));
  for (const auto& [name, scalar] : fields.object("scalars").items())
    part.scalars.emplace(name, scalar_of(scalar, fields, name));
  std::set<std::string, std::less<>> names;
  for (const json& tensor : fields.array("tensors")) {
    part.tensors.push_back(tensor_of(tensor, detail::concat(of, ": tensor ", part.tensors.size())));
    const std::string& name = part.tensors.back().name;
    HALFSTEP_CHECK(names.insert(name).second && !part.scalars.contains(name), of, ": ", in_quotes(name),
                   " stands twice.");
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

ManifestFile file_of(const json& files, const std::string& where) {
  HALFSTEP_CHECK(files.size() == 1, where, ": lists ", files.size(),
                 " files; a checkpoint of this format has one.");
  const Fields fields(files[0], where + ": file", {"name", "header_bytes", "header_sha256", "data_bytes"});
  HALFSTEP_CHECK(fields.text("name") == kTensorsName, where, ": names a file ",
                 in_quotes(fields.text("name")), "; a checkpoint of this format has '", kTensorsName,
                 "' alone.");
  return {.header_bytes = static_cast<uint64_t>(fields.count("header_bytes")),
          .header_sha256 = fields.sha256("header_sha256"),
          .data_bytes = static_cast<uint64_t>(fields.count("data_bytes"))};
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
  HALFSTEP_CHECK(text.size() > seal_bytes, where, ": ", text.size(), " bytes are no manifest.");
  const std::string_view body = text.substr(0, text.size() - seal_bytes);
  HALFSTEP_CHECK(text.substr(body.size()) == seal_of(body), where,
                 ": its SHA-256 does not fit its text: it was changed or cut short after it was written.");
  const json value = read_json(text, where);
  const std::string place(where);

  // Before anything else: what else a future format may have, only a future Halfstep knows.
  HALFSTEP_CHECK(value.is_object() && value.contains("halfstep_checkpoint"), where,
                 ": is not the manifest of a Halfstep checkpoint.");
  const int64_t format = whole_number(value["halfstep_checkpoint"], place + ": 'halfstep_checkpoint'");
  HALFSTEP_CHECK(format == kManifestFormat, where, ": is of format ", format, "; this Halfstep reads format ",
                 kManifestFormat, ". Read it with the version of Halfstep that wrote it, or a later one.");

  const Fields fields(value, place,
                      {"halfstep_checkpoint", "step", "fingerprint", "files", "parts", "sha256"},
                      {"healthy", "score"});
  Manifest manifest;
  manifest.step = fields.count("step");
  if (fields.has("healthy")) {
    HALFSTEP_CHECK(value["healthy"].is_boolean(), where, ": 'healthy' is neither true nor false.");
    manifest.healthy = value["healthy"].get<bool>();
  }
  if (fields.has("score")) manifest.score = parse_real(fields.text("score"), place + ": 'score'");
  for (const auto& [name, answer] : fields.object("fingerprint").items()) {
    HALFSTEP_CHECK(answer.is_string(), where, ": fingerprint ", in_quotes(name), " is not a text.");
    manifest.fingerprint.emplace(name, answer.get<std::string>());
  }
  manifest.file = file_of(fields.array("files"), place);
  std::set<std::string, std::less<>> names;
  for (const json& part : fields.array("parts")) {
    manifest.parts.push_back(part_of(part, detail::concat(where, ": part ", manifest.parts.size())));
    HALFSTEP_CHECK(names.insert(manifest.parts.back().name).second, where, ": part ",
                   in_quotes(manifest.parts.back().name), " stands twice.");
  }
  check_tiling(manifest, where);
  return manifest;
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
  const char* const end = digits.data() + digits.size();
  double value = 0;
  uint64_t bits = 0;
  const auto [stop, fault] =
      nan ? std::from_chars(digits.data(), end, bits, 16) : std::from_chars(digits.data(), end, value);
  if (nan) value = std::bit_cast<double>(bits);
  HALFSTEP_CHECK(fault == std::errc{} && stop == end && std::isnan(value) == nan, where, ": ",
                 in_quotes(text), " is not a real number.");
  return value;
}

}  // namespace halfstep::files
