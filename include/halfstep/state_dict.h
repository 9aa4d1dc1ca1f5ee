// What a stateful thing hands over to be saved, and takes back.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/config.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace halfstep {

/// Names and their values: whole numbers, real numbers, texts, tensors. Ordered by name.
///
/// A plain value. Whoever saves it need not know whose it is, and whoever loads it can refuse a set of names
/// that does not fit, all of them at once.
class HALFSTEP_API StateDict {
 public:
  /// What a name may stand for.
  using Value = std::variant<int64_t, double, std::string, at::Tensor>;

  /// Adds a value, or replaces the one of that name.
  void set(std::string name, Value value) { values_.insert_or_assign(std::move(name), std::move(value)); }

  /// Whether there is a value of that name.
  bool contains(std::string_view name) const { return values_.find(name) != values_.end(); }

  /// The value of that name and kind; an Error that says what is there instead.
  int64_t integer(std::string_view name) const;
  double real(std::string_view name) const;
  const std::string& text(std::string_view name) const;
  const at::Tensor& tensor(std::string_view name) const;

  /// Throws an Error that lists the names that are missing and those that were not asked for.
  /// `whose` begins the message: "GradScaler".
  void expect_exactly(std::string_view whose, const std::vector<std::string_view>& names) const;

  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }
  size_t size() const { return values_.size(); }

 private:
  std::map<std::string, Value, std::less<>> values_;
};

}  // namespace halfstep
