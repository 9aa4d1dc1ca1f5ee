// Saved states compared bit by bit.
#pragma once

#include <gtest/gtest.h>
#include <halfstep/state_dict.h>

#include "support/bits.h"

namespace halfstep::testing {

inline void expect_same_state(const StateDict& expected, const StateDict& found) {
  ASSERT_EQ(expected.size(), found.size());
  for (const auto& [name, value] : expected) {
    ASSERT_TRUE(found.contains(name)) << name;
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      EXPECT_TRUE(bit_equal(*tensor, found.tensor(name))) << name;
    } else if (const auto* number = std::get_if<int64_t>(&value)) {
      EXPECT_EQ(*number, found.integer(name)) << name;
    } else if (const auto* real = std::get_if<double>(&value)) {
      EXPECT_EQ(*real, found.real(name)) << name;
    } else {
      EXPECT_EQ(std::get<std::string>(value), found.text(name)) << name;
    }
  }
}

}  // namespace halfstep::testing
