#include "distributed/meeting_place.h"

#include <halfstep/error.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>

namespace halfstep::distributed {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

Addresses resolved(const std::string& address, uint16_t port, int kind) {
  addrinfo wanted{}, *found = nullptr;
  wanted.ai_family = AF_UNSPEC;
  wanted.ai_socktype = kind;
  const int refused = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &wanted, &found);
  HALFSTEP_CHECK(refused == 0, "Ranks: '", address, "' is not a host address: ", gai_strerror(refused), ".");
  return Addresses(found);
}

/// 0 of an address that has none.
uint16_t port_in(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port);
  if (address.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
  return 0;
}

uint16_t port_of(int fd) {
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size);
  return port_in(bound);
}

}  // namespace

Listener listen_on(const std::string& address, uint16_t port) {
  const Addresses found = resolved(address, port, SOCK_STREAM);
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int yes = 1;
  const bool listens = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0 &&
                       bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0;
  if (!listens) {
    const int code = errno;
    if (fd >= 0) close(fd);
    detail::throw_error(detail::concat("Ranks: cannot listen on ", address, ":", port, ": ",
                                       std::strerror(code),
                                       ". Is the port taken, or the address another host's?"));
  }
  return {.fd = fd, .port = port_of(fd)};
}

std::string address_towards(const std::string& address, uint16_t port) {
  const Addresses found = resolved(address, port, SOCK_DGRAM);
  const int fd = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage from{};
  socklen_t size = sizeof from;
  // Connecting a datagram socket sends nothing; it only asks which way it would go.
  const bool known = fd >= 0 && connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&from), &size) == 0;
  const int code = errno;
  if (fd >= 0) close(fd);
  HALFSTEP_CHECK(known, "Ranks: there is no route from this host to '", address, "': ", std::strerror(code),
                 ".");
  std::array<char, NI_MAXHOST> text{};
  getnameinfo(reinterpret_cast<sockaddr*>(&from), size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return text.data();
}

bool answers(const std::string& address, uint16_t port) {
  constexpr int kMilliseconds = 1000;
  const Addresses found = resolved(address, port, SOCK_STREAM);
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return false;
  bool connected = connect(fd, found->ai_addr, found->ai_addrlen) == 0;
  if (!connected && errno == EINPROGRESS) {
    pollfd waiting{fd, POLLOUT, 0};
    int refused = 0;
    socklen_t size = sizeof refused;
    connected = poll(&waiting, 1, kMilliseconds) == 1 &&
                getsockopt(fd, SOL_SOCKET, SO_ERROR, &refused, &size) == 0 && refused == 0;
  }
  close(fd);
  return connected;
}

void limit_answers(uint16_t port, std::chrono::milliseconds limit) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  timeval most{};
  most.tv_sec = seconds.count();
  most.tv_usec = std::chrono::duration_cast<std::chrono::microseconds>(limit - seconds).count();
  // LibTorch tells nobody the number of its socket.
  std::error_code unknown;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", unknown)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    sockaddr_storage peer{};
    socklen_t size = sizeof peer;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0 || port_in(peer) != port) continue;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
  }
}

bool is_own(const std::string& address) {
  const Addresses found = resolved(address, 0, SOCK_DGRAM);
  const int fd = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const bool own = fd >= 0 && bind(fd, found->ai_addr, found->ai_addrlen) == 0;
  if (fd >= 0) close(fd);
  return own;
}

bool is_loopback(const std::string& address) {
  const Addresses found = resolved(address, 0, SOCK_DGRAM);
  if (found->ai_family == AF_INET6)
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(found->ai_addr)->sin6_addr);
  const in_addr_t numeric = reinterpret_cast<const sockaddr_in*>(found->ai_addr)->sin_addr.s_addr;
  return ntohl(numeric) >> 24 == IN_LOOPBACKNET;
}

}  // namespace halfstep::distributed
