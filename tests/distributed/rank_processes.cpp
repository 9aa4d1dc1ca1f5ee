#include "distributed/rank_processes.h"

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>

extern char** environ;

namespace halfstep::testing {

std::map<std::string, RankCase>& rank_cases() {
  static std::map<std::string, RankCase> cases;
  return cases;
}

namespace {

constexpr const char* kCaseVariable = "HALFSTEP_RANK_CASE";
constexpr const char* kArgumentsVariable = "HALFSTEP_RANK_ARGUMENTS";
constexpr const char* kTimeoutVariable = "HALFSTEP_RANK_TIMEOUT_MS";

int run_as_rank(const char* name) {
  std::vector<std::string> arguments;
  std::istringstream given(std::getenv(kArgumentsVariable));
  for (std::string one; std::getline(given, one, '\x1f');) arguments.push_back(one);
  at::set_num_threads(1);
  try {
    const auto ranks = Ranks::from_environment(
        {.timeout = std::chrono::milliseconds(std::atoi(std::getenv(kTimeoutVariable)))});
    std::cout << rank_cases().at(name)(ranks, arguments) << std::flush;
    return 0;
  } catch (const std::exception& error) {
    std::cout << error.what() << std::flush;
    return 3;
  }
}

}  // namespace

RankProcesses::RankProcesses(int ranks, const std::string& case_name,
                             const std::vector<std::string>& arguments, int timeout_ms)
    : begun_(std::chrono::steady_clock::now()) {
  std::string joined;
  for (const std::string& one : arguments) joined += one + '\x1f';
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::string> variables;
    for (char** each = environ; *each != nullptr; ++each) variables.emplace_back(*each);
    const auto set = [&](const std::string& name, const std::string& value) {
      variables.push_back(name + "=" + value);
    };
    set("RANK", std::to_string(rank));
    set("WORLD_SIZE", std::to_string(ranks));
    set("MASTER_ADDR", "127.0.0.1");
    set("MASTER_PORT", std::to_string(meeting_.port()));
    set("TORCHELASTIC_USE_AGENT_STORE", "True");
    set("OMP_NUM_THREADS", "1");
    set(kCaseVariable, case_name);
    set(kArgumentsVariable, joined);
    set(kTimeoutVariable, std::to_string(timeout_ms));
    std::vector<char*> pointers;
    for (std::string& variable : variables) pointers.push_back(variable.data());
    pointers.push_back(nullptr);
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    char program[] = "/proc/self/exe";
    char* command[] = {program, nullptr};
    Process process;
    const int refused = posix_spawn(&process.pid, program, &actions, nullptr, command, pointers.data());
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    if (refused != 0) throw std::runtime_error("no process");
    process.output = ends[0];
    processes_.push_back(process);
  }
}

RankProcesses::~RankProcesses() {
  for (Process& process : processes_) {
    if (!process.ended) {
      ::kill(process.pid, SIGKILL);
      waitpid(process.pid, nullptr, 0);
    }
    close(process.output);
  }
}

void RankProcesses::kill(int rank, int signal) { ::kill(processes_[static_cast<size_t>(rank)].pid, signal); }

void RankProcesses::read_some(Process& process) {
  char bytes[4096];
  const ssize_t count = read(process.output, bytes, sizeof bytes);
  if (count > 0) {
    process.outcome.text.append(bytes, static_cast<size_t>(count));
    return;
  }
  int status = 0;
  waitpid(process.pid, &status, 0);
  process.ended = true;
  process.outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  process.outcome.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  process.outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_).count();
}

std::string RankProcesses::wait_for_text(int rank, const std::string& part) {
  Process& process = processes_[static_cast<size_t>(rank)];
  while (!process.ended && process.outcome.text.find(part) == std::string::npos) read_some(process);
  return process.outcome.text;
}

std::vector<RankOutcome> RankProcesses::outcomes() {
  for (;;) {
    std::vector<pollfd> waiting;
    std::vector<Process*> whose;
    for (Process& process : processes_)
      if (!process.ended) waiting.push_back({process.output, POLLIN, 0}), whose.push_back(&process);
    if (waiting.empty()) break;
    poll(waiting.data(), waiting.size(), -1);
    for (size_t i = 0; i < waiting.size(); ++i)
      if (waiting[i].revents != 0) read_some(*whose[i]);
  }
  std::vector<RankOutcome> all;
  for (const Process& process : processes_) all.push_back(process.outcome);
  return all;
}

std::vector<std::string> texts_of_ranks(int ranks, const std::string& case_name,
                                        const std::vector<std::string>& arguments) {
  RankProcesses processes(ranks, case_name, arguments);
  std::vector<std::string> texts;
  for (const RankOutcome& outcome : processes.outcomes()) {
    EXPECT_EQ(outcome.exit_code, 0) << "rank " << texts.size() << ", signal " << outcome.signal << ": "
                                    << outcome.text;
    texts.push_back(outcome.text);
  }
  return texts;
}

}  // namespace halfstep::testing

int main(int count, char** arguments) {
  if (const char* name = std::getenv(halfstep::testing::kCaseVariable))
    return halfstep::testing::run_as_rank(name);
  ::testing::InitGoogleTest(&count, arguments);
  return RUN_ALL_TESTS();
}
