#include "checkpoint_format/manifest_fields.h"

#include <halfstep/error.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "words/names.h"
#include "safetensors/tensor_size.h"

namespace halfstep::files {
namespace {

constexpr size_t kMostDimensions = 64;

bool lists(std::initializer_list<std::string_view> names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

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

}  // namespace

Fields::Fields(const nlohmann::json& object, std::string where,
               std::initializer_list<std::string_view> required,
               std::initializer_list<std::string_view> optional)
    : object_(object), where_(std::move(where)) {
  HALFSTEP_CHECK(object.is_object(), where_, ": is not a JSON object.");
  for (const std::string_view name : required)
    HALFSTEP_CHECK(object.contains(name), where_, ": has no '", name, "'.");
  for (const auto& [name, value] : object.items())
    HALFSTEP_CHECK(lists(required, name) || lists(optional, name), where_, ": unknown ", in_quotes(name),
                   ".");
}

const std::string& Fields::text(const char* name) const {
  const nlohmann::json& value = object_[name];
  HALFSTEP_CHECK(value.is_string(), where_, ": '", name, "' is not a text.");
  return value.get_ref<const std::string&>();
}

int64_t Fields::count(const char* name) const {
  const int64_t value = whole_number(object_[name], detail::concat(where_, ": '", name, "'"));
  HALFSTEP_CHECK(value >= 0, where_, ": '", name, "' is ", value, ", expected a count.");
  return value;
}

std::vector<int64_t> Fields::counts(const char* name) const {
  const nlohmann::json& values = array(name);
  HALFSTEP_CHECK(values.size() <= kMostDimensions, where_, ": '", name, "' has ", values.size(),
                 " numbers; at most ", kMostDimensions, " are read.");
  std::vector<int64_t> counts;
  for (const nlohmann::json& value : values) {
    counts.push_back(whole_number(value, detail::concat(where_, ": '", name, "'")));
    HALFSTEP_CHECK(counts.back() >= 0, where_, ": '", name, "' holds ", counts.back(), ", expected counts.");
  }
  return counts;
}

Sha256Text Fields::sha256(const char* name) const {
  HALFSTEP_CHECK(is_sha256(text(name)), where_, ": '", name, "' is not a SHA-256.");
  return text(name);
}

const nlohmann::json& Fields::object(const char* name) const {
  HALFSTEP_CHECK(object_[name].is_object(), where_, ": '", name, "' is not a JSON object.");
  return object_[name];
}

const nlohmann::json& Fields::array(const char* name) const {
  HALFSTEP_CHECK(object_[name].is_array(), where_, ": '", name, "' is not a JSON array.");
  return object_[name];
}

int64_t whole_number(const nlohmann::json& value, std::string_view where) {
  HALFSTEP_CHECK(value.is_number_integer(), where, " is not a whole number.");
  HALFSTEP_CHECK(!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t{INT64_MAX}, where,
                 " is larger than 64 bits hold.");
  return value.get<int64_t>();
}

TensorType tensor_type(std::string_view name, std::string_view where) {
  const std::optional<TensorType> type = type_named(name);
  HALFSTEP_CHECK(type, where, ": unknown type ", in_quotes(name), ". There are ", type_names(), ".");
  return *type;
}

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

}  // namespace halfstep::files
