#include <gtest/gtest.h>
#include <halfstep/tensor_file.h>
#include <torch/torch.h>

#include "support/error_of.h"
#include "support/scratch.h"

namespace halfstep::testing {
namespace {

constexpr TensorType kAllTypes[] = {
    TensorType::BOOL,    TensorType::F4,          TensorType::F6_E2M3,     TensorType::F6_E3M2,
    TensorType::U8,      TensorType::I8,          TensorType::F8_E5M2,     TensorType::F8_E4M3,
    TensorType::F8_E8M0, TensorType::F8_E4M3FNUZ, TensorType::F8_E5M2FNUZ, TensorType::I16,
    TensorType::U16,     TensorType::F16,         TensorType::BF16,        TensorType::I32,
    TensorType::U32,     TensorType::F32,         TensorType::C64,         TensorType::F64,
    TensorType::I64,     TensorType::U64};

TEST(TensorFile, EveryTypeButTheSixBitOnesHasAPartnerOfTheSameSize) {
  for (const TensorType type : kAllTypes) {
    if (type == TensorType::F6_E2M3 || type == TensorType::F6_E3M2) {
      EXPECT_NE(error_of([&] { (void)scalar_type_of(type); }).find("LibTorch has no type for F6"),
                std::string::npos);
      continue;
    }
    const auto scalar = scalar_type_of(type);
    EXPECT_EQ(tensor_type_of(scalar), type);
    const int elements_per_byte = type == TensorType::F4 ? 2 : 1;
    EXPECT_EQ(static_cast<int>(c10::elementSize(scalar)) * 8, bits_of(type) * elements_per_byte)
        << to_string(type);
  }
  EXPECT_NE(error_of([] { (void)tensor_type_of(at::kComplexDouble); }), "no error");
}

TEST(TensorFile, EveryTypesBytesComeBack) {
  const ScratchFolder folder;
  NamedTensors tensors;
  for (const TensorType type : kAllTypes) {
    if (type == TensorType::F6_E2M3 || type == TensorType::F6_E3M2) continue;
    const auto scalar = scalar_type_of(type);
    const auto bytes = at::randint(type == TensorType::BOOL ? 2 : 256,
                                   {3, 8 * static_cast<int64_t>(c10::elementSize(scalar))}, at::kByte);
    tensors.emplace_back(std::string(to_string(type)), bytes.view(scalar));
  }
  write_tensors(folder / "all.safetensors", tensors);
  const auto read = read_tensors(folder / "all.safetensors");
  ASSERT_EQ(read.size(), tensors.size());
  for (const auto& [name, tensor] : read) {
    const auto original =
        std::find_if(tensors.begin(), tensors.end(), [&](const auto& item) { return item.first == name; });
    EXPECT_EQ(tensor.scalar_type(), original->second.scalar_type()) << name;
    EXPECT_EQ(tensor.sizes(), original->second.sizes()) << name;
    EXPECT_TRUE(at::equal(tensor.view(at::kByte), original->second.view(at::kByte))) << name;
  }
}

TEST(TensorFile, TensorsThatLieOtherwiseAreWrittenRowByRow) {
  const ScratchFolder folder;
  const auto square = at::arange(9, at::kFloat).view({3, 3});
  const auto complex = at::view_as_complex(at::arange(8, at::kFloat).view({4, 2}));
  write_tensors(folder / "t.safetensors", {{"t", square.t()}, {"conj", complex.conj()}});
  for (const auto& [name, tensor] : read_tensors(folder / "t.safetensors"))
    EXPECT_TRUE(at::equal(tensor, name == "t" ? square.t() : complex.conj()));
  EXPECT_NE(error_of([&] { (void)to_write("t", square.t()); }).find("contiguous"), std::string::npos);
}

TEST(TensorFile, LargeTensorsAreFilledWholeWhateverTheThreads) {
  const auto source = at::randint(256, {(int64_t{5} << 20) + 13}, at::kByte);
  const std::span bytes(static_cast<const std::byte*>(source.const_data_ptr()), source.nbytes());
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    const auto into = at::zeros_like(source), rest = at::zeros({13}, at::kByte);
    fill_tensors_({{into, bytes}, {rest, bytes.last(13)}});
    EXPECT_TRUE(at::equal(into, source));
    EXPECT_TRUE(at::equal(rest, source.narrow(0, int64_t{5} << 20, 13)));
  }
  EXPECT_NE(error_of([&] { fill_tensors_({{at::zeros({2}), bytes}}); }).find("do not go into"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep::testing
