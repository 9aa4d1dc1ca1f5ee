#include "log/append_file.h"

#include <gtest/gtest.h>
#include <halfstep/error.h>
#include <sys/resource.h>

#include <cerrno>
#include <csignal>

#include "support/scratch.h"

namespace halfstep::log {
namespace {

/// A disk that is full after so many bytes of a file: Linux then takes what still fits, and refuses the rest.
class LargestFile {
 public:
  explicit LargestFile(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit now{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &now);
  }
  ~LargestFile() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST(AppendFile, ARecordThatIsRefusedHalfwayLeavesTheRecordBefore) {
  const testing::ScratchFolder scratch;
  AppendFile file = AppendFile::create(scratch / "log");
  file.append("first\n");
  {
    const LargestFile full(10);
    try {
      file.append("second\n");
      FAIL() << "13 bytes in a file of at most 10";
    } catch (const FileError& error) {
      EXPECT_EQ(error.code(), EFBIG);
    }
    EXPECT_EQ(testing::read_text(scratch / "log"), "first\n");
  }
  file.append("third\n");
  EXPECT_EQ(testing::read_text(scratch / "log"), "first\nthird\n");
}

TEST(AppendFile, KeepsTheBytesAskedForAndAppendsBehindThem) {
  const testing::ScratchFolder scratch;
  testing::write_text(scratch / "log", "first\nsec");
  AppendFile file = AppendFile::keep(scratch / "log", 6);
  file.append("other\n");
  EXPECT_EQ(testing::read_text(scratch / "log"), "first\nother\n");
  EXPECT_EQ(file.size(), 12u);
}

TEST(AppendFile, ANameThatIsTakenIsAFileError) {
  const testing::ScratchFolder scratch;
  testing::write_text(scratch / "log", "theirs");
  try {
    AppendFile::create(scratch / "log");
    FAIL() << "created over a file";
  } catch (const FileError& error) {
    EXPECT_EQ(error.code(), EEXIST);
  }
  EXPECT_EQ(testing::read_text(scratch / "log"), "theirs");
}

}  // namespace
}  // namespace halfstep::log
