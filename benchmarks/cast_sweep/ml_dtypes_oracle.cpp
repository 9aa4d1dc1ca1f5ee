#include "ml_dtypes_oracle.h"

#include <fcntl.h>
#include <halfstep/error.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

namespace halfstep::sweep {

MlDtypesOracle::MlDtypesOracle(const std::string& python) : python_(python) {
  std::signal(SIGPIPE, SIG_IGN);  // a child that died is told as an Error by write()
  int to[2], from[2];
  // Close-on-exec, so that no child keeps a sibling's pipe open.
  HALFSTEP_CHECK(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0, "cast_sweep: no more pipes");
  child_ = fork();
  HALFSTEP_CHECK(child_ >= 0, "cast_sweep: cannot fork");
  if (child_ == 0) {
    dup2(to[0], STDIN_FILENO);
    dup2(from[1], STDOUT_FILENO);
    execlp(python.c_str(), python.c_str(), HALFSTEP_ML_DTYPES_SCRIPT, nullptr);
    _exit(127);
  }
  close(to[0]);
  close(from[1]);
  to_child_ = to[1];
  from_child_ = from[0];
  fcntl(from_child_, F_SETPIPE_SZ, 1 << 20);  // a wish: a larger pipe only saves switches
  for (char c = 0; c != '\n';) {
    read(&c, 1);
    if (c != '\n') versions_ += c;
  }
}

MlDtypesOracle::~MlDtypesOracle() {
  close(to_child_);
  close(from_child_);
  waitpid(child_, nullptr, 0);
}

void MlDtypesOracle::request(Range range) {
  const std::string line = detail::concat(range.first, " ", range.stride, " ", range.count, "\n");
  const ssize_t written = write(to_child_, line.data(), line.size());
  HALFSTEP_CHECK(written == static_cast<ssize_t>(line.size()), "cast_sweep: ", python_, " went away");
}

void MlDtypesOracle::read(void* bytes, std::size_t count) {
  auto* next = static_cast<char*>(bytes);
  while (count > 0) {
    const ssize_t got = ::read(from_child_, next, count);
    HALFSTEP_CHECK(
        got > 0, "cast_sweep: '", python_,
        "' ended early. It must be a Python with numpy and ml_dtypes: run tools/setup, or name another "
        "with --python or HALFSTEP_PYTHON.");
    next += got;
    count -= static_cast<std::size_t>(got);
  }
}

}  // namespace halfstep::sweep
