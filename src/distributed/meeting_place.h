// Sockets and keys of the store where ranks meet.
#pragma once

#include <cstdint>
#include <string>

namespace halfstep::distributed {

/// Bound and listening; closed by whoever takes `fd` over.
struct Listener {
  int fd = -1;
  uint16_t port = 0;
};

/// `port` 0: one that is free. An Error says what the system refused.
Listener listen_on(const std::string& address, uint16_t port);

/// The address of this host from which `address` is reached: 127.0.0.1 for itself.
std::string address_towards(const std::string& address, uint16_t port);

/// Where a process that starts ranks says why the first of them is gone: "RANK WHY".
inline constexpr const char* kLostKey = "halfstep/lost";
/// Set by the first rank whose exchange fails: the others need not wait until they see it themselves.
inline constexpr const char* kFailedKey = "halfstep/failed";
/// Where a rank that sees the others fail signs in: the name, and its number.
inline constexpr const char* kSignedInKey = "halfstep/signed_in/";

}  // namespace halfstep::distributed
