#include "cli/launch_hosts.h"

#include <unistd.h>

#include <random>
#include <thread>

#include "cli/commands.h"

namespace halfstep::cli {
namespace {

using Clock = std::chrono::steady_clock;

// Notes of an attempt, each once: "begun" by the first host, "host/K" when K has signed in, "stop" with a
// signal, "ended/K" when K's ranks have, "knows/K" when K's launcher needs no more answers. "over" is of all
// attempts.
constexpr const char *kBegun = "begun", *kHost = "host/", *kStop = "stop", *kEnded = "ended/",
                     *kKnows = "knows/", *kOver = "halfstep/over";

std::string list_text(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& each : words) text += (text.empty() ? "" : ",") + each;
  return text;
}

int own_number(const HostsRequest& request) {
  const auto& addresses = request.addresses;
  if (request.number) {
    if (*request.number < static_cast<int>(addresses.size())) return *request.number;
    throw ExitWith(kUsage, detail::concat("launch: --host-number is ", *request.number, " of ",
                                          addresses.size(), " hosts; they are counted from 0."));
  }
  if (addresses.size() == 1) return 0;
  std::vector<int> own;
  for (int host = 0; host < static_cast<int>(addresses.size()); ++host)
    if (MeetingPlace::is_own(addresses[host])) own.push_back(host);
  if (own.size() == 1) return own.front();
  throw ExitWith(kUsage, detail::concat("launch: of the addresses ", list_text(addresses), " ",
                                        own.empty() ? "none is" : "several are",
                                        " this host's. Say which one it is by --host-number, from 0."));
}

}  // namespace

Hosts::Hosts(HostsRequest request, int ranks_per_host, Pause pause)
    : request_(std::move(request)),
      ranks_per_host_(ranks_per_host),
      number_(own_number(request_)),
      pause_(std::move(pause)),
      me_(detail::concat(getpid(), "-", std::random_device{}())),
      started_(detail::concat("-n ", ranks_per_host, " --hosts ", list_text(request_.addresses))) {
  if (number_ > 0) return;
  if (count() > 1 && MeetingPlace::is_loopback(meeting_address()))
    for (const std::string& other : request_.addresses)
      if (!MeetingPlace::is_loopback(other))
        throw ExitWith(kUsage,
                       detail::concat("launch: ", meeting_address(), " is a loopback address here, which ",
                                      other, " cannot reach. Give the address that other hosts use."));
  place_.emplace(meeting_address(), request_.port);
}

std::string Hosts::host_text(int host) const {
  return detail::concat("host ", host, " (", request_.addresses[static_cast<std::size_t>(host)], ")");
}

std::string Hosts::where(int rank) const {
  return count() == 1 ? "" : " on " + host_text(rank / ranks_per_host_);
}

std::string Hosts::key(const std::string& name) const {
  return detail::concat("halfstep/", attempt_, "/", name);
}

template <typename Function>
auto Hosts::asked(Function function) -> std::optional<decltype(function(std::declval<MeetingPlace&>()))> {
  if (!place_) return std::nullopt;
  try {
    return function(*place_);
  } catch (const RankError&) {
    // The next one that is held there begins with attempt 0.
    place_.reset();
    attempt_ = -1;
    return std::nullopt;
  }
}

std::vector<int> Hosts::hosts_without(const char* name) const {
  std::vector<int> without;
  for (int host = 0; host < count(); ++host)
    if (!place_->note(key(name, host))) without.push_back(host);
  return without;
}

bool Hosts::sign_in(MeetingPlace& place) {
  if (number_ == 0) {
    ++attempt_;
    place.leave_note(key(kBegun), "yes");
  } else {
    const int before = attempt_++;
    if (!place.note(key(kBegun))) {
      attempt_ = before;
      return false;
    }
  }
  const std::string mine = me_ + " " + started_;
  if (place.leave_note(key(kHost, number_), mine) == mine) return true;
  // A launcher of this host was there before, and nobody else may have noticed that it is gone.
  place.announce_lost(first_rank(), "its launcher is gone", attempt_);
  return false;
}

bool Hosts::has_same_commands() {
  const auto other = asked([&](MeetingPlace& place) {
    std::string found;
    for (int host = 0; host < count() && found.empty(); ++host) {
      const std::string note = place.note(key(kHost, host)).value_or("");
      const std::string there = note.substr(note.find(' ') + 1);
      if (there != started_)
        found = detail::concat("launch: ", host_text(host), " was started with '", there,
                               "', this one with '", started_, "'. Use the same on all hosts.");
    }
    return found;
  });
  if (!other || other->empty()) return other.has_value();
  leave();  // when all others have seen it, too
  throw ExitWith(kUsage, *other);
}

int Hosts::begin_attempt() {
  const auto deadline = Clock::now() + request_.patience;
  bool is_in = false;
  std::vector<int> missing;
  do {
    if (!place_) place_ = MeetingPlace::find(meeting_address(), request_.port);
    missing = asked([&](MeetingPlace& place) -> std::vector<int> {
                if (is_in && place.lost(attempt_)) is_in = false;  // one came, and left before all were there
                if (!is_in) is_in = sign_in(place);
                if (const auto over = place.note(kOver)) throw ExitWith(kRankLost, *over);
                return is_in ? hosts_without(kHost) : std::vector{0};
              }).value_or(std::vector{0});
    if (missing.empty()) {
      if (has_same_commands()) return attempt_;
      missing = {0};
    }
    if (!place_) is_in = false;
    if (const auto signal = pause_()) {
      finish(detail::concat("launch: the launcher on ", host_text(number_), " was stopped."));
      throw ExitWith(kSignalled + *signal, "");
    }
  } while (Clock::now() < deadline);
  std::string why = "launch: ";
  for (const int host : missing) why += host_text(host) + (host == missing.back() ? "" : ", ");
  why += detail::concat(missing.size() == 1 ? " is" : " are", " not there after ", request_.patience.count(),
                        " s. ");
  why += place_
             ? "Was the same command started there? --host-wait sets how long to wait."
             : detail::concat("No ranks' meeting place answers at ", meeting_address(), ":", request_.port,
                              ". Was the same command started there, and is the port open, and not another "
                              "program's?");
  finish(why);
  throw ExitWith(kRankLost, why);
}

LostRank Hosts::announce_lost(int rank, const std::string& why) {
  return asked([&](MeetingPlace& place) { return place.announce_lost(rank, why, attempt_); })
      .value_or(LostRank{.rank = rank, .why = why});
}

std::optional<LostRank> Hosts::lost() {
  return asked([&](MeetingPlace& place) { return place.lost(attempt_); })
      .value_or(LostRank{.rank = 0, .why = "its launcher is gone or does not answer"});
}

std::vector<int> Hosts::unanswering() {
  return asked([&](MeetingPlace& place) { return place.unanswering(attempt_); }).value_or(std::vector<int>{});
}

bool Hosts::has_joined(int rank) {
  return asked([&](MeetingPlace& place) { return place.has_joined(rank, attempt_); }).value_or(true);
}

void Hosts::announce_end(int rank) {
  asked([&](MeetingPlace& place) {
    place.announce_end(rank, attempt_);
    return true;
  });
}

void Hosts::announce_stop(int signal) {
  asked([&](MeetingPlace& place) { return place.leave_note(key(kStop), std::to_string(signal)); });
}

std::optional<int> Hosts::stop_signal() {
  const auto signal = asked([&](MeetingPlace& place) { return place.note(key(kStop)); });
  return signal && *signal ? std::optional(std::atoi((*signal)->c_str())) : std::nullopt;
}

bool Hosts::all_ended() {
  return asked([&](MeetingPlace& place) {
           place.leave_note(key(kEnded, number_), "yes");
           return hosts_without(kEnded).empty();
         })
      .value_or(false);
}

void Hosts::finish(const std::string& why) {
  if (number_ == 0) asked([&](MeetingPlace& place) { return place.leave_note(kOver, why); });
  leave();
}

void Hosts::leave() {
  constexpr std::chrono::seconds kMargin{5};
  const auto deadline = Clock::now() + kGrace + kMargin;
  asked([&](MeetingPlace& place) {
    place.leave_note(key(kKnows, number_), "yes");
    if (number_ > 0) return true;
    const auto is_awaited = [&](int host) {
      return place.note(key(kHost, host)) && !place.note(key(kKnows, host));
    };
    for (int host = 1; host < count(); ++host)
      while (is_awaited(host) && Clock::now() < deadline)
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return true;
  });
}

}  // namespace halfstep::cli
