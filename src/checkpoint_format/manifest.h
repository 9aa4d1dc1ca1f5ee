// The manifest of a checkpoint, as a value: what is in it, where its bytes lie, and the hash of each.
#pragma once

#include <halfstep/safetensors.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "io/sha256.h"

namespace halfstep::files {

/// The layout that this Halfstep writes. A larger one is refused by number.
inline constexpr int64_t kManifestFormat = 1;

/// The longest that is read, and so the longest that is written.
inline constexpr uint64_t kLargestManifest = uint64_t{64} << 20;

/// The only names of files in a checkpoint. A manifest is a stranger's: no name in it is ever used as a path.
inline constexpr std::string_view kManifestName = "manifest.json";
inline constexpr std::string_view kTensorsName = "tensors.safetensors";

/// Where rank 1, 2, ... has written its part of a checkpoint, a manifest and a file as rank 0's:
/// "rank-00001".
std::string rank_folder_name(std::size_t rank);

/// A safetensors file. Its header is hashed apart; the tensors behind it have hashes of their own, and lie
/// without gaps: every byte of the file is covered.
struct ManifestFile {
  uint64_t header_bytes = 0;
  Sha256Text header_sha256;
  uint64_t data_bytes = 0;
  friend bool operator==(const ManifestFile&, const ManifestFile&) = default;
};

struct ManifestTensor {
  std::string name;
  TensorType type{};
  std::vector<int64_t> shape;
  /// How it lay in memory; empty where row by row. The bytes in the file are row by row always.
  std::vector<int64_t> strides;
  uint64_t begin = 0, end = 0;  ///< bytes behind the header
  Sha256Text sha256;
  friend bool operator==(const ManifestTensor&, const ManifestTensor&) = default;
};

using Scalar = std::variant<int64_t, double, std::string>;

struct ManifestPart {
  std::string name;  ///< "model", "optimizer": no '/', which separates it from a tensor's name in the file
  std::map<std::string, Scalar> scalars;
  std::vector<ManifestTensor> tensors;
};

struct Manifest {
  int64_t step = 0;
  std::map<std::string, std::string> fingerprint;  ///< of the machine and libraries that wrote it
  ManifestFile file;
  std::vector<ManifestPart> parts;
  bool healthy = true;              ///< false while the run that saved it was in trouble
  std::optional<double> score{};    ///< the lower, the better: a held-out loss
  std::vector<Sha256Text> ranks{};  ///< of the manifests of rank 1, 2, ..., where several have saved it
};

/// JSON whose last member is the SHA-256 of all that stands before it.
std::string to_text(const Manifest& manifest);

/// A body with its SHA-256 behind it. `body` is a JSON object without its closing brace.
std::string sealed(std::string_view body);

/// Reads such a text. An Error that begins with `where` for one that is changed in any bit, of a future
/// format, or whose tensors do not tile the file's bytes exactly once each.
Manifest parse_manifest(std::string_view text, std::string_view where);

/// The name of a part's tensor in the safetensors file: "optimizer/param.weight.first_moment".
std::string name_in_file(std::string_view part, std::string_view tensor);

/// An Error unless a part may be called so.
void check_part_name(std::string_view name, std::string_view where);

/// A real number as the shortest text that reads back with the same bits, NaN payloads included.
std::string to_text(double value);
double parse_real(std::string_view text, std::string_view where);

}  // namespace halfstep::files
