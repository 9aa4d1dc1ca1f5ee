#include "data_files/idx.h"

#include <halfstep/error.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "io/input_file.h"

namespace halfstep::files {
namespace {

constexpr int kMaxRank = 8;
// Deflate makes at most 1,032 bytes of one: a header that asks for more of its file is lying.
constexpr uint64_t kMostOutOfOne = 1032;
constexpr size_t kFirstPart = size_t{1} << 20;

/// The bytes of a file in order, decompressed if need be.
class Source {
 public:
  Source(std::span<const std::byte> file, const std::string& where) : file_(file), where_(where) {
    compressed_ = file.size() >= 2 && file[0] == std::byte{0x1F} && file[1] == std::byte{0x8B};
    if (compressed_ && inflateInit2(&stream_, 16 + MAX_WBITS) != Z_OK) throw std::bad_alloc();
  }
  ~Source() {
    if (compressed_) inflateEnd(&stream_);
  }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  uint64_t most_bytes() const { return compressed_ ? file_.size() * kMostOutOfOne : file_.size(); }

  void read(std::span<std::byte> out, std::string_view what) {
    const size_t got = compressed_ ? inflate_into(out) : copy_into(out);
    expect_whole(got, out.size(), what);
  }

  /// Memory follows what was delivered, not what a header tells: it doubles as the data come.
  std::vector<std::byte> read_all(uint64_t bytes, std::string_view what) {
    std::vector<std::byte> all;
    size_t got = 0;
    while (got == all.size() && got < bytes) {
      all.resize(compressed_ ? std::min<uint64_t>(bytes, std::max(kFirstPart, 2 * got)) : bytes);
      const std::span<std::byte> rest = std::span(all).subspan(got);
      got += compressed_ ? inflate_into(rest) : copy_into(rest);
    }
    expect_whole(got, bytes, what);
    return all;
  }

  void expect_end() {
    std::array<std::byte, 1> more{};
    const size_t got = compressed_ ? inflate_into(more) : copy_into(more);
    HALFSTEP_CHECK(got == 0, where_, ": continues after the elements that its header declares.");
    HALFSTEP_CHECK(!compressed_ || (ended_ && file_.empty()), where_, ": has ", file_.size(),
                   " bytes after its compressed data.");
  }

 private:
  void expect_whole(uint64_t got, uint64_t expected, std::string_view what) const {
    HALFSTEP_CHECK(got == expected, where_, ": ends after ", got, " of ", expected, " bytes of its ", what,
                   ". Was it cut short?");
  }

  size_t copy_into(std::span<std::byte> out) {
    const size_t bytes = std::min(out.size(), file_.size());
    std::copy_n(file_.begin(), bytes, out.begin());
    file_ = file_.subspan(bytes);
    return bytes;
  }

  size_t inflate_into(std::span<std::byte> out) {
    constexpr size_t kMost = std::numeric_limits<uInt>::max();
    size_t made = 0;
    while (!ended_ && made < out.size()) {
      const size_t in_bytes = std::min(file_.size(), kMost), out_bytes = std::min(out.size() - made, kMost);
      stream_.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(file_.data()));
      stream_.avail_in = static_cast<uInt>(in_bytes);
      stream_.next_out = reinterpret_cast<Bytef*>(out.data() + made);
      stream_.avail_out = static_cast<uInt>(out_bytes);
      const int result = inflate(&stream_, Z_NO_FLUSH);
      file_ = file_.subspan(in_bytes - stream_.avail_in);
      made += out_bytes - stream_.avail_out;
      ended_ = result == Z_STREAM_END;
      if (result == Z_BUF_ERROR) break;  // the file ends too soon
      HALFSTEP_CHECK(ended_ || result == Z_OK, where_,
                     ": its compressed data are damaged: ", stream_.msg ? stream_.msg : "unknown", ".");
    }
    return made;
  }

  std::span<const std::byte> file_;
  const std::string& where_;
  z_stream stream_{};
  bool compressed_ = false;
  bool ended_ = false;
};

bool is_known(uint8_t type) {
  for (const IdxType known :
       {IdxType::U8, IdxType::I8, IdxType::I16, IdxType::I32, IdxType::F32, IdxType::F64})
    if (type == static_cast<uint8_t>(known)) return true;
  return false;
}

void reverse_each(std::vector<std::byte>& elements, size_t width) {
  for (size_t at = 0; width > 1 && at < elements.size(); at += width)
    std::reverse(elements.begin() + static_cast<std::ptrdiff_t>(at),
                 elements.begin() + static_cast<std::ptrdiff_t>(at + width));
}

}  // namespace

size_t bytes_of(IdxType type) {
  switch (type) {
    case IdxType::U8:
    case IdxType::I8:
      return 1;
    case IdxType::I16:
      return 2;
    case IdxType::I32:
    case IdxType::F32:
      return 4;
    case IdxType::F64:
      return 8;
  }
  HALFSTEP_BUG("no such IDX type: ", static_cast<int>(type));
}

IdxArray parse_idx(std::span<const std::byte> file, const std::string& where) {
  Source source(file, where);
  std::array<std::byte, 4> magic{};
  source.read(magic, "header");
  const auto type = static_cast<uint8_t>(magic[2]), rank = static_cast<uint8_t>(magic[3]);
  HALFSTEP_CHECK(
      magic[0] == std::byte{0} && magic[1] == std::byte{0} && is_known(type), where,
      ": is not an IDX file: it does not begin with two zeros and a type of 8, 9, 11, 12, 13 or 14.");
  HALFSTEP_CHECK(rank >= 1 && rank <= kMaxRank, where, ": has ", int{rank}, " dimensions; 1 to ", kMaxRank,
                 " are read.");
  IdxArray array{.type = static_cast<IdxType>(type), .shape = {}, .elements = {}};
  // Zeros are set aside: a product of 0 must not hide that the other dimensions overflow, since strides are
  // made of those.
  int64_t nonzero_bytes = static_cast<int64_t>(bytes_of(array.type));
  bool empty = false;
  for (int i = 0; i < rank; ++i) {
    std::array<std::byte, 4> word{};
    source.read(word, "header");
    uint32_t size = 0;
    for (const std::byte b : word) size = size << 8 | static_cast<uint32_t>(b);
    array.shape.push_back(size);
    empty = empty || size == 0;
    HALFSTEP_CHECK(size == 0 || !__builtin_mul_overflow(nonzero_bytes, int64_t{size}, &nonzero_bytes), where,
                   ": its dimensions multiply to more than 2^63 bytes.");
  }
  const uint64_t bytes = empty ? 0 : static_cast<uint64_t>(nonzero_bytes);
  HALFSTEP_CHECK(bytes <= source.most_bytes(), where, ": its header declares ", bytes, " bytes; ",
                 file.size(), " bytes of file cannot hold them.");
  array.elements = source.read_all(bytes, "elements");
  source.expect_end();
  reverse_each(array.elements, bytes_of(array.type));
  return array;
}

IdxArray read_idx(const std::filesystem::path& path) {
  const MappedFile file(path);
  return parse_idx(file.bytes(), path.string());
}

}  // namespace halfstep::files
