// How long a Hugging Face folder takes to become a model, and a model to become a folder.
//
//   pretrained_bench [--json] [--rounds N] FOLDER
//
// Loading, beside a plain read(2) of the weights' file; once with the file's pages dropped from the page
// cache before each, once with them in it. Saving, beside `dd conv=fsync` of the same bytes to the same disk,
// into a folder beside FOLDER unless --out names another. All take turns; each ratio is the median of the
// rounds'.
//
// Exits with 1 when loading takes more than 1.25 times the read, or saving more than 1.4 times dd.
#include <fcntl.h>
#include <halfstep/error.h>
#include <halfstep/models.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <functional>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>

#include "support/program.h"
#include "support/statistics.h"

namespace {

using nlohmann::json;
using Path = std::filesystem::path;

constexpr double kLoadLimit = 1.25, kSaveLimit = 1.4;

double seconds_of(const std::function<void()>& action) {
  const auto start = std::chrono::steady_clock::now();
  action();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class OpenFile {
 public:
  explicit OpenFile(const Path& path) : file_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    HALFSTEP_CHECK(file_ >= 0, path.string(), ": cannot be opened.");
  }
  ~OpenFile() { close(file_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  int get() const { return file_; }

 private:
  int file_;
};

/// The least that anyone must do: every page once, through a buffer that stays in the processor's cache.
void read_plainly(const Path& path) {
  const OpenFile file(path);
  std::vector<char> buffer(size_t{1} << 20);
  while (read(file.get(), buffer.data(), buffer.size()) > 0) continue;
}

void drop_from_cache(const Path& path) {
  const OpenFile file(path);
  fsync(file.get());  // pages that are still to be written are not dropped
  posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED);
}

void copy_with_dd(const Path& from, const Path& to) {
  const pid_t child = fork();
  if (child == 0) {
    const std::string in = "if=" + from.string(), out = "of=" + to.string();
    execlp("dd", "dd", in.c_str(), out.c_str(), "bs=1M", "conv=fsync", "status=none",
           static_cast<char*>(nullptr));
    _exit(127);
  }
  int status = 0;
  waitpid(child, &status, 0);
  HALFSTEP_CHECK(status == 0, "dd failed with status ", status);
}

struct Ratio {
  std::vector<double> ours{}, theirs{};

  double median() const {
    std::vector<double> ratios;
    for (size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / theirs[i]);
    return bench::median(ratios);
  }
  json told(double limit) const {
    return {{"seconds", bench::median(ours)},
            {"seconds_of_the_other", bench::median(theirs)},
            {"ratio", median()},
            {"limit", limit},
            {"passed", median() <= limit}};
  }
};

int run(int argc, char** argv) {
  CLI::App app("Loading and saving a Hugging Face folder beside plain reads and writes.");
  std::string folder, out;
  int rounds = 5;
  bool as_json = false;
  app.add_option("folder", folder)->required();
  app.add_option("--out", out, "where to save; beside the folder otherwise");
  app.add_option("--rounds", rounds)->check(CLI::Range(1, 1000));
  app.add_flag("--json", as_json);
  CLI11_PARSE(app, argc, argv);

  const Path weights = Path(folder) / "model.safetensors",
             saved = out.empty() ? Path(folder + ".bench") : Path(out);
  const auto model = halfstep::load_pretrained(folder);
  std::filesystem::create_directories(saved);
  Ratio cold, warm, save;
  for (int round = 0; round < rounds; ++round) {
    drop_from_cache(weights);
    cold.theirs.push_back(seconds_of([&] { read_plainly(weights); }));
    drop_from_cache(weights);
    cold.ours.push_back(seconds_of([&] { (void)halfstep::load_pretrained(folder); }));
    warm.theirs.push_back(seconds_of([&] { read_plainly(weights); }));
    warm.ours.push_back(seconds_of([&] { (void)halfstep::load_pretrained(folder); }));
    save.theirs.push_back(seconds_of([&] { copy_with_dd(weights, saved / "dd"); }));
    save.ours.push_back(seconds_of([&] { halfstep::save_pretrained(*model, saved); }));
  }
  std::filesystem::remove_all(saved);

  const json results{{"bytes", std::filesystem::file_size(weights)},
                     {"load_cold", cold.told(kLoadLimit)},
                     {"load_warm", warm.told(kLoadLimit)},
                     {"save", save.told(kSaveLimit)}};
  bool passed = true;
  for (const char* name : {"load_cold", "load_warm", "save"}) {
    const json& one = results[name];
    passed = passed && one["passed"].get<bool>();
    if (!as_json)
      std::cout << std::left << std::setw(10) << name << std::fixed << std::setprecision(3)
                << one["seconds"].get<double>() << " s beside " << one["seconds_of_the_other"].get<double>()
                << " s: " << one["ratio"].get<double>() << " times, at most " << one["limit"].get<double>()
                << "\n";
  }
  if (as_json) std::cout << results.dump(1) << "\n";
  return passed ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return bench::exit_code_of(run, argc, argv); }
