#include <gtest/gtest.h>
#include <halfstep/data.h>

#include <map>
#include <numeric>

#include "support/error_of.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

using testing::error_of;

class TokenBatchesOf : public ::testing::Test {
 protected:
  /// A file of the tokens first, first + 1, ...: a token tells where it stood.
  TokenFile file_of(int32_t first, int32_t count) {
    const auto path = folder_ / (std::to_string(first) + ".bin");
    std::vector<int32_t> ids(static_cast<size_t>(count));
    std::iota(ids.begin(), ids.end(), first);
    TokenFileWriter writer(path, TokenFormat::Raw32, kVocabulary);
    writer.append(ids);
    writer.commit();
    return TokenFile(path, {.vocabulary_size = kVocabulary, .format = TokenFormat::Raw32});
  }

  std::vector<TokenFile> files_of(const std::vector<std::pair<int32_t, int32_t>>& ranges) {
    std::vector<TokenFile> files;
    for (const auto& [first, count] : ranges) files.push_back(file_of(first, count));
    return files;
  }

  static constexpr int64_t kVocabulary = 1'000'000;
  const testing::ScratchFolder folder_;
};

// Three files: 10 windows of 4 with one token left, none, and 25 windows exactly.
TEST_F(TokenBatchesOf, EveryWindowComesOnceAnEpoch) {
  TokenBatches batches(files_of({{0, 42}, {1000, 4}, {2000, 101}}), {.batch_size = 3, .sequence_length = 4});
  ASSERT_EQ(batches.windows(), 35);
  for (int epoch = 0; epoch < 3; ++epoch) {
    std::map<int64_t, int> times;
    // 3 does not divide 35: the sequences are taken one by one from batches that cross epochs.
    for (int64_t i = 0; i < 35; ++i) {
      TokenBatches at(files_of({{0, 42}, {1000, 4}, {2000, 101}}), {.batch_size = 1, .sequence_length = 4});
      auto state = at.state_dict();
      state.set("sequences_taken", epoch * int64_t{35} + i);
      at.load_state_dict(state);
      EXPECT_EQ(at.epoch(), epoch);
      ++times[at.next().inputs[0][0].item<int64_t>()];
    }
    EXPECT_EQ(times.size(), 35u);
    for (const auto& [first, count] : times) {
      EXPECT_EQ(count, 1) << first;
      EXPECT_EQ((first % 1000) % 4, 0) << first;
    }
  }
}

// Two sequences of six: a prompt of one and an answer of two, one of two and two, and one that is filled up.
TEST_F(TokenBatchesOf, MarksMakeTargetsThatDoNotCountAndNumberTheTexts) {
  constexpr TokenMarks kBegin{.begins_text = true, .is_given = true},
      kGiven{.begins_text = false, .is_given = true};
  const auto path = folder_ / "marked.tokens";
  TokenFileWriter writer(path, TokenFormat::Marked32, 100);
  const std::vector<int32_t> ids = {10, 11, 12, 20, 21, 22, 30, 31, 32, 33, 0, 0, 0};
  const std::vector<TokenMarks> marks = {kBegin, {}, {}, kBegin, kGiven, {},    kBegin,
                                         {},     {}, {}, kBegin, kGiven, kBegin};
  writer.append(ids, marks);
  writer.commit();
  std::vector<TokenFile> files;
  files.emplace_back(path, TokenFileOptions{.vocabulary_size = 100});
  TokenBatches batches(std::move(files), {.batch_size = 2, .sequence_length = 6, .shuffle = false});
  const TokenBatch batch = batches.next();
  const auto rows = [](const at::Tensor& tensor) {
    const at::Tensor flat = tensor.flatten();
    return std::vector<int64_t>(flat.data_ptr<int64_t>(), flat.data_ptr<int64_t>() + flat.numel());
  };
  EXPECT_EQ(rows(batch.inputs), std::vector<int64_t>(ids.begin(), ids.end() - 1));
  EXPECT_EQ(rows(batch.targets),
            (std::vector<int64_t>{11, 12, -100, -100, 22, -100, 31, 32, 33, -100, -100, -100}));
  EXPECT_EQ(rows(batch.documents), (std::vector<int64_t>{0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1}));
  std::vector<TokenFile> both = files_of({{0, 100}});
  both.emplace_back(path, TokenFileOptions{.vocabulary_size = 100});
  EXPECT_NE(error_of([&] {
              TokenBatches(std::move(both), {.batch_size = 1, .sequence_length = 6});
            }).find("has marks"),
            std::string::npos);
}

TEST_F(TokenBatchesOf, TargetsAreTheTokensAfterTheInputs) {
  TokenBatches batches(files_of({{0, 1001}}), {.batch_size = 5, .sequence_length = 10});
  for (int i = 0; i < 50; ++i) {
    const TokenBatch batch = batches.next();
    EXPECT_EQ(batch.inputs.sizes(), (at::IntArrayRef{5, 10}));
    EXPECT_EQ(batch.inputs.scalar_type(), at::kLong);
    EXPECT_TRUE(batch.targets.equal(batch.inputs + 1));
  }
}

TEST_F(TokenBatchesOf, AResumedRunSeesTheBatchesOfTheUninterruptedOne) {
  const TokenBatchOptions options{.batch_size = 3, .sequence_length = 4, .seed = 9};
  TokenBatches whole(files_of({{0, 41}}), options);  // 10 windows: batches cross epochs
  for (int step = 0; step < 12; ++step) {
    TokenBatches resumed(files_of({{0, 41}}), options);
    resumed.load_state_dict(whole.state_dict());
    TokenBatches ahead(files_of({{0, 41}}), options);
    ahead.load_state_dict(whole.state_dict());
    for (int i = 0; i < 4; ++i) {
      const auto a = ahead.next(), b = resumed.next();
      EXPECT_TRUE(a.inputs.equal(b.inputs) && a.targets.equal(b.targets));
    }
    whole.next();
  }
  // Against one that never stopped, at the last place.
  TokenBatches again(files_of({{0, 41}}), options);
  for (int step = 0; step < 12; ++step) again.next();
  EXPECT_TRUE(again.next().inputs.equal(whole.next().inputs));
}

TEST_F(TokenBatchesOf, OtherSeedsAndEpochsHaveOtherOrders) {
  const auto first_epoch = [&](uint64_t seed) {
    return TokenBatches(files_of({{0, 401}}), {.batch_size = 100, .sequence_length = 4, .seed = seed})
        .next()
        .inputs;
  };
  EXPECT_FALSE(first_epoch(1).equal(first_epoch(2)));
  TokenBatches batches(files_of({{0, 401}}), {.batch_size = 100, .sequence_length = 4});
  const auto one = batches.next().inputs, two = batches.next().inputs;
  EXPECT_FALSE(one.equal(two));
}

TEST_F(TokenBatchesOf, InOrderTheLastBatchOfAnEpochIsShorterAndThenItBeginsAgain) {
  TokenBatches batches(files_of({{0, 42}}), {.batch_size = 4, .sequence_length = 4, .shuffle = false});
  std::vector<int64_t> rows, firsts;
  for (int i = 0; i < 4; ++i) {
    const auto batch = batches.next();
    rows.push_back(batch.inputs.size(0));
    firsts.push_back(batch.inputs[0][0].item<int64_t>());
  }
  EXPECT_EQ(rows, (std::vector<int64_t>{4, 4, 2, 4}));
  EXPECT_EQ(firsts, (std::vector<int64_t>{0, 16, 32, 0}));
}

TEST_F(TokenBatchesOf, AStateOfOtherDataIsRefusedWithAllThatDiffers) {
  TokenBatches a(files_of({{0, 42}}), {.batch_size = 4, .sequence_length = 4});
  TokenBatches b(files_of({{0, 50}}), {.batch_size = 4, .sequence_length = 5, .seed = 3});
  const std::string message = error_of([&] { b.load_state_dict(a.state_dict()); });
  for (const char* const word : {"tokens 42 (here 50)", "sequence_length 4 (here 5)", "seed 0 (here 3)"})
    EXPECT_NE(message.find(word), std::string::npos) << message;
}

// A glob may list files in another order on another machine.
TEST_F(TokenBatchesOf, AStateOfTheSameFilesInAnotherOrderIsRefused) {
  TokenBatches a(files_of({{0, 42}, {1000, 42}}), {.batch_size = 4, .sequence_length = 4});
  TokenBatches b(files_of({{1000, 42}, {0, 42}}), {.batch_size = 4, .sequence_length = 4});
  EXPECT_NE(error_of([&] { b.load_state_dict(a.state_dict()); }).find("other ids in the files"),
            std::string::npos);
}

TEST_F(TokenBatchesOf, TooFewTokensOrNoSizesAreRefused) {
  EXPECT_NE(error_of([&] {
              TokenBatches(files_of({{0, 4}}), {.batch_size = 1, .sequence_length = 4});
            }).find("4 tokens in all"),
            std::string::npos);
  EXPECT_NE(error_of([&] { TokenBatches(files_of({{0, 40}}), {.batch_size = 1}); }).find("sequence_length 0"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep
