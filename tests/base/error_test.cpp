#include <gtest/gtest.h>
#include <halfstep/error.h>

namespace halfstep {
namespace {

TEST(Error, MessageIsBuiltFromItsPartsOnlyWhenTheConditionFails) {
  EXPECT_NO_THROW(HALFSTEP_CHECK(true, "never ", 1));
  try {
    HALFSTEP_CHECK(2 < 1, "got ", 2, ", expected less than ", 1);
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "got 2, expected less than 1");
  }
}

TEST(Error, BugNamesItsPlaceAndIsAnErrorToo) {
  try {
    HALFSTEP_BUG("table has ", 3, " rows");
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("error_test.cpp:"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace halfstep
