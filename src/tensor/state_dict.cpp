#include <halfstep/error.h>
#include <halfstep/state_dict.h>

#include <algorithm>

#include "words/names.h"

namespace halfstep {
namespace {

const char* kind_of(const StateDict::Value& value) {
  constexpr const char* kinds[] = {"a whole number", "a real number", "a text", "a tensor"};
  return kinds[value.index()];
}

template <typename Kind, typename Values>
const Kind& find(const Values& values, std::string_view name) {
  const auto found = values.find(name);
  HALFSTEP_CHECK(found != values.end(), "state has no ", in_quotes(name));
  const Kind* value = std::get_if<Kind>(&found->second);
  HALFSTEP_CHECK(value, "state ", in_quotes(name), " is ", kind_of(found->second), ", expected ",
                 kind_of(Kind{}));
  return *value;
}

std::string quoted_list(const std::vector<std::string_view>& names) {
  std::string list;
  for (const auto name : names) list += (list.empty() ? "'" : ", '") + std::string(name) + "'";
  return list.empty() ? "none" : list;
}

}  // namespace

int64_t StateDict::integer(std::string_view name) const { return find<int64_t>(values_, name); }
double StateDict::real(std::string_view name) const { return find<double>(values_, name); }
const std::string& StateDict::text(std::string_view name) const { return find<std::string>(values_, name); }
const at::Tensor& StateDict::tensor(std::string_view name) const { return find<at::Tensor>(values_, name); }

void StateDict::expect_exactly(std::string_view whose, const std::vector<std::string_view>& names) const {
  std::vector<std::string_view> missing, unknown;
  for (const auto name : names)
    if (!contains(name)) missing.push_back(name);
  for (const auto& [name, value] : values_)
    if (std::find(names.begin(), names.end(), name) == names.end()) unknown.push_back(name);
  HALFSTEP_CHECK(missing.empty() && unknown.empty(), whose,
                 ": this state does not fit. Missing: ", quoted_list(missing),
                 ". Unknown: ", quoted_list(unknown), ".");
}

}  // namespace halfstep
