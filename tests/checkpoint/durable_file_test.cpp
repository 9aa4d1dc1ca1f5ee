// Files that appear whole or not at all, under every answer that the operating system may give.
#include "io/durable_file.h"

#include <gtest/gtest.h>
#include <halfstep/error.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "checkpoint/content.h"
#include "checkpoint/shim.h"

namespace halfstep::testing {
namespace {

namespace fs = std::filesystem;
using files::DurableFile;
using shim::Call;
using shim::Fault;

const std::string kOld = "what stood there", kNew(100'000, 'n');

std::string content_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

struct Attempt {
  std::vector<Call> calls;
  std::string content;
  int code = 0;  // of the FileError
  size_t names_left = 0;
};

Attempt replace_under(shim::Plan plan) {
  const ScratchFolder scratch;
  const fs::path path = scratch.path() / "file";
  std::ofstream(path) << kOld;
  plan.folder = scratch.path();
  Attempt attempt;
  shim::begin(plan);
  try {
    DurableFile file(path);
    for (int half = 0; half < 2; ++half)
      file.write(std::as_bytes(std::span(kNew)).subspan(half * kNew.size() / 2, kNew.size() / 2));
    file.commit();
  } catch (const FileError& error) {
    attempt.code = error.code();
  }
  attempt.calls = shim::end();
  attempt.content = content_of(path);
  attempt.names_left = static_cast<size_t>(std::distance(fs::directory_iterator(scratch.path()), {}));
  return attempt;
}

TEST(DurableFile, IsReplacedWholeOrStaysAsItWasAtEveryError) {
  const Attempt untroubled = replace_under({});
  EXPECT_EQ(untroubled.content, kNew);
  size_t renamed = 0;
  while (untroubled.calls[renamed] != Call::Rename) ++renamed;
  for (size_t at = 0; at < untroubled.calls.size(); ++at) {
    for (const int code : {ENOSPC, EIO, EROFS, EMFILE, EACCES}) {
      const Attempt attempt =
          replace_under({.folder = "", .fault = Fault::Fail, .at = static_cast<int64_t>(at), .code = code});
      SCOPED_TRACE(detail::concat("call ", at, ", errno ", code));
      EXPECT_TRUE(attempt.code == code || attempt.content == kNew);
      EXPECT_EQ(attempt.content, at > renamed || attempt.code == 0 ? kNew : kOld);
      EXPECT_EQ(attempt.names_left, 1u);
    }
  }
}

TEST(DurableFile, GoesOnAfterInterruptionsAndShortWrites) {
  const std::vector<Call> calls = replace_under({}).calls;
  for (size_t at = 0; at < calls.size(); ++at) {
    const auto plan = [&](Fault fault) {
      return shim::Plan{.folder = "", .fault = fault, .at = static_cast<int64_t>(at), .code = EINTR};
    };
    const bool interruptible = calls[at] != Call::Rename && calls[at] != Call::Unlink;
    if (interruptible) {
      EXPECT_EQ(replace_under(plan(Fault::Fail)).content, kNew) << at;
    }
    if (calls[at] == Call::Write) {
      EXPECT_EQ(replace_under(plan(Fault::ShortWrite)).content, kNew) << at;
    }
  }
}

TEST(DurableFile, SyncsBytesBeforeTheNameAndTheFolderAfterIt) {
  const std::vector<Call> calls = replace_under({}).calls;
  std::string order;
  for (const Call call : calls) {
    if (call == Call::Fsync) order += 's';
    if (call == Call::Rename) order += 'r';
  }
  EXPECT_EQ(order, "srs");
}

// Linux may have dropped the pages that it could not write, and would report success the second time.
TEST(DurableFile, AfterAFailedSyncNoSecondCommitSucceeds) {
  const ScratchFolder scratch;
  const fs::path path = scratch.path() / "file";
  std::ofstream(path) << kOld;
  const std::vector<Call> calls = replace_under({}).calls;
  const auto sync = std::find(calls.begin(), calls.end(), Call::Fsync) - calls.begin();
  shim::begin({.folder = scratch.path(), .fault = Fault::Fail, .at = sync, .code = EIO});
  DurableFile file(path);
  for (int half = 0; half < 2; ++half)
    file.write(std::as_bytes(std::span(kNew)).subspan(half * kNew.size() / 2, kNew.size() / 2));
  EXPECT_THROW(file.commit(), FileError);
  EXPECT_THROW(file.commit(), Error);
  EXPECT_THROW(file.write(std::as_bytes(std::span(kNew))), Error);
  EXPECT_THROW(file.write_at(0, std::as_bytes(std::span(kNew))), Error);
  shim::end();
  EXPECT_EQ(content_of(path), kOld);
}

// In two containers on one disk, two processes have the same number.
TEST(DurableFile, ANameAsideThatIsTakenIsSomebodysAndStays) {
  const ScratchFolder scratch;
  const fs::path path = scratch.path() / "file";
  const std::string aside = path.string() + ".aside-" + std::to_string(::getpid()) + "-";
  for (int i = 0; i < 1000; ++i) std::ofstream(aside + std::to_string(i)) << "another's";
  DurableFile file(path);
  file.write(std::as_bytes(std::span(kNew)));
  file.commit();
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(content_of(aside + std::to_string(i)), "another's");
}

TEST(DurableFile, WithoutCommitNothingIsLeft) {
  const ScratchFolder scratch;
  const fs::path path = scratch.path() / "file";
  {
    DurableFile(path).write(std::as_bytes(std::span(kNew)));
  }
  EXPECT_TRUE(fs::is_empty(scratch.path()));
}

// Two processes, and two writers in each, write one name at the same time: each aside of its own, none torn.
TEST(DurableFile, OfTwoProcessesAreNeverMixed) {
  const ScratchFolder scratch;
  const fs::path path = scratch.path() / "file";
  const auto write_both = [&](char first) {
    DurableFile a(path), b(path);
    const std::string text_a(50'000, first), text_b(50'000, static_cast<char>(first + 1));
    a.write(std::as_bytes(std::span(text_a)));
    b.write(std::as_bytes(std::span(text_b)));
    a.commit();
    b.commit();
  };
  for (int round = 0; round < 20; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      write_both('c');
      ::_exit(0);
    }
    write_both('a');
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0);
    const std::string content = content_of(path);
    ASSERT_EQ(content, std::string(50'000, content[0]));
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(scratch.path()), {}), 1);
}

TEST(DurableFile, ALinkIsReplacedNotFollowed) {
  const ScratchFolder scratch;
  std::ofstream(scratch.path() / "target") << kOld;
  fs::create_symlink(scratch.path() / "target", scratch.path() / "file");
  DurableFile file(scratch.path() / "file");
  file.write(std::as_bytes(std::span(kNew)));
  file.commit();
  EXPECT_EQ(content_of(scratch.path() / "target"), kOld);
  EXPECT_EQ(content_of(scratch.path() / "file"), kNew);
}

}  // namespace
}  // namespace halfstep::testing
