// Real processes as ranks: this program once more for each, with the name of what to do.
#pragma once

#include <halfstep/ranks.h>
#include <signal.h>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace halfstep::testing {

/// What a rank does; its text is what the test gets.
using RankCase = std::function<std::string(const Ranks&, const std::vector<std::string>& arguments)>;

/// By name; filled before main.
std::map<std::string, RankCase>& rank_cases();

struct RankCaseEntry {
  RankCaseEntry(const char* name, RankCase run) { rank_cases()[name] = std::move(run); }
};

#define HALFSTEP_RANK_CASE(name)                                                          \
  static std::string name(const Ranks& ranks, const std::vector<std::string>& arguments); \
  static const ::halfstep::testing::RankCaseEntry name##_entry(#name, name);              \
  static std::string name([[maybe_unused]] const Ranks& ranks,                            \
                          [[maybe_unused]] const std::vector<std::string>& arguments)

struct RankOutcome {
  int exit_code = -1;  ///< 0: the case returned; 3: it threw, and `text` says what
  int signal = 0;      ///< that ended it
  std::string text;
  double seconds = 0;  ///< from the start of all to the end of this one
};

/// Ranks under way. The destructor ends those that are left.
class RankProcesses {
 public:
  RankProcesses(int ranks, const std::string& case_name, const std::vector<std::string>& arguments = {},
                int timeout_ms = 20'000);
  ~RankProcesses();
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  void kill(int rank, int signal);
  /// Waits until a rank has written a line, and returns what all have written so far.
  std::string wait_for_text(int rank, const std::string& part);
  uint16_t port() const { return meeting_.port(); }
  MeetingPlace& meeting() { return meeting_; }
  /// Waits for all.
  std::vector<RankOutcome> outcomes();

 private:
  struct Process {
    pid_t pid = -1;
    int output = -1;  // what it says
    RankOutcome outcome{};
    bool ended = false;
  };
  void read_some(Process& process);

  MeetingPlace meeting_;
  std::vector<Process> processes_;
  std::chrono::steady_clock::time_point begun_;
};

/// The texts of all ranks; fails the test where one did not end well.
std::vector<std::string> texts_of_ranks(int ranks, const std::string& case_name,
                                        const std::vector<std::string>& arguments = {});

}  // namespace halfstep::testing
