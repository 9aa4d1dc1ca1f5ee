#include <ATen/ops/arange.h>
#include <gtest/gtest.h>
#include <halfstep/data.h>
#include <halfstep/error.h>

#include <set>

namespace halfstep {
namespace {

/// Image i has the byte i everywhere, and the label i.
ImageBatches batches(const ImageBatchOptions& options, int64_t count = 10) {
  const at::Tensor labels = at::arange(count, at::kByte);
  return {labels.view({count, 1, 1}).expand({count, 2, 3}).contiguous(), labels, options};
}

TEST(ImageBatches, EveryImageComesOnceAnEpochWithItsLabel) {
  ImageBatches data = batches({.batch_size = 5, .seed = 3});
  std::vector<int64_t> orders[2];
  for (auto& order : orders) {
    for (int batch = 0; batch < 2; ++batch) {
      const ImageBatch taken = data.next();
      ASSERT_EQ(taken.images.sizes(), (std::vector<int64_t>{5, 1, 2, 3}));
      for (int64_t i = 0; i < 5; ++i) {
        const int64_t label = taken.labels[i].item<int64_t>();
        order.push_back(label);
        EXPECT_TRUE(taken.images[i].mul(255).round().eq(label).all().item<bool>());
      }
    }
    EXPECT_EQ(std::set<int64_t>(order.begin(), order.end()).size(), 10U);
  }
  EXPECT_NE(orders[0], orders[1]);  // the chance of equal ones is 1 in 10!
}

TEST(ImageBatches, PixelsAreNormalised) {
  ImageBatches data = batches({.batch_size = 10, .mean = 0.02, .deviation = 0.25, .shuffle = false});
  const ImageBatch batch = data.next();
  for (int64_t i = 0; i < 10; ++i)
    EXPECT_NEAR(batch.images[i][0][0][0].item<double>(), (static_cast<double>(i) / 255 - 0.02) / 0.25, 1e-6);
}

TEST(ImageBatches, InOrderTheLastBatchIsShort) {
  ImageBatches data = batches({.batch_size = 4, .shuffle = false});
  EXPECT_EQ(data.next().labels.size(0), 4);
  EXPECT_EQ(data.next().labels.size(0), 4);
  EXPECT_EQ(data.next().labels.size(0), 2);
}

TEST(ImageBatches, ResumedOneGoesOnWithTheSameImages) {
  ImageBatches whole = batches({.batch_size = 3, .seed = 1}), resumed = batches({.batch_size = 3, .seed = 1});
  for (int batch = 0; batch < 5; ++batch) whole.next();
  resumed.load_state_dict(whole.state_dict());
  for (int batch = 0; batch < 5; ++batch) EXPECT_TRUE(resumed.next().labels.equal(whole.next().labels));
}

TEST(ImageBatches, RefusesTheStateOfOtherImages) {
  ImageBatches ten = batches({.batch_size = 3}), nine = batches({.batch_size = 3}, 9);
  EXPECT_THROW(nine.load_state_dict(ten.state_dict()), Error);
}

}  // namespace
}  // namespace halfstep
