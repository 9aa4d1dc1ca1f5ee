// `halfstep launch`: one program as several ranks, on this machine or on several.
#include <fcntl.h>
#include <halfstep/error.h>
#include <halfstep/printable.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <optional>
#include <sstream>
#include <thread>

#include "cli/commands.h"
#include "cli/launch_hosts.h"
#include "cli/stop_signals.h"

extern char** environ;

namespace halfstep::cli {
namespace {

using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

struct LaunchRequest {
  int ranks = 0;  // of this host
  int restarts = 0;
  std::string logs;
  HostsRequest hosts;
  std::vector<std::string> command;
  bool is_ours = false;  // a command of halfstep's
};

constexpr std::string_view kEndedWithCode = "ended with code ";

/// How a process ended.
struct Ending {
  int code = 0, signal = 0;

  explicit Ending(int status)
      : code(WIFEXITED(status) ? WEXITSTATUS(status) : 0),
        signal(WIFSIGNALED(status) ? WTERMSIG(status) : 0) {}
  int exit_code() const { return signal != 0 ? kSignalled + signal : code; }
  /// Ends that all ranks come to together, each in its own time: rank 0 may still be saving.
  /// Codes above 0 mean what they mean in a command of halfstep's only.
  bool orderly(bool asked_to_stop, bool is_ours) const {
    // By what was passed on, and not by a crash beside it.
    if (signal != 0)
      return asked_to_stop &&
             (signal == SIGINT || signal == SIGTERM || signal == SIGHUP || signal == SIGUSR1);
    return code == kDone || (is_ours && (code == kDiverged || code == kOutOfTime)) ||
           (asked_to_stop && code >= kSignalled);
  }
  std::string text() const {
    if (signal != 0) return detail::concat("killed by signal ", signal, " (SIG", sigabbrev_np(signal), ")");
    return detail::concat(kEndedWithCode, code);
  }
};

/// Signals of a terminal or a queue, as a file that can be waited for together with the ends of processes.
class Signals {
 public:
  Signals() {
    sigset_t wanted;
    sigemptyset(&wanted);
    for (const int each : {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGCHLD}) sigaddset(&wanted, each);
    sigprocmask(SIG_BLOCK, &wanted, &before_);
    fd_ = signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK);
  }
  ~Signals() {
    close(fd_);
    sigprocmask(SIG_SETMASK, &before_, nullptr);
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  /// What children start with.
  const sigset_t& before() const { return before_; }

  std::vector<int> wait(std::chrono::milliseconds most) {
    pollfd waiting{fd_, POLLIN, 0};
    poll(&waiting, 1, static_cast<int>(most.count()));
    std::vector<int> arrived;
    for (signalfd_siginfo one{}; read(fd_, &one, sizeof one) == sizeof one;)
      arrived.push_back(static_cast<int>(one.ssi_signo));
    return arrived;
  }

 private:
  sigset_t before_{};
  int fd_ = -1;
};

/// Of this process, and of no other: a restarted run knows by it that the command is the same.
const std::string& launch_name() {
  static const std::string name =
      detail::concat(getpid(), "-", std::chrono::system_clock::now().time_since_epoch().count());
  return name;
}

/// The rank because of which an attempt ended.
struct Failure {
  LostRank lost;
  int exit_code;
};

/// Whether a process group has a process that has not ended. One that has, and that nobody asks about, stays
/// in its group.
bool has_live_members(pid_t group) {
  if (kill(-group, 0) != 0) return false;
  std::error_code unknown;
  for (const auto& entry : fs::directory_iterator("/proc", unknown)) {
    std::ifstream file(entry.path() / "stat");
    std::string line;
    if (!std::getline(file, line)) continue;
    // "NUMBER (NAME) STATE PARENT GROUP ...", and a name may have anything in it.
    std::istringstream rest(line.substr(std::min(line.size(), line.rfind(')') + 1)));
    char state = 0;
    pid_t parent = 0, of_group = 0;
    if (rest >> state >> parent >> of_group && of_group == group && state != 'Z') return true;
  }
  return false;
}

/// All ranks of one attempt, of which this host's are started.
class Attempt {
 public:
  Attempt(const LaunchRequest& request, Hosts& hosts, const fs::path& logs, int number, Signals& signals)
      : request_(request), signals_(signals), hosts_(hosts) {
    for (int local = 0; local < request.ranks; ++local) start(local, logs, number);
  }

  /// Waits for all; the first failure, if there is one.
  std::optional<Failure> run() {
    do {
      for (const int signal : signals_.wait(std::chrono::milliseconds(200))) {
        if (signal == SIGCHLD) continue;
        hosts_.announce_stop(signal);
        pass_on(signal);
      }
      int status = 0;
      for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) ended(pid, Ending(status));
      learn_of_stop();
      learn_of_failure();
      if (kill_at_ && Clock::now() > *kill_at_)
        for (const pid_t pid : started_) signal_group(pid, SIGKILL);
    } while (!running_.empty() || has_members_left() || (!failure_ && !hosts_.all_ended()));
    return failure_;
  }

  bool asked_to_stop() const { return asked_to_stop_ != 0; }
  /// Of this host's first rank, where nothing failed.
  int exit_code() const { return exit_code_; }
  /// Of the ranks that were left when one was lost, those that had nothing to say about it; "" where none.
  std::string silent_text() const {
    std::string text;
    if (done_ > 0) text += detail::concat(done_, " had ended without an error");
    if (unmet_ > 0)
      text += detail::concat(text.empty() ? "" : ", ", unmet_,
                             " had not joined the others yet, and could be ended at once");
    return text.empty() ? "" : detail::concat("of ", request_.ranks, " ranks ", text, ".");
  }

 private:
  void pass_on(int signal) {
    asked_to_stop_ = signal;
    for (const pid_t pid : started_) signal_group(pid, signal);
  }

  /// A rank's process and those that it has started: a shell passes no signal on.
  void signal_group(pid_t pid, int signal) const {
    if (kill(-pid, signal) != 0 && running_.contains(pid)) kill(pid, signal);  // it has no group yet
  }

  /// Whether processes that a rank has started are still at work after it was asked to stop, or failed.
  bool has_members_left() const {
    if (!asked_to_stop() && !failure_) return false;
    return std::any_of(started_.begin(), started_.end(),
                       [this](pid_t pid) { return !running_.contains(pid) && has_live_members(pid); });
  }

  void learn_of_stop() {
    if (hosts_.count() == 1 || asked_to_stop()) return;
    if (const auto signal = hosts_.stop_signal()) pass_on(*signal);
  }

  void learn_of_failure() {
    if (hosts_.count() == 1 || failure_) return;
    if (const auto lost = hosts_.lost()) failed(*lost, kRankLost);
  }

  void ended(pid_t pid, const Ending& ending) {
    const auto found = running_.find(pid);
    if (found == running_.end()) return;
    const int rank = found->second;
    running_.erase(found);
    if (!has_live_members(pid)) std::erase(started_, pid);
    learn_of_stop();  // ranks may have heard of it from one another, and ended
    if (rank == hosts_.first_rank()) exit_code_ = ending.exit_code();
    if (exit_code_ == kSignalled) exit_code_ += asked_to_stop_;  // it had no signal of its own
    if (ending.orderly(asked_to_stop(), request_.is_ours)) {
      ++done_;
      return hosts_.announce_end(rank);
    }
    if (failure_) return;
    LostRank lost{.rank = rank, .why = ending.text()};
    // One that ends because of another is not the one to name: that one hangs, or was on a host whose
    // launcher is gone too.
    if (ending.code == kRankLost)
      if (const auto others = hosts_.unanswering(); !others.empty())
        lost = {.rank = others.front(), .why = "gone, or does not answer"};
    const LostRank first = hosts_.announce_lost(lost.rank, lost.why);
    failed(first, first.rank == rank ? ending.exit_code() : kRankLost);
  }

  void failed(LostRank lost, int exit_code) {
    failure_.emplace(std::move(lost), exit_code);
    kill_at_ = Clock::now() + kGrace;
    // Where one has ended by itself the others probably end in the same way, each with words of its own.
    if (!failure_->lost.why.starts_with(kEndedWithCode)) end_unmet();
  }

  /// Ranks that have met the others hear of a loss by themselves, and say so. These would hear of it when
  /// they have read LibTorch and their settings: seconds later on a busy machine.
  void end_unmet() {
    std::vector<pid_t> unmet;
    for (const auto& [pid, rank] : running_)
      if (!hosts_.has_joined(rank)) unmet.push_back(pid);
    // Another program may have a way of its own to meet, of which nothing is seen here.
    const bool they_meet =
        request_.is_ours || unmet.size() < running_.size() || hosts_.has_joined(failure_->lost.rank);
    if (!they_meet) return;
    unmet_ = unmet.size();
    for (const pid_t pid : unmet) signal_group(pid, SIGKILL);
  }

  void start(int local, const fs::path& logs, int number) {
    const int rank = hosts_.first_rank() + local;
    std::map<std::string, std::string> variables{{"RANK", std::to_string(rank)},
                                                 {"LOCAL_RANK", std::to_string(local)},
                                                 {"WORLD_SIZE", std::to_string(hosts_.rank_count())},
                                                 {"LOCAL_WORLD_SIZE", std::to_string(request_.ranks)},
                                                 {"GROUP_RANK", std::to_string(hosts_.number())},
                                                 {"MASTER_ADDR", hosts_.meeting_address()},
                                                 {"MASTER_PORT", std::to_string(hosts_.meeting_port())},
                                                 {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                 {"TORCHELASTIC_RESTART_COUNT", std::to_string(number)},
                                                 {"HALFSTEP_LAUNCH", launch_name()}};
    // As many threads as the machine has, shared; LibTorch would start that many in each rank.
    if (getenv("OMP_NUM_THREADS") == nullptr)
      variables["OMP_NUM_THREADS"] = std::to_string(
          std::max(1u, std::thread::hardware_concurrency() / static_cast<unsigned>(request_.ranks)));
    // Set by each for itself, LibTorch would have to be read twice.
    if (!says_how_threads_wait()) variables["GOMP_SPINCOUNT"] = kBriefSpins;
    std::vector<std::string> environment;
    for (char** each = environ; *each != nullptr; ++each)
      if (!variables.contains(std::string(*each, strcspn(*each, "=")))) environment.emplace_back(*each);
    for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);
    const auto pointers_to = [](std::vector<std::string>& texts) {
      std::vector<char*> pointers;
      for (std::string& text : texts) pointers.push_back(text.data());
      pointers.push_back(nullptr);
      return pointers;
    };
    std::vector<std::string> command = request_.command;
    const auto words = pointers_to(command), settings = pointers_to(environment);
    const int log = rank == 0 ? -1
                              : open((logs / detail::concat("rank-", rank, ".log")).c_str(),
                                     O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (rank > 0 && log < 0)
      throw ExitWith(kFiles,
                     detail::concat("cannot write into ", logs.string(), ": ", std::strerror(errno), "."));

    const pid_t parent = getpid(), pid = fork();
    if (pid < 0)
      throw ExitWith(kFailed, detail::concat("cannot start rank ", rank, ": ", std::strerror(errno), "."));
    if (pid == 0) {
      // A group of its own: Ctrl-C reaches us, and we pass it on once. And none outlives us.
      setpgid(0, 0);
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(kFailed);
      if (log >= 0) dup2(log, STDOUT_FILENO), dup2(log, STDERR_FILENO);
      sigprocmask(SIG_SETMASK, &signals_.before(), nullptr);
      execvpe(words[0], words.data(), settings.data());
      const char* why = strerrordesc_np(errno);
      const bool is_word = std::strchr(words[0], '/') == nullptr;
      dprintf(STDERR_FILENO, "halfstep: cannot start %s: %s%s\n", words[0], why,
              is_word ? ". It is not a halfstep command either: 'halfstep --help' lists those" : "");
      _exit(127);
    }
    if (log >= 0) close(log);
    running_.emplace(pid, rank);
    started_.push_back(pid);
  }

  const LaunchRequest& request_;
  Signals& signals_;
  Hosts& hosts_;
  std::map<pid_t, int> running_;
  std::vector<pid_t> started_;  // of which something may still be at work
  std::optional<Failure> failure_;
  std::optional<Clock::time_point> kill_at_;
  int asked_to_stop_ = 0;  // by which signal
  std::size_t done_ = 0, unmet_ = 0;
  int exit_code_ = kDone;
};

/// The last lines that a rank wrote, for whoever has no time to look.
void show_end_of(const fs::path& log) {
  std::ifstream in(log);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) {
    lines.push_back(line);
    if (lines.size() > 5) lines.erase(lines.begin());
  }
  for (const std::string& line : lines) std::cerr << "  | " << printable(line, Unprintable::Escaped) << "\n";
}

/// Where ranks write; without a name, a folder that is removed after a run that ended well.
class Logs {
 public:
  explicit Logs(const std::string& name) : is_temporary_(name.empty()), path_(name) {
    if (is_temporary_) {
      std::string made = (fs::temp_directory_path() / "halfstep-launch-XXXXXX").string();
      if (mkdtemp(made.data()) == nullptr)
        throw ExitWith(kFiles, detail::concat("cannot make a folder for logs: ", std::strerror(errno), "."));
      path_ = made;
    }
    std::error_code refused;
    fs::create_directories(path_, refused);
    if (refused)
      throw ExitWith(kFiles, detail::concat("cannot make ", path_.string(), ": ", refused.message(), "."));
  }
  ~Logs() {
    std::error_code ignored;
    if (is_temporary_ && !kept_) fs::remove_all(path_, ignored);
  }
  Logs(const Logs&) = delete;
  Logs& operator=(const Logs&) = delete;
  const fs::path& path() const { return path_; }
  void keep() { kept_ = true; }

 private:
  bool is_temporary_, kept_ = false;
  fs::path path_;
};

/// Between attempts, when no rank is there to pass a signal on to.
std::optional<int> signal_within(Signals& signals, std::chrono::milliseconds most) {
  for (const int signal : signals.wait(most))
    if (signal != SIGCHLD) return signal;
  return std::nullopt;
}

void warn_of_open_ports(const std::vector<std::string>& addresses) {
  for (const std::string& address : addresses)
    if (!MeetingPlace::is_loopback(address)) {
      std::cerr
          << "halfstep: ranks listen on " << address
          << ", unencrypted: anyone who can reach this address can join. Use a network that you trust.\n";
      return;
    }
}

void launch(const LaunchRequest& request) {
  Logs logs(request.logs);
  Signals signals;
  Hosts hosts(request.hosts, request.ranks,
              [&] { return signal_within(signals, std::chrono::milliseconds(100)); });
  warn_of_open_ports(request.hosts.addresses);
  const auto end = [&](int code, const std::string& why) {
    hosts.finish(why);
    throw ExitWith(code, "");
  };
  for (int restart = 0;; ++restart) {
    Attempt ranks(request, hosts, logs.path(), hosts.begin_attempt(), signals);
    const auto failure = ranks.run();
    if (!failure) end(ranks.exit_code(), "launch: the run is done.");
    const auto& [lost, exit_code] = *failure;
    const std::string what = detail::concat("rank ", lost.rank, " of ", hosts.rank_count(),
                                            hosts.where(lost.rank), ": ", lost.why, ".");
    std::cerr << "halfstep: " << what << "\n";
    const fs::path log = logs.path() / detail::concat("rank-", lost.rank, ".log");
    if (fs::exists(log)) {
      show_end_of(log);
      std::cerr << "halfstep: its full output is in " << log.string() << "\n";
    }
    if (const std::string silent = ranks.silent_text(); !silent.empty())
      std::cerr << "halfstep: " << silent << "\n";
    logs.keep();
    if (restart == request.restarts || ranks.asked_to_stop()) end(exit_code, what);
    // By what all hosts have read, so that all of them end.
    if (request.is_ours && lost.why == detail::concat(kEndedWithCode, int{kUsage})) {
      std::cerr << "halfstep: not restarted: the same command would be refused again\n";
      end(exit_code, what);
    }
    std::cerr << "halfstep: restart " << restart + 1 << " of " << request.restarts << "\n";
  }
}

}  // namespace

std::vector<std::string> take_launched_command(int& argc, char** argv) {
  if (argc < 2 || std::string_view(argv[1]) != "launch") return {};
  int at = 2;
  while (at < argc && argv[at][0] == '-' && std::string_view(argv[at]) != "--") {
    const std::string_view option = argv[at];
    const bool has_value = option != "-h" && option != "--help" && option.find('=') == option.npos &&
                           (option.starts_with("--") || option.size() == 2);
    at += has_value ? 2 : 1;
  }
  at = std::min(at, argc);
  const int begin = at < argc && std::string_view(argv[at]) == "--" ? at + 1 : at;
  std::vector<std::string> words(argv + begin, argv + argc);
  argc = at;
  return words;
}

void add_launch(CLI::App& program, std::vector<std::string> words) {
  CLI::App* const command = program.add_subcommand("launch", "Runs a command as several ranks");
  auto request = std::make_shared<LaunchRequest>();
  HostsRequest& hosts = request->hosts;
  command->add_option("-n,--ranks", request->ranks, "How many, on each host")
      ->required()
      ->check(CLI::Range(1, 1024))
      ->type_name("N");
  command->add_option("--restarts", request->restarts, "How often to restart all after a failure")
      ->check(CLI::Range(0, 1'000'000))
      ->type_name("N");
  command->add_option("--logs", request->logs, "Folder for output of ranks from 1 on")->type_name("DIR");
  auto listen = std::make_shared<std::string>();
  CLI::Option* const one =
      command->add_option("--listen", *listen, "Address of this host; 127.0.0.1")->type_name("ADDRESS");
  CLI::Option* const several =
      command->add_option("--hosts", hosts.addresses, "Addresses; start the command on each")
          ->delimiter(',')
          ->allow_extra_args(false)
          ->excludes(one)
          ->type_name("A,B");
  command->add_option("--host-number", hosts.number, "Which of --hosts this is, from 0 [by address]")
      ->needs(several)
      ->check(CLI::Range(0, 1 << 20))
      ->type_name("K");
  auto port = std::make_shared<uint16_t>(29500);  // as torchrun has it
  command->add_option("--port", *port, "Of the first host, where ranks meet [29500]")
      ->needs(several)
      ->check(CLI::Range(1, 65535))
      ->type_name("PORT");
  auto seconds = std::make_shared<int>(static_cast<int>(hosts.patience.count()));
  command->add_option("--host-wait", *seconds, "Seconds to wait for hosts that are not there [300]")
      ->needs(several)
      ->check(CLI::Range(1, 1'000'000))
      ->type_name("N");
  command->footer(
      "Then the command: one of halfstep's, 'halfstep launch -n 2 train --preset tiny',\n"
      "or another program: 'halfstep launch -n 2 -- ./program'. docs/scale.md has more.");
  command->callback([=, words = std::move(words), &program]() mutable {
    if (getenv("HALFSTEP_LAUNCH") != nullptr)
      throw ExitWith(kUsage,
                     "launch: this process was started by 'halfstep launch' itself, as rank " +
                         std::string(getenv("RANK") == nullptr ? "?" : getenv("RANK")) +
                         ". One launch starts all ranks; unset HALFSTEP_LAUNCH to start another run.");
    if (words.empty())
      throw ExitWith(kUsage, "launch: which command? As in 'halfstep launch -n 2 train --preset tiny'.");
    const auto ours =
        program.get_subcommands([&](const CLI::App* each) { return each->get_name() == words.front(); });
    request->is_ours = !ours.empty();
    if (request->is_ours) words.insert(words.begin(), "/proc/self/exe");
    request->command = words;
    if (several->count() > 0) request->hosts.port = *port;
    if (one->count() > 0) request->hosts.addresses = {*listen};
    request->hosts.patience = std::chrono::seconds(*seconds);
    launch(*request);
  });
}

}  // namespace halfstep::cli
