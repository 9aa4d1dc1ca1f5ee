// Checks of numbers on the command line. CLI11's own print the limits of the type, with all their digits.
#pragma once

#include <CLI/CLI.hpp>

#include <string>

namespace halfstep::cli {

/// Refuses what is outside of [least, most]: "0 is not <expected>."
inline CLI::Validator number_from(double least, double most, std::string expected) {
  const auto fault_of = [least, most, expected = std::move(expected)](const std::string& text) {
    double value = 0;
    const bool is_fine = CLI::detail::lexical_cast(text, value) && value >= least && value <= most;
    return is_fine ? "" : text + " is not " + expected + ".";
  };
  return {fault_of, /*validator_desc=*/""};
}

}  // namespace halfstep::cli
