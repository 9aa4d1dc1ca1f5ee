#include <halfstep/data.h>
#include <halfstep/error.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "data/permutation.h"
#include "data_files/idx.h"

namespace halfstep {

ImageBatches::ImageBatches(at::Tensor images, at::Tensor labels, const ImageBatchOptions& options)
    : images_(std::move(images)), labels_(std::move(labels)), options_(options) {
  HALFSTEP_CHECK(images_.dim() == 3 && images_.scalar_type() == at::kByte, "ImageBatches: images are ",
                 images_.scalar_type(), " of shape ", images_.sizes(),
                 ", expected bytes of [count, height, width].");
  HALFSTEP_CHECK(labels_.dim() == 1 && labels_.size(0) == images_.size(0), "ImageBatches: ", images_.size(0),
                 " images and labels of shape ", labels_.sizes(), ". Give one label per image.");
  HALFSTEP_CHECK(images_.size(0) > 0, "ImageBatches: there is no image.");
  HALFSTEP_CHECK(options.batch_size > 0, "ImageBatches: batch_size is ", options.batch_size,
                 "; it must be positive.");
  HALFSTEP_CHECK(options.deviation > 0, "ImageBatches: deviation is ", options.deviation,
                 "; it must be positive.");
  labels_ = labels_.to(at::kLong);
  byte_sum_ = images_.sum(at::kLong).item<int64_t>();
}

ImageBatch ImageBatches::next_part(int64_t part, int64_t parts) {
  HALFSTEP_CHECK(parts > 0 && part >= 0 && part < parts, "ImageBatches: part ", part, " of ", parts, ".");
  const int64_t left = count() - taken_ % count();
  const int64_t all = options_.shuffle ? options_.batch_size : std::min(options_.batch_size, left);
  const int64_t first = all * part / parts, rows = all * (part + 1) / parts - first;
  at::Tensor places = at::empty({rows}, at::kLong);
  auto* const place = places.mutable_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t taken = taken_ + first + row, index = taken % count(), epoch = taken / count();
    place[row] =
        !options_.shuffle
            ? index
            : static_cast<int64_t>(permuted(static_cast<uint64_t>(index), static_cast<uint64_t>(count()),
                                            options_.seed, static_cast<uint64_t>(epoch)));
  }
  taken_ += all;
  const at::Tensor bytes = images_.index_select(0, places).unsqueeze(1);
  return {bytes.to(at::kFloat).sub_(255 * options_.mean).div_(255 * options_.deviation),
          labels_.index_select(0, places)};
}

StateDict ImageBatches::state_dict() const {
  StateDict state;
  state.set("images", count());
  state.set("byte_sum", byte_sum_);
  state.set("images_taken", taken_);
  state.set("seed", static_cast<int64_t>(options_.seed));
  state.set("shuffle", int64_t{options_.shuffle});
  return state;
}

void ImageBatches::load_state_dict(const StateDict& saved) {
  saved.expect_exactly("ImageBatches", {"images", "byte_sum", "images_taken", "seed", "shuffle"});
  const StateDict own = state_dict();
  for (const char* name : {"images", "byte_sum", "seed", "shuffle"})
    HALFSTEP_CHECK(saved.integer(name) == own.integer(name),
                   "ImageBatches: the saved state is of other data: ", name, " ", saved.integer(name),
                   " (here ", own.integer(name), "). Resume with the images and options that it had.");
  const int64_t taken = saved.integer("images_taken");
  HALFSTEP_CHECK(taken >= 0, "ImageBatches: the saved state has ", taken, " images taken.");
  taken_ = taken;
}

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
