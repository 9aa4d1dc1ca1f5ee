// Collects all that does not fit, so that one message tells it.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/error.h>
#include <halfstep/printable.h>

#include <string>

#include "words/numbers.h"

namespace halfstep {

/// Names of tensors come from files of others: each fault is one printable line, and a file of a hundred
/// thousand wrong names does not fill the screen.
class Faults {
 public:
  template <typename... Parts>
  void expect(bool holds, const Parts&... parts) {
    if (holds || ++count_ > kMostShown) return;
    const std::string line = detail::concat(parts...);
    text_ += "\n  " + printable(line.substr(0, kMostLineBytes), Unprintable::Escaped);
    if (line.size() > kMostLineBytes) text_ += "...";
  }

  /// That a saved tensor has the type and shape of the one it goes into.
  void expect_like(const std::string& name, const at::Tensor& saved, const at::Tensor& target) {
    if (!saved.defined()) return expect(false, "'", name, "' is an undefined tensor");
    expect(saved.sizes() == target.sizes() && saved.scalar_type() == target.scalar_type(), "'", name, "' is ",
           saved.scalar_type(), " of shape ", saved.sizes(), ", expected ", target.scalar_type(),
           " of shape ", target.sizes());
  }

  void throw_if_any(const char* whose) const {
    HALFSTEP_CHECK(count_ == 0, whose, ": this state does not fit:", text_,
                   count_ > kMostShown ? "\n  and " + with_commas(count_ - kMostShown) + " more" : "");
  }

 private:
  static constexpr int64_t kMostShown = 10;
  static constexpr size_t kMostLineBytes = 1000;

  std::string text_;
  int64_t count_ = 0;
};

}  // namespace halfstep
