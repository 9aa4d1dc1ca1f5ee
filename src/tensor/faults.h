// Collects all that does not fit, so that one message tells it.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/error.h>

#include <string>

namespace halfstep {

class Faults {
 public:
  template <typename... Parts>
  void expect(bool holds, const Parts&... parts) {
    if (!holds) text_ += detail::concat("\n  ", parts...);
  }

  /// That a saved tensor has the type and shape of the one it goes into.
  void expect_like(const std::string& name, const at::Tensor& saved, const at::Tensor& target) {
    if (!saved.defined()) return expect(false, "'", name, "' is an undefined tensor");
    expect(saved.sizes() == target.sizes() && saved.scalar_type() == target.scalar_type(), "'", name, "' is ",
           saved.scalar_type(), " of shape ", saved.sizes(), ", expected ", target.scalar_type(),
           " of shape ", target.sizes());
  }

  void throw_if_any(const char* whose) const {
    HALFSTEP_CHECK(text_.empty(), whose, ": this state does not fit:", text_);
  }

 private:
  std::string text_;
};

}  // namespace halfstep
