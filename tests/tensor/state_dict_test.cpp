#include <gtest/gtest.h>
#include <halfstep/error.h>
#include <halfstep/state_dict.h>
#include <torch/torch.h>

#include "support/error_of.h"

namespace halfstep {
namespace {

TEST(StateDict, GivesBackWhatWasSetAndTheLastOneWins) {
  StateDict state;
  state.set("count", int64_t{3});
  state.set("count", int64_t{4});
  state.set("scale", 0.5);
  state.set("who", std::string("me"));
  state.set("weights", torch::ones({2}));
  EXPECT_EQ(state.size(), 4u);
  EXPECT_EQ(state.integer("count"), 4);
  EXPECT_EQ(state.real("scale"), 0.5);
  EXPECT_EQ(state.text("who"), "me");
  EXPECT_TRUE(torch::equal(state.tensor("weights"), torch::ones({2})));
}

TEST(StateDict, AMissingNameOrAnotherKindIsAnErrorThatSaysWhatIsThere) {
  StateDict state;
  state.set("count", int64_t{3});
  EXPECT_EQ(testing::error_of([&] { (void)state.real("count"); }),
            "state 'count' is a whole number, expected a real number");
  EXPECT_EQ(testing::error_of([&] { (void)state.real("scale"); }), "state has no 'scale'");
  EXPECT_EQ(testing::error_of([&] { state.expect_exactly("Thing", {"a", "b"}); }),
            "Thing: this state does not fit. Missing: 'a', 'b'. Unknown: 'count'.");
  EXPECT_NO_THROW(state.expect_exactly("Thing", {"count"}));
}

}  // namespace
}  // namespace halfstep
