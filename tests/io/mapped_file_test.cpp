#include "io/input_file.h"

#include <gtest/gtest.h>
#include <halfstep/error.h>
#include <sys/stat.h>

#include <cerrno>

#include "support/error_of.h"
#include "support/scratch.h"

namespace halfstep::files {
namespace {

using halfstep::testing::error_of;
using halfstep::testing::ScratchFolder;
using halfstep::testing::write_text;

TEST(MappedFile, GivesTheBytesOfAFile) {
  const ScratchFolder scratch;
  write_text(scratch / "f", "halfstep");
  const MappedFile file(scratch / "f");
  ASSERT_EQ(file.bytes().size(), 8u);
  EXPECT_EQ(file.bytes()[4], std::byte{'s'});
}

TEST(MappedFile, AnEmptyFileHasNoBytes) {
  const ScratchFolder scratch;
  write_text(scratch / "f", "");
  EXPECT_TRUE(MappedFile(scratch / "f").bytes().empty());
}

TEST(MappedFile, WhatIsReplacedByRenameStaysReadable) {
  const ScratchFolder scratch;
  write_text(scratch / "f", "old");
  const MappedFile file(scratch / "f");
  write_text(scratch / "g", "");
  std::filesystem::rename(scratch / "g", scratch / "f");
  EXPECT_EQ(file.bytes()[0], std::byte{'o'});
}

TEST(MappedFile, AMissingFileIsAFileErrorThatNamesIt) {
  const ScratchFolder scratch;
  try {
    MappedFile file(scratch / "absent");
    FAIL() << "no error";
  } catch (const FileError& error) {
    EXPECT_EQ(error.code(), ENOENT);
    EXPECT_NE(std::string(error.what()).find("absent: cannot open"), std::string::npos) << error.what();
  }
}

TEST(MappedFile, FoldersPipesAndDevicesAreRefusedAtOnce) {
  const ScratchFolder scratch;
  ASSERT_EQ(::mkfifo((scratch / "pipe").c_str(), 0600), 0);
  for (const std::filesystem::path& path :
       {scratch.path(), scratch / "pipe", std::filesystem::path("/dev/zero")})
    EXPECT_NE(error_of([&] { MappedFile{path}; }).find("is not a regular file"), std::string::npos) << path;
}

}  // namespace
}  // namespace halfstep::files
