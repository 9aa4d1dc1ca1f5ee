// Which sequences ranks take: each of an epoch once, in one order for any number of ranks, after restarts
// too.
#include <gtest/gtest.h>
#include <halfstep/data.h>

#include <map>
#include <numeric>
#include <sstream>

#include "distributed/rank_processes.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

using testing::texts_of_ranks;

constexpr int64_t kLength = 4, kWindows = 100, kBatch = 24;  // batches cross epochs
constexpr int64_t kTokens = kWindows * kLength + 1;
const TokenFileOptions kTokenFile{.vocabulary_size = kTokens, .format = TokenFormat::Raw32};

/// Tokens 0, 1, 2, ...: the first of a sequence tells which one it is.
void write_tokens(const std::filesystem::path& path) {
  std::vector<int32_t> ids(kTokens);
  std::iota(ids.begin(), ids.end(), 0);
  TokenFileWriter writer(path, TokenFormat::Raw32, kTokens);
  writer.append(ids);
  writer.commit();
}

TokenBatches open_batches(const std::filesystem::path& path) {
  std::vector<TokenFile> files;
  files.emplace_back(path, kTokenFile);
  return {std::move(files), {.batch_size = kBatch, .sequence_length = kLength, .seed = 5}};
}

using Sequences = std::vector<int64_t>;

Sequences sequences_of(const TokenBatch& batch) {
  Sequences found;
  for (int64_t row = 0; row < batch.inputs.size(0); ++row)
    found.push_back(batch.inputs[row][0].item<int64_t>() / kLength);
  return found;
}

/// The rows of each rank one after the other: those of the whole batch.
void append(Sequences& all, const Sequences& of_rank) {
  all.insert(all.end(), of_rank.begin(), of_rank.end());
}

void expect_each_once_an_epoch(const Sequences& all) {
  ASSERT_GE(all.size(), 2u * kWindows);
  for (size_t epoch = 0; (epoch + 1) * kWindows <= all.size(); ++epoch) {
    std::map<int64_t, int> times;
    for (size_t i = 0; i < kWindows; ++i) ++times[all[epoch * kWindows + i]];
    ASSERT_EQ(times.size(), static_cast<size_t>(kWindows)) << "epoch " << epoch;
    EXPECT_EQ(times.begin()->first, 0);
    EXPECT_EQ(times.rbegin()->first, kWindows - 1);
  }
}

class DataOrder : public ::testing::Test {
 protected:
  void SetUp() override { write_tokens(path_); }

  /// What one process with `ranks` readers takes in that many batches, from a state or from the beginning.
  Sequences taken(int64_t ranks, int64_t batches, StateDict& state) {
    std::vector<TokenBatches> readers;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      readers.push_back(open_batches(path_));
      if (state.begin() != state.end()) readers.back().load_state_dict(state);
    }
    Sequences all;
    for (int64_t batch = 0; batch < batches; ++batch)
      for (int64_t rank = 0; rank < ranks; ++rank)
        append(all, sequences_of(readers[static_cast<size_t>(rank)].next_part(rank, ranks)));
    for (const TokenBatches& reader : readers)
      EXPECT_EQ(reader.sequences_taken(), readers[0].sequences_taken());
    state = readers.back().state_dict();
    return all;
  }

  const testing::ScratchFolder folder_;
  const std::filesystem::path path_ = folder_ / "tokens.bin";
};

TEST_F(DataOrder, IsThatOfOneProcessForAnyNumberOfRanks) {
  StateDict fresh;
  const Sequences expected = taken(1, 20, fresh);
  expect_each_once_an_epoch(expected);
  for (const int64_t ranks : {2, 3, 4, 8}) {
    StateDict state;
    const Sequences found = taken(ranks, 20, state);
    EXPECT_EQ(found, expected) << ranks << " ranks";
    expect_each_once_an_epoch(found);
  }
}

TEST_F(DataOrder, GoesOnWithTheNextSequenceOnAnotherNumberOfRanks) {
  StateDict fresh;
  const Sequences expected = taken(1, 25, fresh);
  for (const std::vector<int64_t>& numbers :
       {std::vector<int64_t>{1, 2, 3, 4, 8}, {8, 4, 3, 2, 1}, {3, 8, 1, 4, 2}, {2, 2, 8, 8, 3}}) {
    StateDict state;
    Sequences found;
    for (const int64_t ranks : numbers) append(found, taken(ranks, 5, state));
    EXPECT_EQ(found, expected);
    expect_each_once_an_epoch(found);
  }
}

// arguments: token file, batches before, batches to take
HALFSTEP_RANK_CASE(takes_sequences) {
  TokenBatches batches = open_batches(arguments[0]);
  StateDict state = batches.state_dict();
  state.set("sequences_taken", std::atoll(arguments[1].c_str()) * kBatch);
  batches.load_state_dict(state);
  std::ostringstream text;
  for (int64_t i = 0; i < std::atoll(arguments[2].c_str()); ++i)
    for (const int64_t sequence : sequences_of(batches.next_part(ranks.rank(), ranks.size())))
      text << sequence << " ";
  return text.str();
}

TEST_F(DataOrder, OfRealRanksIsThatOfOneProcessToo) {
  StateDict fresh;
  const Sequences expected = taken(1, 10, fresh);
  Sequences found;
  int64_t before = 0;
  for (const auto& [ranks, batches] : {std::pair{8, 6}, {3, 4}}) {
    std::vector<std::istringstream> texts;
    for (const std::string& text : texts_of_ranks(
             ranks, "takes_sequences", {path_.string(), std::to_string(before), std::to_string(batches)}))
      texts.emplace_back(text);
    for (int64_t batch = 0; batch < batches; ++batch)
      for (std::istringstream& text : texts)
        for (int64_t row = 0; row < kBatch / ranks; ++row) {
          int64_t sequence = -1;
          text >> sequence;
          found.push_back(sequence);
        }
    before += batches;
  }
  EXPECT_EQ(found, expected);
  expect_each_once_an_epoch(found);
}

}  // namespace
}  // namespace halfstep
