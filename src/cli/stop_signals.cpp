#include "cli/stop_signals.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "cli/commands.h"

namespace halfstep::cli {
namespace {

constexpr std::array<int, 4> kSignals = {SIGINT, SIGTERM, SIGUSR1, SIGHUP};

std::atomic<bool> stop_requested = false;
std::atomic<int> first_signal = 0;
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free,
              "a signal handler may touch nothing else");

template <size_t size>
void say(const char (&message)[size]) {
  // Nobody can be told that standard error is gone.
  [[maybe_unused]] const auto written = write(STDERR_FILENO, message, size - 1);
}

void on_signal(int signal) {
  const int saved_errno = errno;
  if (!stop_requested.exchange(true)) {
    first_signal = signal;
    say("\nhalfstep: stopping after this step, then saving; Ctrl-C (once more) ends at once without "
        "saving\n");
  } else if (signal == SIGINT) {
    // A person insists. Supervisors send SIGTERM twice and mean the same by it as by one.
    say("\nhalfstep: ended at once, without saving\n");
    _exit(kUnsaved);
  }
  errno = saved_errno;
}

/// A mapped file that another process has cut short. The page is gone, and so is the step under way.
void on_bus_error(int) {
  say("\nhalfstep: a data file was cut short while it was read (SIGBUS); put it back, and the same command "
      "resumes from the last checkpoint\n");
  _exit(kFiles);
}

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) arguments.push_back(argument);
  return arguments;
}

}  // namespace

StopSignals::StopSignals() {
  struct sigaction action{};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // a write of a checkpoint goes on
  for (const int signal : kSignals) {
    struct sigaction inherited{};
    sigaction(signal, nullptr, &inherited);
    // nohup, and a shell that starts it in the background, mean that these do not concern it.
    const bool is_of_terminal = signal == SIGHUP || signal == SIGINT;
    if (is_of_terminal && inherited.sa_handler == SIG_IGN) continue;
    sigaction(signal, &action, nullptr);
  }
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a write beyond `ulimit -f` is then refused as on a full disk
  std::signal(SIGBUS, on_bus_error);
}

const std::atomic<bool>& StopSignals::requested() const { return stop_requested; }
int StopSignals::signal() const { return first_signal; }

bool says_how_threads_wait() {
  return std::getenv("GOMP_SPINCOUNT") != nullptr || std::getenv("OMP_WAIT_POLICY") != nullptr;
}

void spin_briefly() {
  if (says_how_threads_wait()) return;
  std::vector<std::string> arguments = own_arguments();
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  ::setenv("GOMP_SPINCOUNT", kBriefSpins, 1);
  ::execv("/proc/self/exe", pointers.data());
  // Without /proc nothing is lost but speed beside other programs.
}

}  // namespace halfstep::cli
