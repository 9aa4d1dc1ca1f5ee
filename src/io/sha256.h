// SHA-256, as one goes along.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

struct evp_md_ctx_st;

namespace halfstep::files {

/// The 64 lower-case hexadecimal digits of a SHA-256: what manifests hold.
using Sha256Text = std::string;

/// OpenSSL's, which uses the processor's own instructions where it has them.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void update(std::span<const std::byte> bytes);

  /// The hash of everything given since the last call; the next `update` begins a new one.
  Sha256Text finish();

 private:
  void begin();

  struct Free {
    void operator()(evp_md_ctx_st* context) const;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

Sha256Text sha256_of(std::span<const std::byte> bytes);
Sha256Text sha256_of(std::string_view text);

/// Whether a text is 64 lower-case hexadecimal digits.
bool is_sha256(std::string_view text);

}  // namespace halfstep::files
