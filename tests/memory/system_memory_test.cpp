#include "memory/system_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace halfstep {
namespace {

namespace fs = std::filesystem;

/// A folder that stands for the root of the file system.
class SystemMemoryOf : public ::testing::Test {
 protected:
  SystemMemoryOf() {
    root_ = fs::path(::testing::TempDir()) / ::testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(root_);
    write("proc/meminfo", "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  700 kB\n");
  }
  ~SystemMemoryOf() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  SystemMemory read() const { return system_memory(root_.string()); }

 private:
  fs::path root_;
};

TEST_F(SystemMemoryOf, IsTheMachinesWithoutCgroups) { EXPECT_EQ(read(), (SystemMemory{1024'000, 716'800})); }

TEST_F(SystemMemoryOf, IsTheCgroupsWhereItAllowsLess) {
  write("proc/self/cgroup", "0::/job/step\n");
  write("sys/fs/cgroup/job/step/memory.max", "500000\n");
  write("sys/fs/cgroup/job/step/memory.current", "300000\n");
  write("sys/fs/cgroup/job/step/memory.stat", "anon 200000\ninactive_file 100000\n");
  EXPECT_EQ(read(), (SystemMemory{500'000, 300'000}));
}

TEST_F(SystemMemoryOf, IsThatOfAnOuterCgroupWhereTheInnerSaysMax) {
  write("proc/self/cgroup", "0::/job/step\n");
  write("sys/fs/cgroup/job/step/memory.max", "max\n");
  write("sys/fs/cgroup/job/memory.max", "400000\n");
  write("sys/fs/cgroup/job/memory.current", "450000\n");
  EXPECT_EQ(read(), (SystemMemory{400'000, 0}));
}

TEST_F(SystemMemoryOf, ReadsTheOlderVersionOfCgroups) {
  write("proc/self/cgroup", "5:cpu:/x\n4:memory:/job\n0::/\n");
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "600000\n");
  write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "500000\n");
  write("sys/fs/cgroup/memory/job/memory.stat", "cache 5\ntotal_inactive_file 50000\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(read(), (SystemMemory{600'000, 150'000}));
}

TEST(SystemMemory, OfThisMachineIsPlausible) {
  const SystemMemory memory = system_memory();
  EXPECT_GT(memory.limit_bytes, std::size_t{1} << 20);
  EXPECT_LE(memory.available_bytes, memory.limit_bytes);
}

}  // namespace
}  // namespace halfstep
