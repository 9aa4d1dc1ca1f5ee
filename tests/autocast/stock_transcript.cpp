// Prints what stock autocast does. Links LibTorch and not Halfstep, so it is a witness from outside.
#include <cstdio>

#include "support/autocast_transcript.h"

int main() {
  namespace testing = halfstep::testing;
  for (const auto& line : testing::autocast_transcript(testing::bare_region())) std::puts(line.c_str());
}
