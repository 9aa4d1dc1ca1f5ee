// usage_fuzz: random small training programs through Halfstep and through an FP64 oracle.
//
//   usage_fuzz --seconds 60 --jobs 2          new programs, as many as the time allows
//   usage_fuzz --seconds 60 --first           the same until one disagrees, which is not shrunk
//   usage_fuzz --program 123456               one program again
//   usage_fuzz --program 123456 --print       its C++ source
#include <poll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <set>

#include "usage/compare.h"
#include "usage/print_cpp.h"

namespace usage {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Options {
  double seconds = 10;
  uint64_t seed = 0;
  bool seed_given = false;
  int jobs = 1;
  std::string json;
  uint64_t program = 0;
  bool one_program = false, print = false, first = false, device = false;
  std::vector<std::string> without;
};

[[noreturn]] void usage_error(const std::string& what) {
  std::cerr << "usage_fuzz: " << what
            << "\nusage: usage_fuzz [--seconds N] [--seed S] [--jobs N] [--json FILE|-] [--device] [--first] "
               "[--without FEATURE]...\n"
               "       usage_fuzz --program SEED [--device] [--print] [--without FEATURE]...\n"
               "       usage_fuzz --features\n";
  std::exit(2);
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string key = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 >= argc) usage_error(key + " needs a value");
      return argv[++i];
    };
    const auto number = [&] {
      const std::string text = value();
      char* end = nullptr;
      const uint64_t parsed = std::strtoull(text.c_str(), &end, 10);
      if (text.empty() || *end != 0) usage_error(key + " needs a whole number, not '" + text + "'");
      return parsed;
    };
    if (key == "--seconds") {
      options.seconds = static_cast<double>(number());
    } else if (key == "--seed") {
      options.seed = number(), options.seed_given = true;
    } else if (key == "--jobs") {
      options.jobs = static_cast<int>(std::clamp<uint64_t>(number(), 1, 64));
    } else if (key == "--json") {
      options.json = value();
    } else if (key == "--program") {
      options.program = number(), options.one_program = true;
    } else if (key == "--print") {
      options.print = true;
    } else if (key == "--device") {
      options.device = true;
    } else if (key == "--first") {
      options.first = true;
    } else if (key == "--without") {
      options.without.push_back(value());
    } else if (key == "--features") {
      for (const Feature& feature : all_features()) std::cout << feature.name << '\n';
      std::exit(0);
    } else {
      usage_error("unknown option '" + key + "'");
    }
  }
  for (const std::string& feature : options.without)
    if (std::none_of(all_features().begin(), all_features().end(),
                     [&](const Feature& known) { return known.name == feature; }))
      usage_error("there is no feature '" + feature + "'; --features lists them");
  return options;
}

// --- Shrinking
// ---------------------------------------------------------------------------------------------------

/// The disagreement of this kind, if the program still has one. What depends on threads is tried a few times.
const Disagreement* find(const Verdict& verdict, const std::string& kind) {
  for (const Disagreement& one : verdict.disagreements)
    if (one.kind == kind) return &one;
  return nullptr;
}

struct Shrunk {
  Program program;
  Disagreement disagreement;
};

Shrunk shrink(Program program, Disagreement disagreement, const std::string& scratch) {
  const auto start = Clock::now();
  for (bool smaller_found = true; smaller_found && seconds_since(start) < 20;) {
    smaller_found = false;
    for (const Program& candidate : smaller(program)) {
      if (features(candidate) == features(program) && candidate.steps == program.steps &&
          candidate.layers.size() == program.layers.size() &&
          candidate.events.size() == program.events.size() && candidate.batch == program.batch &&
          candidate.length == program.length)
        continue;  // put right into what it was
      const int tries = candidate.company == Company::Alone ? 1 : 3;
      for (int i = 0; i < tries && !smaller_found; ++i) {
        const Verdict verdict = run(candidate, scratch);
        if (const Disagreement* same = find(verdict, disagreement.kind)) {
          program = candidate;
          disagreement = *same;
          smaller_found = true;
        }
      }
      if (smaller_found) break;
    }
  }
  return {program, disagreement};
}

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

// --- Workers
// -----------------------------------------------------------------------------------------------------

/// What a worker sends: a letter, a length, a text.
void send(int to, char type, const std::string& text) {
  const auto length = static_cast<uint32_t>(text.size());
  std::string message(1, type);
  message.append(reinterpret_cast<const char*>(&length), sizeof length);
  message += text;
  for (size_t sent = 0; sent < message.size();) {
    const ssize_t wrote = ::write(to, message.data() + sent, message.size() - sent);
    if (wrote <= 0) ::_exit(3);
    sent += static_cast<size_t>(wrote);
  }
}

/// What the parent sees of a worker that can no longer speak.
struct Shared {
  volatile uint64_t seed;
  volatile double started;
};

double wall_now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

struct Tally {
  int64_t programs = 0, checks = 0, uninformative = 0, second_looks = 0;
};

/// Of a disagreement's text, after its "step 2: ".
std::string first_word(const std::string& text) {
  const size_t colon = text.find(": ");
  const size_t begin = text.starts_with("step ") && colon != std::string::npos ? colon + 2 : 0;
  return text.substr(begin, text.find(' ', begin) - begin);
}

[[noreturn]] void work(const Options& options, uint64_t first, int to, Shared& shared, double until) {
  at::set_num_threads(1);
  const std::string scratch =
      (std::filesystem::temp_directory_path() / ("usage_fuzz." + std::to_string(::getpid()))).string();
  std::map<std::string, size_t> id_of;
  for (const Feature& feature : all_features()) id_of.emplace(feature.name, id_of.size());
  std::set<std::string> seen;
  std::map<std::string, int> shrunk_of_group;
  const double begun = wall_now();
  double shrinking = 0;
  std::map<std::string, double> worst;
  for (uint64_t n = 0; wall_now() < until; ++n) {
    const uint64_t seed = first + n * static_cast<uint64_t>(options.jobs);
    shared.seed = seed;
    shared.started = wall_now();
    const Program program = draw(seed, options.without, options.device);
    const Verdict verdict = run(program, scratch);
    std::string line = std::to_string(verdict.checks) + ' ' + std::to_string(verdict.uninformative) + ' ' +
                       std::to_string(verdict.second_looks);
    for (const std::string& feature : features(program))
      if (const auto id = id_of.find(feature); id != id_of.end()) line += ' ' + std::to_string(id->second);
    send(to, 'P', line);
    for (const auto& [kind, ratio] : verdict.worst)
      if (ratio > worst[kind]) {
        worst[kind] = ratio;
        send(to, 'W', std::to_string(ratio) + ' ' + kind);
      }
    if (verdict.disagreements.empty()) continue;
    const Disagreement& first_one = verdict.disagreements[0];
    send(to, 'F',
         std::to_string(seed) + '\t' + first_one.kind + '\t' + first_one.text + "\t" +
             join(features(program)));
    // Two of each kind, precision and first word ("zero_"), and no more than a third of the time.
    const std::string group = first_one.kind + std::string(name(program.compute)) +
                              std::string(name(program.weights)) + first_word(first_one.text);
    if (shrunk_of_group[group] >= 2 || shrinking > (wall_now() - begun) / 3 + 2) continue;
    ++shrunk_of_group[group];
    shared.started = wall_now() + 60;
    const double shrink_begun = wall_now();
    const Shrunk small = shrink(program, first_one, scratch);
    shrinking += wall_now() - shrink_begun;
    const std::string what = join(features(small.program));
    if (!seen.insert(small.disagreement.kind + what).second) continue;
    send(to, 'S',
         std::to_string(seed) + '\t' + small.disagreement.kind + '\t' + small.disagreement.text + '\t' +
             what + '\t' + print_cpp(small.program));
  }
  for (const char* suffix : {"", ".second"}) std::filesystem::remove(scratch + suffix);
  ::_exit(0);
}

std::vector<std::string> split(const std::string& text, char at, size_t most) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (parts.size() + 1 < most) {
    const size_t end = text.find(at, begin);
    if (end == std::string::npos) break;
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  parts.push_back(text.substr(begin));
  return parts;
}

std::string json_text(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += ' ';
    } else {
      out += c;
    }
  }
  return out + '"';
}

struct Found {
  uint64_t seed = 0;
  double second = 0;
  std::string kind, text, features, source;
};

class Parent {
 public:
  explicit Parent(const Options& options)
      : options_(options),
        start_(Clock::now()),
        counts_(all_features().size(), std::vector<int64_t>(all_features().size())) {}

  int run() {
    std::printf("usage_fuzz: seed %llu, %d %s, %.0f s\n", static_cast<unsigned long long>(options_.seed),
                options_.jobs, options_.jobs == 1 ? "worker" : "workers", options_.seconds);
    std::fflush(stdout);
    shared_ = static_cast<Shared*>(::mmap(nullptr, sizeof(Shared) * static_cast<size_t>(options_.jobs),
                                          PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    workers_.resize(static_cast<size_t>(options_.jobs));
    for (int i = 0; i < options_.jobs; ++i) launch(i, options_.seed + static_cast<uint64_t>(i));
    while (std::any_of(workers_.begin(), workers_.end(), [](const Worker& w) { return w.pid > 0; })) {
      look();
      if (options_.first && !failing_.empty()) end_workers();
    }
    return report();
  }

 private:
  struct Worker {
    pid_t pid = -1;
    int from = -1;
    std::string buffer;
  };

  double until() const {
    return std::chrono::duration<double>(start_.time_since_epoch()).count() + options_.seconds;
  }

  void launch(int index, uint64_t first) {
    int ends[2];
    if (::pipe(ends) != 0) std::exit(3);
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::close(ends[0]);
      work(options_, first, ends[1], shared_[index], until());
    }
    ::close(ends[1]);
    workers_[static_cast<size_t>(index)] = {.pid = pid, .from = ends[0], .buffer = {}};
  }

  void end_workers() {
    for (Worker& worker : workers_) {
      if (worker.pid <= 0) continue;
      ::kill(worker.pid, SIGKILL);
      ::waitpid(worker.pid, nullptr, 0);
      ::close(worker.from);
      worker.pid = -1;
    }
  }

  void look() {
    std::vector<pollfd> polled;
    for (const Worker& worker : workers_)
      polled.push_back({.fd = worker.pid > 0 ? worker.from : -1, .events = POLLIN, .revents = 0});
    ::poll(polled.data(), polled.size(), 500);
    for (size_t i = 0; i < workers_.size(); ++i) {
      if (workers_[i].pid <= 0) continue;
      if (polled[i].revents) read_from(i);
      if (workers_[i].pid > 0 && wall_now() - shared_[i].started > 60 && shared_[i].started > 0) {
        ::kill(workers_[i].pid, SIGKILL);
        shared_[i].started = wall_now();
      }
    }
    if (::isatty(2)) {
      std::fprintf(stderr, "\r%.0f s: %lld programs, %.1f per second, %zu disagree ", seconds_since(start_),
                   static_cast<long long>(tally_.programs),
                   static_cast<double>(tally_.programs) / seconds_since(start_), failing_.size());
      std::fflush(stderr);
    }
  }

  void read_from(size_t index) {
    Worker& worker = workers_[index];
    char bytes[65536];
    const ssize_t got = ::read(worker.from, bytes, sizeof bytes);
    if (got > 0) {
      worker.buffer.append(bytes, static_cast<size_t>(got));
      while (worker.buffer.size() >= 5) {
        uint32_t length = 0;
        std::memcpy(&length, worker.buffer.data() + 1, sizeof length);
        if (worker.buffer.size() < 5 + length) break;
        take(worker.buffer[0], worker.buffer.substr(5, length));
        worker.buffer.erase(0, 5 + length);
      }
      return;
    }
    int status = 0;
    ::waitpid(worker.pid, &status, 0);
    ::close(worker.from);
    worker.pid = -1;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
    // It died in a program: that is a disagreement too. The others go on with the next one.
    const uint64_t seed = shared_[index].seed;
    const std::string how = WIFSIGNALED(status) ? std::string("signal ") + strsignal(WTERMSIG(status))
                                                : "exit code " + std::to_string(WEXITSTATUS(status));
    const Program program = draw(seed, options_.without, options_.device);
    failing_.push_back({seed, seconds_since(start_), "crash", how, join(features(program)), {}});
    show("crash", failing_.back());
    shrunk_.push_back(failing_.back());
    shrunk_.back().source = print_cpp(program);
    if (wall_now() < until()) launch(static_cast<int>(index), seed + static_cast<uint64_t>(options_.jobs));
  }

  void show(const char* what, const Found& found) {
    if (::isatty(2)) std::fprintf(stderr, "\r\033[K");
    std::printf("%s after %.1f s, seed %llu [%s] %s\n  %s\n", what, found.second,
                static_cast<unsigned long long>(found.seed), found.kind.c_str(), found.text.c_str(),
                found.features.c_str());
    std::fflush(stdout);
  }

  void take(char type, const std::string& text) {
    if (type == 'P') {
      ++tally_.programs;
      const auto numbers = split(text, ' ', 1000);
      tally_.checks += std::stoll(numbers[0]);
      tally_.uninformative += std::stoll(numbers[1]);
      tally_.second_looks += std::stoll(numbers[2]);
      for (size_t a = 3; a < numbers.size(); ++a)
        for (size_t b = a + 1; b < numbers.size(); ++b) {
          const size_t x = std::stoul(numbers[a]), y = std::stoul(numbers[b]);
          ++counts_[std::min(x, y)][std::max(x, y)];
        }
    } else if (type == 'W') {
      const auto parts = split(text, ' ', 2);
      worst_[parts[1]] = std::max(worst_[parts[1]], std::stod(parts[0]));
    } else {
      const auto parts = split(text, '\t', type == 'S' ? 5 : 4);
      Found found{.seed = std::stoull(parts[0]),
                  .second = seconds_since(start_),
                  .kind = parts[1],
                  .text = parts[2],
                  .features = parts[3],
                  .source = type == 'S' ? parts[4] : std::string()};
      if (type == 'F') {
        failing_.push_back(found);
        if (failing_.size() <= 20) show("disagrees", found);
        return;
      }
      const bool is_new = std::none_of(shrunk_.begin(), shrunk_.end(), [&](const Found& other) {
        return other.kind == found.kind && other.features == found.features;
      });
      if (!is_new) return;
      show("shrunk", found);
      shrunk_.push_back(found);
    }
  }

  struct Pair {
    size_t a, b;
    int64_t count;
  };
  std::vector<Pair> pairs() const {
    std::vector<Pair> all;
    const auto& features = all_features();
    const auto left_out = [&](const Feature& feature) {
      return std::find(options_.without.begin(), options_.without.end(), feature.name) !=
             options_.without.end();
    };
    for (size_t a = 0; a < features.size(); ++a)
      for (size_t b = a + 1; b < features.size(); ++b)
        if (can_meet(features[a], features[b]) && !left_out(features[a]) && !left_out(features[b]))
          all.push_back({a, b, counts_[a][b]});
    std::stable_sort(all.begin(), all.end(), [](const Pair& x, const Pair& y) { return x.count < y.count; });
    return all;
  }

  int report() {
    if (::isatty(2)) std::fprintf(stderr, "\r\033[K");
    const double seconds = seconds_since(start_);
    const auto all = pairs();
    const auto below =
        std::count_if(all.begin(), all.end(), [](const Pair& pair) { return pair.count < 100; });
    const double share = tally_.checks ? static_cast<double>(tally_.uninformative) / tally_.checks : 0;
    std::map<std::string, int> kinds;
    for (const Found& found : failing_) ++kinds[found.kind];
    for (const Found& found : shrunk_)
      std::printf("\n// ---- seed %llu [%s] %s\n%s", static_cast<unsigned long long>(found.seed),
                  found.kind.c_str(), found.text.c_str(), found.source.c_str());
    std::printf(
        "\n%lld programs in %.0f s, %.1f per second; %lld checks, %.2f %% uninformative, %lld second "
        "looks\n",
        static_cast<long long>(tally_.programs), seconds, tally_.programs / seconds,
        static_cast<long long>(tally_.checks), 100 * share, static_cast<long long>(tally_.second_looks));
    std::printf("%zu programs disagree, %zu different after shrinking\n", failing_.size(), shrunk_.size());
    for (const auto& [kind, count] : kinds) std::printf("  %-20s %d\n", kind.c_str(), count);
    std::printf("largest error in units of its bound:");
    for (const auto& [kind, ratio] : worst_) std::printf(" %s %.2f;", kind.c_str(), ratio);
    std::printf("\n%zu pairs of features, %lld below 100 programs; the rarest:\n", all.size(),
                static_cast<long long>(below));
    for (size_t i = 0; i < std::min<size_t>(10, all.size()); ++i)
      std::printf("  %6lld  %s + %s\n", static_cast<long long>(all[i].count),
                  all_features()[all[i].a].name.c_str(), all_features()[all[i].b].name.c_str());
    if (!options_.json.empty()) write_json(seconds, share, all, below);
    return failing_.empty() ? 0 : 1;
  }

  void write_json(double seconds, double share, const std::vector<Pair>& all, int64_t below) {
    std::string out =
        "{\"seed\": " + std::to_string(options_.seed) + ", \"seconds\": " + std::to_string(seconds) +
        ", \"programs\": " + std::to_string(tally_.programs) +
        ", \"checks\": " + std::to_string(tally_.checks) +
        ", \"uninformative_share\": " + std::to_string(share) +
        ", \"second_looks\": " + std::to_string(tally_.second_looks) +
        ", \"disagreeing_programs\": " + std::to_string(failing_.size()) + ", \"disagreements\": [";
    for (size_t i = 0; i < shrunk_.size(); ++i)
      out += std::string(i ? ", " : "") + "{\"seed\": " + std::to_string(shrunk_[i].seed) +
             ", \"after_seconds\": " + std::to_string(shrunk_[i].second) +
             ", \"kind\": " + json_text(shrunk_[i].kind) + ", \"text\": " + json_text(shrunk_[i].text) +
             ", \"features\": " + json_text(shrunk_[i].features) +
             ", \"source\": " + json_text(shrunk_[i].source) + "}";
    out += "], \"first_after_seconds\": " +
           (failing_.empty() ? std::string("null") : std::to_string(failing_[0].second)) +
           ", \"pairs\": " + std::to_string(all.size()) + ", \"pairs_below_100\": " + std::to_string(below) +
           ", \"rarest_pairs\": [";
    for (size_t i = 0; i < std::min<size_t>(50, all.size()); ++i)
      out += std::string(i ? ", " : "") + "[" + json_text(all_features()[all[i].a].name) + ", " +
             json_text(all_features()[all[i].b].name) + ", " + std::to_string(all[i].count) + "]";
    out += "]}\n";
    if (options_.json == "-") {
      std::fputs(out.c_str(), stdout);
    } else {
      std::ofstream(options_.json) << out;
    }
  }

  Options options_;
  Clock::time_point start_;
  Shared* shared_ = nullptr;
  std::vector<Worker> workers_;
  Tally tally_;
  std::vector<std::vector<int64_t>> counts_;
  std::vector<Found> failing_, shrunk_;
  std::map<std::string, double> worst_;
};

int run_one(const Options& options) {
  const Program program = draw(options.program, options.without, options.device);
  if (options.print) {
    std::fputs(print_cpp(program).c_str(), stdout);
    return 0;
  }
  at::set_num_threads(1);
  const std::string scratch =
      (std::filesystem::temp_directory_path() / ("usage_fuzz." + std::to_string(::getpid()))).string();
  std::printf("%s\n", join(features(program)).c_str());
  const Verdict verdict = run(program, scratch);
  for (const Disagreement& one : verdict.disagreements)
    std::printf("[%s] %s\n", one.kind.c_str(), one.text.c_str());
  for (const auto& [kind, ratio] : verdict.worst) std::printf("%s: %.3f of its bound\n", kind.c_str(), ratio);
  std::printf("%lld checks, %lld uninformative\n", static_cast<long long>(verdict.checks),
              static_cast<long long>(verdict.uninformative));
  if (!verdict.disagreements.empty()) {
    const Shrunk small = shrink(program, verdict.disagreements[0], scratch);
    std::printf("shrunk to: %s\n[%s] %s\n%s", join(features(small.program)).c_str(),
                small.disagreement.kind.c_str(), small.disagreement.text.c_str(),
                print_cpp(small.program).c_str());
  }
  for (const char* suffix : {"", ".second"}) std::filesystem::remove(scratch + suffix);
  return verdict.disagreements.empty() ? 0 : 1;
}

}  // namespace
}  // namespace usage

int main(int argc, char** argv) {
  usage::Options options = usage::parse(argc, argv);
  if (options.one_program) return usage::run_one(options);
  if (!options.seed_given)
    options.seed =
        static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count()) % 1000000000000;
  return usage::Parent(options).run();
}
