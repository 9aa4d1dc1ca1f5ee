// `halfstep launch`: one program as several ranks on this machine.
#include <fcntl.h>
#include <halfstep/error.h>
#include <halfstep/printable.h>
#include <halfstep/ranks.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <optional>
#include <thread>

#include "cli/commands.h"

extern char** environ;

namespace halfstep::cli {
namespace {

using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

struct LaunchRequest {
  int ranks = 0;
  int restarts = 0;
  std::string listen = "127.0.0.1", logs;
  std::vector<std::string> command;
};

/// Ranks that are left after one has failed end by themselves, naming it; those that do not are ended.
constexpr std::chrono::seconds kGrace{10};

/// How a process ended.
struct Ending {
  int code = 0, signal = 0;

  explicit Ending(int status)
      : code(WIFEXITED(status) ? WEXITSTATUS(status) : 0),
        signal(WIFSIGNALED(status) ? WTERMSIG(status) : 0) {}
  int exit_code() const { return signal != 0 ? kSignalled + signal : code; }
  /// Ends that all ranks come to together, each in its own time: rank 0 may still be saving.
  bool orderly(bool asked_to_stop) const {
    if (signal != 0) return asked_to_stop && signal != SIGKILL;
    return code == kDone || code == kDiverged || code == kOutOfTime || (asked_to_stop && code > kSignalled);
  }
  std::string text() const {
    if (signal != 0) return detail::concat("killed by signal ", signal, " (SIG", sigabbrev_np(signal), ")");
    return detail::concat("ended with code ", code);
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

/// All ranks of one attempt.
class Attempt {
 public:
  Attempt(const LaunchRequest& request, const fs::path& logs, int number, Signals& signals)
      : request_(request), signals_(signals), meeting_(request.listen) {
    for (int rank = 0; rank < request.ranks; ++rank) start(rank, logs, number);
  }

  /// Waits for all; the first failure, if there is one.
  std::optional<std::pair<int, Ending>> run() {
    while (!running_.empty()) {
      for (const int signal : signals_.wait(std::chrono::milliseconds(200))) {
        if (signal == SIGCHLD) continue;
        asked_to_stop_ = true;
        for (const auto& [pid, rank] : running_) kill(pid, signal);
      }
      int status = 0;
      for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) ended(pid, Ending(status));
      if (kill_at_ && Clock::now() > *kill_at_)
        for (const auto& [pid, rank] : running_) kill(pid, SIGKILL);
    }
    return failure_;
  }

  bool asked_to_stop() const { return asked_to_stop_; }
  /// Of rank 0, where nothing failed.
  int exit_code() const { return exit_code_; }

 private:
  void ended(pid_t pid, const Ending& ending) {
    const auto found = running_.find(pid);
    if (found == running_.end()) return;
    const int rank = found->second;
    running_.erase(found);
    if (rank == 0) exit_code_ = ending.exit_code();
    if (ending.orderly(asked_to_stop_) || failure_) return;
    failure_.emplace(rank, ending);
    meeting_.announce_lost(rank, ending.text());
    kill_at_ = Clock::now() + kGrace;
  }

  void start(int rank, const fs::path& logs, int number) {
    std::map<std::string, std::string> variables{{"RANK", std::to_string(rank)},
                                                 {"LOCAL_RANK", std::to_string(rank)},
                                                 {"WORLD_SIZE", std::to_string(request_.ranks)},
                                                 {"LOCAL_WORLD_SIZE", std::to_string(request_.ranks)},
                                                 {"MASTER_ADDR", request_.listen},
                                                 {"MASTER_PORT", std::to_string(meeting_.port())},
                                                 {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                 {"TORCHELASTIC_RESTART_COUNT", std::to_string(number)}};
    // As many threads as the machine has, shared; LibTorch would start that many in each rank.
    if (getenv("OMP_NUM_THREADS") == nullptr)
      variables["OMP_NUM_THREADS"] = std::to_string(
          std::max(1u, std::thread::hardware_concurrency() / static_cast<unsigned>(request_.ranks)));
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
      dprintf(STDERR_FILENO, "halfstep: cannot start %s: %s\n", words[0], why);
      _exit(127);
    }
    if (log >= 0) close(log);
    running_.emplace(pid, rank);
  }

  const LaunchRequest& request_;
  Signals& signals_;
  MeetingPlace meeting_;
  std::map<pid_t, int> running_;
  std::optional<std::pair<int, Ending>> failure_;
  std::optional<Clock::time_point> kill_at_;
  bool asked_to_stop_ = false;
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

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "localhost" || address == "::1";
}

void launch(const LaunchRequest& request) {
  if (!is_loopback(request.listen))
    std::cerr << "halfstep: ranks listen on " << request.listen
              << ", unencrypted: whoever reaches this address can join. Use a network that you trust.\n";
  Logs logs(request.logs);
  Signals signals;
  for (int attempt = 0;; ++attempt) {
    Attempt ranks(request, logs.path(), attempt, signals);
    const auto failure = ranks.run();
    if (!failure) throw ExitWith(ranks.exit_code(), "");
    const auto& [rank, ending] = *failure;
    std::cerr << "halfstep: rank " << rank << " of " << request.ranks << ": " << ending.text() << ".\n";
    if (rank > 0) {
      const fs::path log = logs.path() / detail::concat("rank-", rank, ".log");
      show_end_of(log);
      std::cerr << "halfstep: all it wrote is in " << log.string() << "\n";
    }
    logs.keep();
    if (attempt == request.restarts || ranks.asked_to_stop()) throw ExitWith(ending.exit_code(), "");
    std::cerr << "halfstep: restart " << attempt + 1 << " of " << request.restarts << "\n";
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
  CLI::App* const command =
      program.add_subcommand("launch", "Runs a command as several ranks on this machine");
  auto request = std::make_shared<LaunchRequest>();
  command->add_option("-n,--ranks", request->ranks, "How many")
      ->required()
      ->check(CLI::Range(1, 1024))
      ->type_name("N");
  command->add_option("--restarts", request->restarts, "After a failure, all start again, so often")
      ->check(CLI::Range(0, 1'000'000))
      ->type_name("N");
  command->add_option("--logs", request->logs, "What ranks from 1 on write goes here")->type_name("DIR");
  command->add_option("--listen", request->listen, "Address of this host; 127.0.0.1")->type_name("ADDRESS");
  command->footer(
      "Then the command: one of halfstep's, as in 'halfstep launch -n 2 train --preset tiny',\n"
      "or another program: 'halfstep launch -n 2 -- ./program'.");
  command->callback([request, words = std::move(words), &program]() mutable {
    if (words.empty())
      throw ExitWith(kUsage, "launch: which command? As in 'halfstep launch -n 2 train --preset tiny'.");
    const auto ours =
        program.get_subcommands([&](const CLI::App* each) { return each->get_name() == words.front(); });
    if (!ours.empty()) words.insert(words.begin(), "/proc/self/exe");
    request->command = words;
    launch(*request);
  });
}

}  // namespace halfstep::cli
