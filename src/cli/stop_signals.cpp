#include "cli/stop_signals.h"

#include <unistd.h>

#include <array>
#include <csignal>

#include "cli/exit_codes.h"

namespace halfstep::cli {
namespace {

constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGUSR1};

std::atomic<bool> stop_requested = false;
std::atomic<int> first_signal = 0;
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free,
              "a signal handler may touch nothing else");

void on_signal(int signal) {
  if (stop_requested.exchange(true)) _exit(kSignalled + signal);
  first_signal = signal;
  constexpr char kMessage[] = "\nhalfstep: stopping after this step; once more ends at once without saving\n";
  // Nobody can be told that standard error is gone.
  [[maybe_unused]] const auto written = write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1);
}

}  // namespace

StopSignals::StopSignals() {
  struct sigaction action{};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // a write of a checkpoint goes on
  for (const int signal : kSignals) sigaction(signal, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
}
const std::atomic<bool>& StopSignals::requested() const { return stop_requested; }
int StopSignals::signal() const { return first_signal; }

}  // namespace halfstep::cli
