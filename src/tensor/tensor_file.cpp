#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <halfstep/error.h>
#include <halfstep/tensor_file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "words/names.h"

namespace halfstep {
namespace {

constexpr std::array<std::pair<TensorType, at::ScalarType>, 20> kTypes{{
    {TensorType::BOOL, at::kBool},
    {TensorType::F4, at::ScalarType::Float4_e2m1fn_x2},
    {TensorType::U8, at::kByte},
    {TensorType::I8, at::kChar},
    {TensorType::F8_E5M2, at::kFloat8_e5m2},
    {TensorType::F8_E4M3, at::kFloat8_e4m3fn},
    {TensorType::F8_E8M0, at::kFloat8_e8m0fnu},
    {TensorType::F8_E4M3FNUZ, at::kFloat8_e4m3fnuz},
    {TensorType::F8_E5M2FNUZ, at::kFloat8_e5m2fnuz},
    {TensorType::I16, at::kShort},
    {TensorType::U16, at::kUInt16},
    {TensorType::F16, at::kHalf},
    {TensorType::BF16, at::kBFloat16},
    {TensorType::I32, at::kInt},
    {TensorType::U32, at::kUInt32},
    {TensorType::F32, at::kFloat},
    {TensorType::C64, at::kComplexFloat},
    {TensorType::F64, at::kDouble},
    {TensorType::I64, at::kLong},
    {TensorType::U64, at::kUInt64},
}};

/// Enough pieces for every thread to have some of the largest tensor, each large enough to be worth a turn.
constexpr size_t kPieceBytes = size_t{1} << 20;

/// Tells the kernel of the pages under these bytes. Only advice: where it is not taken (Linux before 5.14)
/// the copy takes its page faults one at a time, which made half of the time of loading.
void advise(const std::byte* start, size_t bytes, int advice) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(start) / page * page;
  (void)madvise(reinterpret_cast<void*>(first), reinterpret_cast<uintptr_t>(start) + bytes - first, advice);
}

}  // namespace

TensorType tensor_type_of(at::ScalarType type) {
  for (const auto& [in_file, in_memory] : kTypes)
    if (in_memory == type) return in_file;
  throw Error(detail::concat("safetensors files have no type for LibTorch's ", type, "."));
}

at::ScalarType scalar_type_of(TensorType type) {
  for (const auto& [in_file, in_memory] : kTypes)
    if (in_file == type) return in_memory;
  throw Error(
      detail::concat("LibTorch has no type for ", to_string(type), ": take its bytes from SafetensorsFile."));
}

std::vector<int64_t> sizes_of(const TensorEntry& entry) {
  std::vector<int64_t> sizes = entry.shape;
  if (entry.type == TensorType::F4) {
    HALFSTEP_CHECK(!sizes.empty() && sizes.back() % 2 == 0, in_quotes(entry.name),
                   ": F4 elements lie in pairs, and its rows have an odd number of them.");
    sizes.back() /= 2;
  }
  return sizes;
}

TensorToWrite to_write(std::string name, const at::Tensor& tensor) {
  HALFSTEP_CHECK(
      tensor.defined() && tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj(),
      in_quotes(name), " cannot be written as it is: it must be a contiguous CPU tensor.");
  std::vector<int64_t> shape = tensor.sizes().vec();
  const TensorType type = tensor_type_of(tensor.scalar_type());
  if (type == TensorType::F4) {
    HALFSTEP_CHECK(!shape.empty(), in_quotes(name), " is a pair of F4 elements without a dimension.");
    shape.back() *= 2;
  }
  return {.name = std::move(name),
          .type = type,
          .shape = std::move(shape),
          .bytes = {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()}};
}

void fill_tensors_(const std::vector<TensorFill>& fills) {
  struct Piece {
    std::byte* to;
    std::span<const std::byte> from;
  };
  std::vector<Piece> pieces;
  for (const TensorFill& fill : fills) {
    HALFSTEP_CHECK(fill.into.is_cpu() && fill.into.is_contiguous() && fill.into.nbytes() == fill.bytes.size(),
                   "fill_tensors_: ", fill.bytes.size(), " bytes do not go into a tensor of ",
                   fill.into.nbytes(), " bytes; it must be on the CPU and contiguous.");
    auto* start = static_cast<std::byte*>(fill.into.data_ptr());
    for (size_t done = 0; done < fill.bytes.size(); done += kPieceBytes)
      pieces.push_back(
          {start + done, fill.bytes.subspan(done, std::min(kPieceBytes, fill.bytes.size() - done))});
  }
  at::parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      const auto& [to, from] = pieces[i];
      if (from.size() >= kPieceBytes / 4) {
        advise(from.data(), from.size(),
               MADV_WILLNEED);  // one request for the disk, not one for every 128 KiB
        advise(from.data(), from.size(), MADV_POPULATE_READ);
        advise(to, from.size(), MADV_POPULATE_WRITE);
      }
      std::memcpy(to, from.data(), from.size());
    }
  });
}

NamedTensors read_tensors(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  NamedTensors tensors;
  std::vector<TensorFill> fills;
  for (const TensorEntry& entry : file.entries()) {
    const auto type = scalar_type_of(entry.type);
    tensors.emplace_back(entry.name, at::empty(sizes_of(entry), at::TensorOptions(type)));
    fills.push_back({tensors.back().second, file.bytes(entry)});
  }
  fill_tensors_(fills);
  return tensors;
}

void write_tensors(const std::filesystem::path& path, const NamedTensors& tensors,
                   const std::map<std::string, std::string>& metadata) {
  std::vector<at::Tensor> kept;
  std::vector<TensorToWrite> writes;
  for (const auto& [name, tensor] : tensors) {
    HALFSTEP_CHECK(tensor.defined(), "write_tensors: ", in_quotes(name), " is an undefined tensor.");
    kept.push_back(tensor.detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous());
    writes.push_back(to_write(name, kept.back()));
  }
  write_safetensors(path, writes, metadata);
}

}  // namespace halfstep
