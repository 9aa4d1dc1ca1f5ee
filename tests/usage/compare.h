// Runs a program through Halfstep and the oracle side by side and says where they disagree.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "usage/program.h"

namespace usage {

struct Disagreement {
  std::string kind;  ///< "gradient", "update", "edit", "decision", ...
  std::string text;
};

struct Verdict {
  std::vector<Disagreement> disagreements;
  int64_t checks = 0;
  int64_t uninformative = 0;  ///< of these: the bound is so wide that a wrong value could be inside
  int64_t second_looks = 0;   ///< steps and evaluations that needed more samples of the roundings
  /// The largest error in units of its bound, by kind: how much room the bounds leave.
  std::map<std::string, double> worst;
};

/// A fault put in on purpose, between Halfstep and the comparison: to see that it is found.
enum class Planted {
  None,
  Gradient,    ///< one gradient 1.3 times too large
  Update,      ///< one weight moves 1.3 times too far
  Edit,        ///< an edit of a weight is undone
  Statistics,  ///< running statistics that do not move
  Skip,        ///< a step that is skipped, without a reason
};

/// Files that the program writes begin with `scratch`.
Verdict run(const Program& program, const std::string& scratch, Planted planted = Planted::None);

}  // namespace usage
