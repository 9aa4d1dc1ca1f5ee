// What ranks tell one another, in real processes, and what they say when one is gone.
#include <gtest/gtest.h>
#include <halfstep/ranks.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <torch/torch.h>
#include <unistd.h>

#include <iostream>
#include <thread>

#include "distributed/rank_processes.h"
#include "support/error_of.h"

namespace halfstep {
namespace {

using testing::error_of;
using testing::RankOutcome;
using testing::RankProcesses;
using testing::texts_of_ranks;

HALFSTEP_RANK_CASE(exchanges) {
  const at::Tensor sum = torch::full({1000}, ranks.rank() + 1.0f);
  ranks.sum(sum);
  const at::Tensor largest = torch::tensor({ranks.rank(), -ranks.rank()}, at::kLong);
  ranks.largest(largest);
  const at::Tensor sent = torch::full({3}, static_cast<float>(ranks.rank()));
  ranks.broadcast(sent, ranks.size() - 1);
  const at::Tensor all = ranks.gathered(torch::tensor({ranks.rank() * 10, ranks.rank()}));
  ranks.barrier();
  std::ostringstream text;
  text << ranks.size() << " " << sum[999].item<float>() << " " << largest[0].item<int64_t>() << " "
       << largest[1].item<int64_t>() << " " << sent[2].item<float>() << " " << all.sizes() << " "
       << all[ranks.size() - 1][0].item<int64_t>();
  return text.str();
}

TEST(Ranks, Exchange) {
  for (const int size : {2, 3, 8}) {
    const double sum = size * (size + 1) / 2.0;
    std::ostringstream expected;
    expected << size << " " << sum << " " << size - 1 << " 0 " << size - 1 << " [" << size << ", 2] "
             << (size - 1) * 10;
    for (const std::string& text : texts_of_ranks(size, "exchanges")) EXPECT_EQ(text, expected.str());
  }
}

TEST(Ranks, AloneExchangesWithItself) {
  const Ranks alone;
  EXPECT_EQ(alone.rank(), 0);
  EXPECT_EQ(alone.size(), 1);
  const at::Tensor tensor = torch::ones({3});
  alone.sum(tensor);
  alone.broadcast(tensor);
  alone.barrier();
  EXPECT_TRUE(tensor.equal(torch::ones({3})));
  EXPECT_TRUE(alone.gathered(tensor).equal(torch::ones({1, 3})));
}

TEST(Ranks, SharesFollowOneAnother) {
  const Ranks alone;
  EXPECT_EQ(alone.share(7).count, 7);
  EXPECT_EQ(alone.share(7).first, 0);
}

TEST(Ranks, LargestIsForIntegers) {
  EXPECT_NE(error_of([] { Ranks().largest(torch::ones({2})); }).find("may lose a NaN"), std::string::npos);
}

struct Variables {
  explicit Variables(std::map<std::string, std::string> values) : names(std::move(values)) {
    for (const auto& [name, value] : names) setenv(name.c_str(), value.c_str(), 1);
  }
  ~Variables() {
    for (const auto& [name, value] : names) unsetenv(name.c_str());
  }
  std::map<std::string, std::string> names;
};

TEST(Ranks, VariablesAreChecked) {
  EXPECT_EQ(Ranks::from_environment().size(), 1);
  {
    const Variables alone({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
    EXPECT_EQ(Ranks::from_environment().size(), 1);
  }
  {
    const Variables leftover({{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}});
    EXPECT_EQ(Ranks::from_environment().size(), 1);
  }
  const auto refusal = [](std::map<std::string, std::string> values) {
    const Variables set(std::move(values));
    return error_of([] { Ranks::from_environment(); });
  };
  EXPECT_NE(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}}).find("MASTER_ADDR, MASTER_PORT is not set"),
            std::string::npos);
  EXPECT_NE(refusal({{"WORLD_SIZE", "two"}}).find("WORLD_SIZE is 'two'"), std::string::npos);
  const std::map<std::string, std::string> place{{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1"}};
  auto beyond = place;
  beyond.insert({{"RANK", "2"}, {"WORLD_SIZE", "2"}});
  EXPECT_NE(refusal(beyond).find("RANK is 2 of WORLD_SIZE 2"), std::string::npos);
}

HALFSTEP_RANK_CASE(sums_for_ever) {
  const at::Tensor tensor = torch::ones({1 << 16});
  for (int i = 0;; ++i) {
    ranks.sum(tensor.fill_(1));
    if (i == 20) std::cout << "going" << std::endl;
  }
}

TEST(Ranks, ARankThatIsKilledIsNamedByTheOthers) {
  for (const int size : {2, 4}) {
    RankProcesses processes(size, "sums_for_ever");
    for (int rank = 0; rank < size; ++rank) processes.wait_for_text(rank, "going");
    const int victim = size - 1;
    const auto killed = std::chrono::steady_clock::now();
    processes.kill(victim, SIGKILL);
    const auto outcomes = processes.outcomes();
    EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(3));
    EXPECT_EQ(outcomes[static_cast<size_t>(victim)].signal, SIGKILL);
    for (int rank = 0; rank < size; ++rank) {
      if (rank == victim) continue;
      const RankOutcome& outcome = outcomes[static_cast<size_t>(rank)];
      EXPECT_EQ(outcome.exit_code, 3);
      EXPECT_NE(outcome.text.find("rank " + std::to_string(victim) + " is gone"), std::string::npos)
          << outcome.text;
    }
  }
}

TEST(Ranks, TheReasonIsToldWhereItIsKnown) {
  RankProcesses processes(2, "sums_for_ever");
  for (int rank = 0; rank < 2; ++rank) processes.wait_for_text(rank, "going");
  processes.meeting().announce_lost(1, "killed by signal 9");
  processes.kill(1, SIGKILL);
  const RankOutcome survivor = processes.outcomes()[0];
  EXPECT_NE(survivor.text.find("rank 1 is gone: killed by signal 9."), std::string::npos) << survivor.text;
}

TEST(Ranks, ARankThatHangsIsNamedAtTheTimeout) {
  RankProcesses processes(3, "sums_for_ever", {}, /*timeout_ms=*/2000);
  for (int rank = 0; rank < 3; ++rank) processes.wait_for_text(rank, "going");
  processes.kill(1, SIGSTOP);
  for (const int rank : {0, 2}) {
    const std::string text = processes.wait_for_text(rank, "did not answer");
    EXPECT_NE(text.find("rank 1 is gone, or did not answer within 2 s"), std::string::npos) << text;
  }
}

HALFSTEP_RANK_CASE(one_is_late) {
  ranks.barrier();
  std::cout << "going" << std::endl;
  if (ranks.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(600));
  ranks.barrier();
  return "never";
}

TEST(Ranks, ALossThatIsAnnouncedIsHeardOfInTheMiddleOfAnExchange) {
  RankProcesses processes(2, "one_is_late");
  for (int rank = 0; rank < 2; ++rank) processes.wait_for_text(rank, "going");
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // pauses have grown
  const auto announced = std::chrono::steady_clock::now();
  processes.meeting().announce_lost(1, "its host is gone");  // its connections are as they were
  const std::string text = processes.wait_for_text(0, "is gone");
  EXPECT_NE(text.find("rank 1 is gone: its host is gone."), std::string::npos) << text;
  EXPECT_LT(std::chrono::steady_clock::now() - announced, std::chrono::seconds(2));
}

void wait_until_joined(RankProcesses& processes, int rank) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!processes.meeting().has_joined(rank) && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  ASSERT_TRUE(processes.meeting().has_joined(rank));
}

TEST(Ranks, OneThatIsKilledWhileAllConnectIsNamed) {
  for (const int victim : {0, 2}) {
    RankProcesses processes(3, "sums_for_ever");
    EXPECT_FALSE(processes.meeting().has_joined(3));
    wait_until_joined(processes, victim);
    processes.kill(victim, SIGSTOP);  // the others cannot get further than it did
    for (int rank = 0; rank < 3; ++rank) wait_until_joined(processes, rank);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const auto killed = std::chrono::steady_clock::now();
    processes.kill(victim, SIGKILL);
    processes.meeting().announce_lost(victim, "killed by signal 9");
    const auto outcomes = processes.outcomes();
    EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(2));
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      const RankOutcome& outcome = outcomes[static_cast<size_t>(rank)];
      EXPECT_EQ(outcome.exit_code, 3) << "signal " << outcome.signal;
      EXPECT_NE(outcome.text.find(detail::concat("rank ", victim, " is gone: killed by signal 9")),
                std::string::npos)
          << outcome.text;
    }
  }
}

TEST(Ranks, JunkAtTheMeetingPlaceDoesNoHarm) {
  RankProcesses processes(2, "sums_for_ever");
  for (int rank = 0; rank < 2; ++rank) processes.wait_for_text(rank, "going");
  for (int i = 0; i < 50; ++i) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in there{};
    there.sin_family = AF_INET;
    there.sin_port = htons(processes.port());
    there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&there), sizeof there), 0);
    std::string junk(static_cast<size_t>(1 + i * 37), static_cast<char>(i * 11));
    (void)!write(fd, junk.data(), junk.size());
    close(fd);
  }
  processes.meeting().announce_lost(0, "the test is over");  // the store still answers
  processes.kill(0, SIGKILL);
  EXPECT_NE(processes.outcomes()[1].text.find("the test is over"), std::string::npos);
}

TEST(Ranks, TheMeetingPlaceListensOnLoopbackAlone) {
  const MeetingPlace meeting;
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in there{};
  there.sin_family = AF_INET;
  there.sin_port = htons(meeting.port());
  there.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);  // 127.0.0.2: this host, another address
  EXPECT_NE(connect(fd, reinterpret_cast<sockaddr*>(&there), sizeof there), 0);
  close(fd);
}

HALFSTEP_RANK_CASE(decides) {
  const auto join = [](const std::vector<std::string>& texts) {
    std::string all;
    for (const std::string& text : texts) all += text;
    return all;
  };
  const std::string me = std::to_string(ranks.rank());
  // Two conversations by two threads, in an order of their own on each rank, beside sums.
  std::string one, two;
  std::thread other([&] {
    for (int i = 0; i < 20; ++i) one += ranks.decided("one", "a" + me, join) + " ";
  });
  std::thread third([&] {
    if (ranks.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(30));
    for (int i = 0; i < 20; ++i) two += ranks.decided("two", "b" + me, join) + " ";
  });
  for (int i = 0; i < 50; ++i) ranks.sum(torch::ones({1000}));
  other.join();
  third.join();
  std::string expected_one, expected_two;
  for (int i = 0; i < 20; ++i) expected_one += "a0a1 ", expected_two += "b0b1 ";
  if (one != expected_one || two != expected_two) return one + two;
  // Another handle counts for itself, and what rank 0 throws all throw.
  const Ranks again = Ranks::from_environment();
  if (again.decided("one", "c" + me, join) != "c0c1") return "another handle's answer";
  try {
    (void)ranks.decided("one", me, [](const auto&) -> std::string { throw Error("no answer"); });
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Ranks, DecideAboutSeveralThingsAtATime) {
  for (const std::string& text : texts_of_ranks(2, "decides")) EXPECT_EQ(text, "no answer");
}

HALFSTEP_RANK_CASE(waits_for_a_disk) {
  const auto none = [](const std::vector<std::string>&) { return std::string(); };
  (void)ranks.decided("a save", "", none);
  // Longer than the timeout, but alive.
  if (ranks.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(3000));
  (void)ranks.decided("a save", "", none);
  std::cout << "going" << std::endl;
  if (ranks.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(600));
  return ranks.decided("a save", "", none);
}

TEST(Ranks, OneThatHangsIsNamedWhereADiskMayTakeAsLongAsItWants) {
  RankProcesses processes(2, "waits_for_a_disk", {}, /*timeout_ms=*/1000);
  for (int rank = 0; rank < 2; ++rank) processes.wait_for_text(rank, "going");
  processes.kill(1, SIGSTOP);
  const std::string text = processes.wait_for_text(0, "did not answer");
  EXPECT_NE(text.find("about a save: rank 1 is gone, or did not answer within 1 s"), std::string::npos)
      << text;
}

HALFSTEP_RANK_CASE(leaves_early) {
  if (ranks.rank() == 1) return "left";
  ranks.barrier();
  return "never";
}

TEST(Ranks, ARankThatEndsEarlyIsNamed) {
  RankProcesses processes(2, "leaves_early");
  const auto outcomes = processes.outcomes();
  EXPECT_EQ(outcomes[1].text, "left");
  EXPECT_NE(outcomes[0].text.find("rank 1 is gone"), std::string::npos) << outcomes[0].text;
}

TEST(Ranks, ARankThatEndsEarlyIsSaidToHaveEndedWhereThatIsKnown) {
  RankProcesses processes(2, "leaves_early");
  processes.meeting().announce_end(1);
  EXPECT_NE(processes.outcomes()[0].text.find("rank 1 has ended without an error"), std::string::npos);
}

}  // namespace
}  // namespace halfstep
