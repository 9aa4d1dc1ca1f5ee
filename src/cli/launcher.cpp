// `halfstep` as packages install it: finds LibTorch and becomes the program in libexec. It links nothing of
// LibTorch, so that it can say what is missing. docs/install.md tells the rule.
#include <halfstep/config.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

namespace {

namespace fs = std::filesystem;

// Another minor version has another C++ ABI.
constexpr const char* kNeeded = HALFSTEP_TORCH_VERSION;

struct Torch {
  fs::path folder;   // that of the Python package, or of an unpacked libtorch
  std::string from;  // how it was found
};

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool holds_libtorch(const fs::path& folder) {
  std::error_code unreadable;
  return fs::exists(folder / "lib/libtorch_cpu.so", unreadable);
}

// The folder itself, or the package within a virtual environment.
std::optional<fs::path> torch_in(const fs::path& folder) {
  if (holds_libtorch(folder)) return folder;
  std::error_code unreadable;
  for (const auto& python : fs::directory_iterator(folder / "lib", unreadable)) {
    const fs::path package = python.path() / "site-packages/torch";
    if (python.path().filename().string().starts_with("python3") && holds_libtorch(package)) return package;
  }
  return std::nullopt;
}

// Looks for the package without importing it, which would take seconds; and not in the current folder, where
// anybody may have put a folder called torch.
std::optional<fs::path> torch_of_python() {
  constexpr const char* kAsk =
      "python3 -c 'import sys; sys.path = [p for p in sys.path if p]; from importlib.util import find_spec; "
      "print(find_spec(\"torch\").submodule_search_locations[0])' 2>/dev/null";
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(kAsk, "r"), pclose);
  std::array<char, 4096> line{};
  if (pipe == nullptr || std::fgets(line.data(), line.size(), pipe.get()) == nullptr) return std::nullopt;
  line[std::strcspn(line.data(), "\n")] = '\0';
  return torch_in(line.data());
}

// "2.13.0+cpu", from version.py of the package or build-version of an archive; empty if neither says.
std::string version_of(const fs::path& torch) {
  std::ifstream archive(torch / "build-version"), package(torch / "version.py");
  std::string line;
  if (std::getline(archive, line)) return line;
  while (std::getline(package, line)) {
    const size_t begin = line.find_first_of("'\"");
    if (line.starts_with("__version__") && begin != std::string::npos)
      return line.substr(begin + 1, line.find_first_of("'\"", begin + 1) - begin - 1);
  }
  return "";
}

std::string advice() {
  const std::string needed = kNeeded, environment = "~/torch-" + needed;
  return "It comes with the Python package torch:\n"
         "  python3 -m venv " +
         environment +
         "\n"
         "  " +
         environment + "/bin/pip install 'torch==" + needed +
         ".*'\n"
         "  export HALFSTEP_TORCH=" +
         environment;
}

Torch find_torch() {
  if (const std::string given = variable("HALFSTEP_TORCH"); !given.empty()) {
    if (const auto found = torch_in(given)) return {*found, "HALFSTEP_TORCH"};
    throw std::runtime_error(
        "HALFSTEP_TORCH is " + given +
        ", which holds no lib/libtorch_cpu.so. Set it to a virtual environment with the Python "
        "package torch, to the folder of that package, or to an unpacked libtorch.");
  }
  const std::string environment = variable("VIRTUAL_ENV");
  if (!environment.empty())
    if (const auto found = torch_in(environment)) return {*found, "VIRTUAL_ENV"};
  if (const auto found = torch_of_python()) return {*found, "python3"};
  throw std::runtime_error("Halfstep " HALFSTEP_VERSION " needs LibTorch " + std::string(kNeeded) +
                           " and found none: HALFSTEP_TORCH is not set, " +
                           (environment.empty()
                                ? "no virtual environment is active"
                                : "the virtual environment " + environment + " has no torch") +
                           ", and python3 has no torch.\n" + advice());
}

void check_version(const Torch& torch) {
  const std::string version = version_of(torch.folder);
  if (version.starts_with(std::string(kNeeded) + ".")) return;
  throw std::runtime_error("Halfstep " HALFSTEP_VERSION " needs LibTorch " + std::string(kNeeded) + ", and " +
                           torch.folder.string() + " (found by " + torch.from + ") is " +
                           (version.empty() ? "of an unknown version" : version) + ".\n" + advice());
}

[[noreturn]] void become_program(const Torch& torch, char** argv) {
  const std::string before = variable("LD_LIBRARY_PATH");
  const std::string libraries = (torch.folder / "lib").string() + (before.empty() ? "" : ":" + before);
  setenv("LD_LIBRARY_PATH", libraries.c_str(), 1);
  const fs::path prefix = fs::read_symlink("/proc/self/exe").parent_path().parent_path();
  const fs::path program = prefix / "libexec/halfstep/halfstep";
  execv(program.c_str(), argv);
  throw std::runtime_error(program.string() + ": " + std::strerror(errno) + ". Install the package again.");
}

}  // namespace

int main(int, char** argv) {
  try {
    const Torch torch = find_torch();
    check_version(torch);
    become_program(torch, argv);
  } catch (const std::exception& error) {
    std::cerr << "halfstep: " << error.what() << "\n";
    return 1;
  }
}
