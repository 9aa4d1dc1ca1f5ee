#include <halfstep/error.h>
#include <halfstep/safetensors.h>

#include <algorithm>

#include "safetensors/tensor_size.h"

namespace halfstep {
namespace {

struct TypeRow {
  TensorType type;
  std::string_view name;
  int bits;
};

constexpr TypeRow kTypes[] = {
    {TensorType::BOOL, "BOOL", 8},
    {TensorType::F4, "F4", 4},
    {TensorType::F6_E2M3, "F6_E2M3", 6},
    {TensorType::F6_E3M2, "F6_E3M2", 6},
    {TensorType::U8, "U8", 8},
    {TensorType::I8, "I8", 8},
    {TensorType::F8_E5M2, "F8_E5M2", 8},
    {TensorType::F8_E4M3, "F8_E4M3", 8},
    {TensorType::F8_E8M0, "F8_E8M0", 8},
    {TensorType::F8_E4M3FNUZ, "F8_E4M3FNUZ", 8},
    {TensorType::F8_E5M2FNUZ, "F8_E5M2FNUZ", 8},
    {TensorType::I16, "I16", 16},
    {TensorType::U16, "U16", 16},
    {TensorType::F16, "F16", 16},
    {TensorType::BF16, "BF16", 16},
    {TensorType::I32, "I32", 32},
    {TensorType::U32, "U32", 32},
    {TensorType::F32, "F32", 32},
    {TensorType::C64, "C64", 64},
    {TensorType::F64, "F64", 64},
    {TensorType::I64, "I64", 64},
    {TensorType::U64, "U64", 64},
};

const TypeRow& row_of(TensorType type) {
  for (const TypeRow& row : kTypes)
    if (row.type == type) return row;
  HALFSTEP_BUG("TensorType ", static_cast<int>(type), " is not in the table.");
}

}  // namespace

std::string_view to_string(TensorType type) { return row_of(type).name; }
int bits_of(TensorType type) { return row_of(type).bits; }

namespace files {

std::optional<TensorType> type_named(std::string_view name) {
  for (const TypeRow& row : kTypes)
    if (row.name == name) return row.type;
  return std::nullopt;
}

std::string type_names() {
  std::string names;
  for (const TypeRow& row : kTypes) names.append(names.empty() ? "" : ", ").append(row.name);
  return names;
}

TensorSize size_of_tensor(TensorType type, const std::vector<int64_t>& shape) {
  // Zeros are set aside: a product of 0 must not hide that the other dimensions overflow, since strides are
  // made of those.
  int64_t nonzero_product = 1;
  bool empty = false;
  for (const int64_t dimension : shape) {
    if (dimension < 0) return {.fault = "has a negative dimension"};
    if (dimension == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(nonzero_product, dimension, &nonzero_product)) {
      return {.fault = "overflows: its number of elements does not fit in 63 bits"};
    }
  }
  uint64_t bits = 0;
  const uint64_t element_count = empty ? 0 : static_cast<uint64_t>(nonzero_product);
  if (__builtin_mul_overflow(element_count, static_cast<uint64_t>(bits_of(type)), &bits))
    return {.fault = "overflows: its number of bits does not fit in 64 bits"};
  if (bits % 8 != 0) return {.fault = "does not fill whole bytes with elements of that type"};
  return {.bytes = bits / 8};
}

bool are_bools(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte <= std::byte{1}; });
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t dimension : shape)
    text.append(text.size() > 1 ? ", " : "").append(std::to_string(dimension));
  return text + "]";
}

}  // namespace files
}  // namespace halfstep
