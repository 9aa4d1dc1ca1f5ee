// A trace of LibTorch's profiler is written whole, or its failure is reported.
#include "train/trace.h"

#include <gtest/gtest.h>
#include <halfstep/error.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "support/scratch.h"

namespace halfstep {
namespace {

using testing::read_text;
using testing::ScratchFolder;
using train::Trace;

int code_of_writing(Trace& trace, const std::filesystem::path& path) {
  try {
    trace.write(path);
    return 0;
  } catch (const FileError& error) {
    return error.code();
  }
}

TEST(Trace, HoldsTheOperations) {
  const ScratchFolder folder;
  Trace trace;
  torch::mm(torch::ones({4, 4}), torch::ones({4, 4}));
  EXPECT_EQ(code_of_writing(trace, folder / "trace.json"), 0);
  const auto told = nlohmann::json::parse(read_text(folder / "trace.json"));
  EXPECT_NE(told["traceEvents"].dump().find("aten::mm"), std::string::npos);
}

TEST(Trace, FolderThatDoesNotTakeItIsAnError) {
  const ScratchFolder folder;
  Trace trace;
  torch::mm(torch::ones({4, 4}), torch::ones({4, 4}));
  EXPECT_EQ(code_of_writing(trace, folder / "none/trace.json"), ENOENT);
}

TEST(Trace, DiskThatIsFullIsAnErrorAndLeavesNoFile) {
  const ScratchFolder folder;
  Trace trace;
  for (int i = 0; i < 200; ++i) torch::mm(torch::ones({4, 4}), torch::ones({4, 4}));
  // Writes beyond the limit are refused, as on a full disk.
  const auto old_action = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 10'000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const int code = code_of_writing(trace, folder / "trace.json");
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old_action);
  EXPECT_EQ(code, EIO);
  EXPECT_FALSE(std::filesystem::exists(folder / "trace.json"));
}

}  // namespace
}  // namespace halfstep
