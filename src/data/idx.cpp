#include "data_files/idx.h"

#include <ATen/ops/empty.h>
#include <halfstep/data.h>
#include <halfstep/error.h>

#include <cstring>

namespace halfstep {
namespace {

at::ScalarType scalar_type_of(files::IdxType type) {
  switch (type) {
    case files::IdxType::U8:
      return at::kByte;
    case files::IdxType::I8:
      return at::kChar;
    case files::IdxType::I16:
      return at::kShort;
    case files::IdxType::I32:
      return at::kInt;
    case files::IdxType::F32:
      return at::kFloat;
    case files::IdxType::F64:
      return at::kDouble;
  }
  HALFSTEP_BUG("no such IDX type: ", static_cast<int>(type));
}

}  // namespace

at::Tensor read_idx(const std::filesystem::path& path) {
  const files::IdxArray array = files::read_idx(path);
  at::Tensor tensor = at::empty(array.shape, scalar_type_of(array.type));
  if (!array.elements.empty())
    std::memcpy(tensor.mutable_data_ptr(), array.elements.data(), array.elements.size());
  return tensor;
}

}  // namespace halfstep
