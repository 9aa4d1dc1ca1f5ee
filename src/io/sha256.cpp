#include "io/sha256.h"

#include <halfstep/error.h>
#include <openssl/evp.h>

#include <algorithm>
#include <array>

namespace halfstep::files {

// OpenSSL refuses only for want of memory or of the algorithm; neither is a fault of the bytes.
static void must(int result) {
  if (result != 1) HALFSTEP_BUG("OpenSSL refused to compute a SHA-256.");
}

void Sha256::Free::operator()(evp_md_ctx_st* context) const { EVP_MD_CTX_free(context); }

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  must(context_ != nullptr);
  begin();
}
Sha256::~Sha256() = default;

void Sha256::begin() { must(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr)); }

void Sha256::update(std::span<const std::byte> bytes) {
  must(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()));
}

Sha256Text Sha256::finish() {
  std::array<unsigned char, 32> digest{};
  must(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr));
  begin();
  constexpr char kDigits[] = "0123456789abcdef";
  Sha256Text text;
  text.reserve(2 * digest.size());
  for (const unsigned char byte : digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

Sha256Text sha256_of(std::span<const std::byte> bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.finish();
}

Sha256Text sha256_of(std::string_view text) { return sha256_of(std::as_bytes(std::span(text))); }

bool is_sha256(std::string_view text) {
  return text.size() == 64 && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

}  // namespace halfstep::files
