#include "support/children.h"

#include <fcntl.h>
#include <halfstep/error.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

namespace bench {
namespace {

struct Child {
  std::size_t job;
  pid_t process;
  int from_child;
  std::string output;
};

std::string quoted(const Arguments& arguments) {
  std::string text;
  for (const auto& argument : arguments) text += " " + argument;
  return text;
}

Child start(std::size_t job, const Arguments& arguments) {
  int ends[2];
  // Close-on-exec, so that no child keeps a sibling's pipe open.
  HALFSTEP_CHECK(pipe2(ends, O_CLOEXEC) == 0, "cannot start a child: no more pipes");
  std::vector<char*> argv{const_cast<char*>("child")};
  for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const pid_t process = fork();
  HALFSTEP_CHECK(process >= 0, "cannot start a child: fork failed");
  if (process == 0) {
    dup2(ends[1], STDOUT_FILENO);
    execv("/proc/self/exe", argv.data());
    _exit(127);
  }
  close(ends[1]);
  return {job, process, ends[0], {}};
}

/// Reads what there is; false at the end of the child's output.
bool read_some(Child& child) {
  char bytes[4096];
  const ssize_t got = read(child.from_child, bytes, sizeof bytes);
  if (got > 0) child.output.append(bytes, static_cast<std::size_t>(got));
  return got > 0;
}

nlohmann::json result_of(const Child& child, const Arguments& arguments) {
  close(child.from_child);
  int status = 0;
  waitpid(child.process, &status, 0);
  auto parsed = nlohmann::json::parse(child.output, nullptr, /*allow_exceptions=*/false);
  HALFSTEP_CHECK(status == 0 && !parsed.is_discarded(), "the child with", quoted(arguments),
                 " ended with status ", status, " and printed '", child.output,
                 "'. Run it alone with these arguments to see why.");
  return parsed;
}

}  // namespace

void run_children(const std::vector<Arguments>& jobs, int at_once,
                  const std::function<void(std::size_t, const nlohmann::json&)>& finished) {
  std::vector<Child> running;
  std::size_t next = 0;
  while (next < jobs.size() || !running.empty()) {
    while (next < jobs.size() && running.size() < static_cast<std::size_t>(at_once)) {
      running.push_back(start(next, jobs[next]));
      ++next;
    }
    std::vector<pollfd> waiting;
    for (const auto& child : running) waiting.push_back({child.from_child, POLLIN, 0});
    poll(waiting.data(), waiting.size(), -1);
    for (std::size_t i = running.size(); i-- > 0;) {
      if (waiting[i].revents == 0 || read_some(running[i])) continue;
      const Child done = std::move(running[i]);
      running.erase(running.begin() + static_cast<std::ptrdiff_t>(i));
      finished(done.job, result_of(done, jobs[done.job]));
    }
  }
}

}  // namespace bench
