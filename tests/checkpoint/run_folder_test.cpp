// A run's folder: what is kept, who may write, and what is refused before the first step.
#include <gtest/gtest.h>
#include <halfstep/safetensors.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <csignal>
#include <deque>
#include <fstream>
#include <functional>
#include <thread>

#include "checkpoint/content.h"
#include "checkpoint/leftovers.h"
#include "checkpoint_format/checkpoint_reader.h"
#include "checkpoint_format/step_folders.h"
#include "support/error_of.h"

namespace halfstep::testing {
namespace {

namespace fs = std::filesystem;
using files::checkpoint_steps;
using files::CheckpointWriter;
using Steps = std::vector<int64_t>;

struct RunFolder : ::testing::Test {
  ScratchFolder scratch;
  fs::path run = scratch.path() / "a" / "run";  // both are made

  void save(CheckpointWriter& writer, int64_t step) { writer.save(Content({}, step).checkpoint()); }
};

TEST_F(RunFolder, KeepsTheLastOfItsCheckpoints) {
  CheckpointWriter writer(run, {.keep_last = 2});
  for (const int64_t step : Steps{0, 1, 10, 2'000'000'000'000}) save(writer, step);
  EXPECT_EQ(checkpoint_steps(run), (Steps{10, 2'000'000'000'000}));
  for (const int64_t step : checkpoint_steps(run)) EXPECT_EQ(fault_of(run, {}, step), "");
  EXPECT_TRUE(leftovers_in(run).empty());
}

TEST_F(RunFolder, KeepsAllWhenAskedTo) {
  CheckpointWriter writer(run, {.keep_last = 0});
  for (int64_t step = 0; step < 5; ++step) save(writer, step);
  EXPECT_EQ(checkpoint_steps(run).size(), 5u);
}

TEST_F(RunFolder, TheTensorsAreAPlainSafetensorsFile) {
  CheckpointWriter writer(run, {.keep_last = 0});
  save(writer, 3);
  const SafetensorsFile file(run / "step-000000003" / "tensors.safetensors");
  EXPECT_TRUE(file.contains("model/t0"));
  EXPECT_TRUE(file.contains("optimizer/t1"));
  EXPECT_EQ(file.entries().size(), 4u);
}

TEST_F(RunFolder, AStepThatIsNotTheNewestIsRefused) {
  CheckpointWriter writer(run, {.keep_last = 0});
  for (const int64_t step : {5, 6, 7}) save(writer, step);
  for (const int64_t step : {4, 7})
    EXPECT_NE(error_of([&] { save(writer, step); }).find("there is a checkpoint of step 7"),
              std::string::npos);
  EXPECT_NE(error_of([&] { save(writer, -1); }).find("negative"), std::string::npos);
  writer.remove_newer_than(5);
  EXPECT_EQ(checkpoint_steps(run), (Steps{5}));
  save(writer, 6);
  EXPECT_EQ(checkpoint_steps(run), (Steps{5, 6}));
  EXPECT_TRUE(leftovers_in(run).empty());
}

TEST_F(RunFolder, AStepThatIsSavedAgainIsJudgedAnew) {
  CheckpointWriter writer(run, {.keep_last = 2});
  const auto save = [&](int64_t step, bool healthy) {
    const Content content({}, step);
    files::CheckpointToSave checkpoint = content.checkpoint();
    checkpoint.healthy = healthy;
    writer.save(checkpoint);
  };
  save(1, true);
  save(2, false);
  writer.remove_newer_than(1);
  for (const int64_t step : {2, 3}) save(step, true);
  EXPECT_EQ(checkpoint_steps(run), (std::vector<int64_t>{2, 3}));
}

/// Ranks as threads.
class Deciders {
 public:
  explicit Deciders(int size) : texts_(static_cast<size_t>(size)), here_(size, Decide{this}) {}

  files::SavingRanks rank(int number) {
    return {.rank = number,
            .size = static_cast<int>(texts_.size()),
            .decided = [this, number](const std::string& text, const auto& decide) {
              texts_[static_cast<size_t>(number)] = text;
              if (number == 0) decide_ = decide;
              here_.arrive_and_wait();
              return verdict_;
            }};
  }

 private:
  struct Decide {
    Deciders* all;
    void operator()() noexcept { all->verdict_ = all->decide_(all->texts_); }
  };

  std::vector<std::string> texts_;
  std::function<std::string(const std::vector<std::string>&)> decide_;
  std::string verdict_;
  std::barrier<Decide> here_;
};

TEST_F(RunFolder, OfMoreRanksThanAProcessCanOpenFiles) {
  constexpr int kRanks = 100;
  Deciders deciders(kRanks);
  CheckpointWriter writer(run, {.keep_last = 1});
  const Content content({}, 3);
  std::vector<std::thread> others;
  for (int rank = 1; rank < kRanks; ++rank)
    others.emplace_back([&, rank] { save_with_first(run, content.checkpoint(), deciders.rank(rank)); });
  writer.save(content.checkpoint(), deciders.rank(0));
  for (std::thread& other : others) other.join();

  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{.rlim_cur = 64, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  EXPECT_EQ(files::verify_checkpoint(run, 3), std::vector<std::string>{});
  const files::CheckpointReader first(run, 3);
  std::deque<files::CheckpointReader> all;
  EXPECT_EQ(error_of([&] {
              for (size_t rank = 1; rank < kRanks; ++rank) {
                const auto& part = all.emplace_back(first, rank).manifest().parts[0];
                std::vector<std::byte> bytes(part.tensors[0].end - part.tensors[0].begin);
                all.back().read(part, part.tensors[0], bytes);
              }
            }),
            "no error");
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST_F(RunFolder, ASecondWriterIsToldWhoTheFirstIs) {
  std::optional<CheckpointWriter> first(std::in_place, run, files::Retention{.keep_last = 0});
  const std::string message = error_of([&] { CheckpointWriter second(run, {.keep_last = 0}); });
  EXPECT_NE(message.find("process " + std::to_string(::getpid())), std::string::npos) << message;
  first.reset();
  CheckpointWriter second(run, {.keep_last = 0});
}

TEST_F(RunFolder, TheLockOfAKilledWriterIsFree) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const CheckpointWriter writer(run, {.keep_last = 0});
    (void)!::write(ready[1], "x", 1);
    for (;;) ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_NE(error_of([&] {
              CheckpointWriter second(run, {.keep_last = 0});
            }).find("process " + std::to_string(child)),
            std::string::npos);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  const CheckpointWriter second(run, {.keep_last = 0});
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(RunFolder, LeftoversAreRemovedAndStrangersFilesAreNot) {
  {
    CheckpointWriter(run, {.keep_last = 0}).save(Content({}, 1).checkpoint());
  }
  for (const char* name : {".aside-step-000000002", ".removed-step-000000000"}) {
    fs::create_directories(run / name);
    std::ofstream(run / name / "tensors.safetensors") << "half";
  }
  std::ofstream(run / "notes.txt") << "mine";
  fs::create_directories(run / "step-2");  // not a name that Halfstep gives
  fs::create_directories(run / "step-000000002x");
  CheckpointWriter writer(run, {.keep_last = 1});
  save(writer, 2);
  EXPECT_EQ(checkpoint_steps(run), (Steps{2}));
  EXPECT_TRUE(fs::exists(run / "notes.txt"));
  EXPECT_TRUE(fs::exists(run / "step-2"));
  EXPECT_EQ(leftovers_in(run), (std::vector<std::string>{"notes.txt"}));
}

TEST_F(RunFolder, FoldersWithinACheckpointGoWithItAndLinksAreNotFollowed) {
  const fs::path elsewhere = scratch.path() / "elsewhere";
  fs::create_directories(elsewhere);
  std::ofstream(elsewhere / "file") << "precious";
  CheckpointWriter writer(run, {.keep_last = 1});
  save(writer, 1);
  fs::create_directories(run / "step-000000001" / "plots" / "deep");
  std::ofstream(run / "step-000000001" / "plots" / "deep" / "loss.png") << "x";
  fs::create_directory_symlink(elsewhere, run / "step-000000001" / "plots" / "link");
  save(writer, 2);
  EXPECT_EQ(checkpoint_steps(run), (Steps{2}));
  EXPECT_TRUE(leftovers_in(run).empty());
  EXPECT_TRUE(fs::exists(elsewhere / "file"));
}

/// As somebody whom permissions concern, as long as it lives.
struct AsNobody {
  static constexpr uid_t kNobody = 65534;
  const bool was_root = ::geteuid() == 0;
  explicit AsNobody(const fs::path& owned) {
    if (was_root && (::chown(owned.c_str(), kNobody, kNobody) != 0 || ::seteuid(kNobody) != 0))
      throw std::runtime_error("cannot become nobody");
  }
  ~AsNobody() {
    if (was_root) (void)!::seteuid(0);
  }
};

TEST_F(RunFolder, WhatCannotBeRemovedIsToldOnceAndStopsNeitherSavingNorOpening) {
  const AsNobody nobody(scratch.path());
  {
    CheckpointWriter writer(run, {.keep_last = 1});
    save(writer, 1);
    const fs::path stuck = run / "step-000000001" / "stuck";  // as an immutable file, or one that NFS holds
    fs::create_directories(stuck);
    std::ofstream(stuck / "file") << "x";
    ASSERT_EQ(::chmod(stuck.c_str(), 0555), 0);
    const std::string message = error_of([&] { save(writer, 2); });
    EXPECT_NE(message.find("the checkpoint is saved, but an older one could not be removed"),
              std::string::npos)
        << message;
    save(writer, 3);
    EXPECT_FALSE(fs::exists(run / ".removed-step-000000001" / "tensors.safetensors"));
  }
  CheckpointWriter writer(run, {.keep_last = 1});
  save(writer, 4);
  EXPECT_EQ(checkpoint_steps(run), (Steps{4}));
  writer.remove_newer_than(0);
  for (const int64_t step : {1, 2}) save(writer, step);  // step 1 is removed again, beside what is left of it
  EXPECT_EQ(checkpoint_steps(run), (Steps{2}));
  EXPECT_EQ(leftovers_in(run), (std::vector<std::string>{".removed-step-000000001"}));
  ::chmod((run / ".removed-step-000000001" / "stuck").c_str(), 0755);
}

TEST_F(RunFolder, NamesThatOnlyBeginLikeOursAreStrangers) {
  fs::create_directories(run / ".removed-old-notes");
  std::ofstream(run / ".aside-step-7") << "not a name that Halfstep gives";
  CheckpointWriter writer(run, {.keep_last = 1});
  save(writer, 1);
  EXPECT_TRUE(fs::exists(run / ".removed-old-notes"));
  EXPECT_TRUE(fs::exists(run / ".aside-step-7"));
}

TEST_F(RunFolder, ALockRemovedByHandLetsNoSecondWriterIn) {
  const CheckpointWriter first(run, {.keep_last = 0});
  fs::remove(run / ".lock");
  EXPECT_NE(error_of([&] { CheckpointWriter second(run, {.keep_last = 0}); }).find("writes into this folder"),
            std::string::npos);
}

// Else the last good one would be removed in favour of one that nobody can read.
TEST_F(RunFolder, WhatCouldNotBeReadAgainIsNotSaved) {
  CheckpointWriter writer(run, {.keep_last = 1});
  save(writer, 1);
  const auto refusal = [&](files::PartToSave part) {
    return error_of([&] { writer.save({.step = 2, .parts = {std::move(part)}}); });
  };
  const std::byte two{2};
  EXPECT_NE(refusal({.name = "model",
                     .tensors = {{.tensor = {.name = "mask",
                                             .type = TensorType::BOOL,
                                             .shape = {1},
                                             .bytes = std::span(&two, 1)}}}})
                .find("neither 0 nor 1"),
            std::string::npos);
  EXPECT_NE(refusal({.name = "model", .scalars = {{"text", std::string(size_t{65} << 20, 'x')}}})
                .find("at most 67108864"),
            std::string::npos);
  EXPECT_NE(refusal({.name = "model",
                     .scalars = {{"twice", int64_t{1}}},
                     .tensors = {{.tensor = {.name = "twice", .type = TensorType::U8, .shape = {0}}}}})
                .find("occurs twice"),
            std::string::npos);
  EXPECT_EQ(checkpoint_steps(run), (Steps{1}));
  EXPECT_EQ(fault_of(run, {}, 1), "");
  EXPECT_TRUE(leftovers_in(run).empty());
}

TEST_F(RunFolder, ThatIsALinkIsFollowedOnceAndForAll) {
  const fs::path first = scratch.path() / "first", second = scratch.path() / "second";
  fs::create_directories(first);
  fs::create_directories(second);
  const fs::path link = scratch.path() / "link";
  fs::create_directory_symlink(first, link);
  CheckpointWriter writer(link, {.keep_last = 0});
  fs::remove(link);
  fs::create_directory_symlink(second, link);
  save(writer, 1);
  EXPECT_EQ(checkpoint_steps(first), (Steps{1}));
  EXPECT_EQ(checkpoint_steps(second), (Steps{}));
}

TEST_F(RunFolder, LinksInPlaceOfWhatIsInItAreRefused) {
  {
    CheckpointWriter(run, {.keep_last = 0}).save(Content({}, 1).checkpoint());
  }
  const fs::path elsewhere = scratch.path() / "elsewhere";
  fs::rename(run / "step-000000001", elsewhere);
  fs::create_directory_symlink(elsewhere, run / "step-000000001");
  EXPECT_NE(error_of([&] { checkpoint_steps(run); }).find("is a link"), std::string::npos);
  EXPECT_NE(fault_of(run, {}, 1).find("is a link"), std::string::npos);

  fs::remove(run / "step-000000001");
  fs::create_directories(run / "step-000000001");
  for (const char* name : {"manifest.json", "tensors.safetensors"})
    fs::create_symlink(elsewhere / name, run / "step-000000001" / name);
  EXPECT_NE(fault_of(run, {}, 1).find("is a link"), std::string::npos);

  fs::remove(run / ".lock");
  std::ofstream(scratch.path() / "target") << "precious";
  fs::create_symlink(scratch.path() / "target", run / ".lock");
  EXPECT_NE(error_of([&] { CheckpointWriter writer(run, {.keep_last = 0}); }).find("ELOOP"),
            std::string::npos);
  EXPECT_EQ(fs::file_size(scratch.path() / "target"), 8u);
}

TEST_F(RunFolder, ThatIsAFileIsRefused) {
  std::ofstream(scratch.path() / "file") << "x";
  EXPECT_NE(
      error_of([&] { CheckpointWriter writer(scratch.path() / "file", {.keep_last = 0}); }).find("is a file"),
      std::string::npos);
}

TEST_F(RunFolder, ThatCannotBeWrittenIsRefusedBeforeTheFirstStep) {
  {
    CheckpointWriter(run, {.keep_last = 0}).save(Content({}, 1).checkpoint());
  }
  ASSERT_EQ(::chmod((run / ".lock").c_str(), 0666), 0);
  for (fs::path folder = run; folder != scratch.path().parent_path(); folder = folder.parent_path())
    ASSERT_EQ(::chmod(folder.c_str(), 0555), 0);
  const pid_t child = ::fork();
  if (child == 0) {  // as somebody whom permissions concern
    constexpr uid_t kNobody = 65534;
    if (::geteuid() == 0 && ::seteuid(kNobody) != 0) ::_exit(2);
    try {
      const CheckpointWriter writer(run, {.keep_last = 0});
    } catch (const FileError& error) {
      ::_exit(error.code() == EACCES && fault_of(run, {}, 1).empty() ? 0 : 3);
    }
    ::_exit(4);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  for (fs::path folder = run; folder != scratch.path().parent_path(); folder = folder.parent_path())
    ::chmod(folder.c_str(), 0755);
}

TEST_F(RunFolder, ARenamedCheckpointIsRefused) {
  {
    CheckpointWriter(run, {.keep_last = 0}).save(Content({}, 1).checkpoint());
  }
  fs::rename(run / "step-000000001", run / "step-000000009");
  EXPECT_NE(fault_of(run, {}, 9).find("is of step 1, not 9"), std::string::npos);
}

TEST_F(RunFolder, VerificationNamesEachDamagedTensor) {
  {
    CheckpointWriter(run, {.keep_last = 0}).save(Content({.tensor_count = 6}, 1).checkpoint());
  }
  const fs::path path = run / "step-000000001" / "tensors.safetensors";
  for (const char* name : {"model/t2", "optimizer/t5"}) {
    const SafetensorsFile file(path);
    const uint64_t data = fs::file_size(path) - file.entries().back().end;
    const auto at = static_cast<std::streamoff>(data + file.entry(name).begin);
    std::fstream out(path, std::ios::in | std::ios::out | std::ios::binary);
    out.seekg(at);
    const int byte = out.get();
    out.seekp(at);
    out.put(static_cast<char>(~byte));
  }
  const std::vector<std::string> faults = files::verify_checkpoint(run, 1);
  ASSERT_EQ(faults.size(), 2u);
  EXPECT_NE(faults[0].find("tensor 't2' of part 'model' is damaged"), std::string::npos) << faults[0];
  EXPECT_NE(faults[1].find("tensor 't5' of part 'optimizer' is damaged"), std::string::npos) << faults[1];
}

}  // namespace
}  // namespace halfstep::testing
