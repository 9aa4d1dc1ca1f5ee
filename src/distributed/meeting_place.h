// Sockets and keys of the store where ranks meet.
#pragma once

#include <chrono>
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

/// Whether somebody listens there.
bool answers(const std::string& address, uint16_t port);

/// Limits how long this process waits for an answer on any of its connections to that port. LibTorch's store
/// has no limit of its own: a holder that is frozen, or whose host is gone, keeps its connections open.
void limit_answers(uint16_t port, std::chrono::milliseconds limit);

/// Whether `address` is one of this host's.
bool is_own(const std::string& address);

/// Whether `address` leads to this host and is no other's way to it: 127.0.0.1, or a name for it.
bool is_loopback(const std::string& address);

/// Begins the name of every key of one attempt to run the ranks: those that were started again hear nothing
/// of what was before.
inline std::string attempt_prefix(const std::string& attempt) { return "halfstep/" + attempt; }

// Keys of an attempt.

/// Set by a rank that has come here and hears of a loss by itself: the name, and its number.
inline constexpr const char* kJoinedKey = "joined/";
/// Where a process that starts ranks says why the first of them is gone: "RANK WHY".
inline constexpr const char* kLostKey = "lost";
/// Where it says that a rank has ended, with nothing wrong: the name, and its number.
inline constexpr const char* kEndedKey = "rank_ended/";
/// Set by the first rank whose exchange fails: the others need not wait until they see it themselves.
inline constexpr const char* kFailedKey = "failed";
/// Where a rank that sees the others fail signs in: the name, and its number.
inline constexpr const char* kSignedInKey = "signed_in/";
/// Numbers of the ranks that did not sign in, with commas.
inline constexpr const char* kUnansweringKey = "unanswering";

}  // namespace halfstep::distributed
