// The launchers of one run, one on each host, and what they tell one another where their ranks meet.
#pragma once

#include <halfstep/ranks.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace halfstep::cli {

/// Ranks that are left after one has failed end by themselves, naming it; those that do not are ended.
inline constexpr std::chrono::seconds kGrace{10};

struct HostsRequest {
  std::vector<std::string> addresses{"127.0.0.1"};  ///< of each host; ranks meet at the first
  std::optional<int> number{};         ///< which of them this is; not given: whose address it has
  uint16_t port = 0;                   ///< 0: one that is free, which other hosts cannot know
  std::chrono::seconds patience{300};  ///< for hosts that are not there
};

/// The first host's launcher holds the meeting place and counts attempts. In each attempt all launchers sign
/// in before ranks are started, and all have ended their ranks before one ends.
class Hosts {
 public:
  /// While others are waited for, `pause` waits a little; a signal that arrived ends it all.
  using Pause = std::function<std::optional<int>()>;
  Hosts(HostsRequest request, int ranks_per_host, Pause pause);

  int count() const { return static_cast<int>(request_.addresses.size()); }
  int number() const { return number_; }
  const std::string& meeting_address() const { return request_.addresses.front(); }
  uint16_t meeting_port() const { return place_->port(); }
  int first_rank() const { return number_ * ranks_per_host_; }
  int rank_count() const { return count() * ranks_per_host_; }
  /// " on host 1 (10.0.0.2)"; nothing if there is one host.
  std::string where(int rank) const;

  /// Waits until all hosts are there; the number of the attempt. ExitWith, which names those that are not,
  /// after the time that was asked for.
  int begin_attempt();

  /// Of this attempt. The first announcement counts, of whatever host.
  LostRank announce_lost(int rank, const std::string& why);
  std::optional<LostRank> lost();
  std::vector<int> unanswering();
  /// Whether a rank has met the others, or is about to: it then hears of a loss by itself. So it does where
  /// nobody can be asked.
  bool has_joined(int rank);
  /// A signal that a launcher passes on to all ranks.
  void announce_stop(int signal);
  void announce_end(int rank);
  std::optional<int> stop_signal();
  /// Whether the ranks of all hosts have ended, as those of this one have.
  bool all_ended();

  /// Nothing follows: the first host's launcher waits for the others to know.
  void finish(const std::string& why);

 private:
  std::string host_text(int host) const;
  std::string key(const std::string& name) const;
  std::string key(const char* name, int host) const { return key(name + std::to_string(host)); }
  /// Whether there is a new attempt and this launcher is in it.
  bool sign_in(MeetingPlace& place);
  std::vector<int> hosts_without(const char* name) const;
  /// Nothing follows: as finish(), without a word to the others.
  void leave();
  /// Ends this launcher where they differ; false if the launcher that holds the meeting place is gone.
  bool has_same_commands();
  /// What `function` answers; nothing, and no meeting place, if the launcher that holds it is gone.
  template <typename Function>
  auto asked(Function function) -> std::optional<decltype(function(std::declval<MeetingPlace&>()))>;

  HostsRequest request_;
  int ranks_per_host_, number_;
  Pause pause_;
  std::string me_;       ///< differs between launchers, also of one host one after the other
  std::string started_;  ///< what must be the same on all hosts
  std::optional<MeetingPlace> place_;
  int attempt_ = -1;
};

}  // namespace halfstep::cli
