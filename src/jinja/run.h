// Where a rendering stands, and what it may still use.
#pragma once

#include <halfstep/error.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace halfstep::jinja {

// Published templates have up to 20 kB and a dozen levels. A conversation of a thousand messages takes about
// 50,000 steps.
constexpr size_t kMaxTemplateBytes = size_t{1} << 20;
constexpr int kMaxHeight = 64;    // of the tree that is parsed
constexpr int kMaxLevels = 1000;  // of the calls that one rendering nests: macros call themselves
constexpr uint64_t kMaxSteps = 1u << 24;
constexpr size_t kBytesPerStep = 64;  // of text that is made or scanned
constexpr size_t kMaxTextBytes = size_t{64} << 20;
constexpr int kMaxValueDepth = 64;  // of lists in lists

/// Throws an Error that begins with "<where>, line <line>: ".
template <typename... Parts>
[[noreturn]] void fail_at(std::string_view where, int line, const Parts&... parts) {
  detail::throw_error(detail::concat(where, ", line ", line, ": ", parts...));
}

/// The line that is being evaluated, for errors, and the budget of one rendering: templates are untrusted.
class Run {
 public:
  explicit Run(std::string_view where, uint64_t max_steps = kMaxSteps)
      : where_(where), max_steps_(max_steps) {}

  void stands_at(int line) { line_ = line; }
  int line() const { return line_; }

  template <typename... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    fail_at(where_, line_, parts...);
  }

  void charge(uint64_t steps) {
    steps_ += steps;
    if (steps_ > max_steps_) fail("the template takes more than ", max_steps_, " steps. Does a loop grow?");
  }
  void check_text(size_t bytes) const {
    if (bytes > kMaxTextBytes) fail("a text of ", bytes, " bytes; up to ", kMaxTextBytes, " are supported.");
  }
  /// Before a text of so many bytes is made or scanned.
  void charge_text(size_t bytes) {
    check_text(bytes);
    charge(1 + bytes / kBytesPerStep);
  }
  /// Before so many values are put into a list.
  void charge_values(size_t count) { charge(1 + 2 * static_cast<uint64_t>(count)); }

  /// One level of nested calls, for as long as it lives.
  class Level {
   public:
    explicit Level(Run& run) : run_(run) {
      if (++run_.levels_ > kMaxLevels)
        run_.fail("calls nest deeper than ", kMaxLevels, " levels. Does a macro call itself without end?");
    }
    ~Level() { --run_.levels_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Run& run_;
  };

 private:
  std::string_view where_;
  uint64_t max_steps_;
  int line_ = 1;
  int levels_ = 0;
  uint64_t steps_ = 0;
};

}  // namespace halfstep::jinja
