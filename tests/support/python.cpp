#include "support/python.h"

#include <halfstep/error.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace halfstep::testing {

nlohmann::json ask_python(const std::string& script, const nlohmann::json& request) {
  namespace fs = std::filesystem;
  const char* chosen = std::getenv("HALFSTEP_PYTHON");
  const std::string python = chosen ? chosen : HALFSTEP_DEFAULT_PYTHON;
  const auto stem = fs::temp_directory_path() / ("halfstep-" + std::to_string(getpid()));
  const std::string question = stem.string() + ".question.json", answer = stem.string() + ".answer.json";

  std::ofstream(question) << request;
  const std::string command =
      "'" + python + "' '" HALFSTEP_SOURCE_DIR "/" + script + "' < '" + question + "' > '" + answer + "'";
  const int status = std::system(command.c_str());
  nlohmann::json parsed;
  if (status == 0) std::ifstream(answer) >> parsed;
  fs::remove(question);
  fs::remove(answer);
  HALFSTEP_CHECK(status == 0, "Python failed with status ", status, ": ", command,
                 "\nIt needs torch 2.13; tools/setup makes one in .venv, HALFSTEP_PYTHON names another.");
  return parsed;
}

}  // namespace halfstep::testing
