#include <halfstep/checkpoint.h>

#include <algorithm>

#include "words/names.h"
#include "tensor/faults.h"

namespace halfstep {

void expect_like(std::string_view whose, const StateDict& saved, const StateDict& live) {
  Faults faults;
  for (const auto& [name, value] : live) {
    const auto found =
        std::find_if(saved.begin(), saved.end(), [&](const auto& item) { return item.first == name; });
    if (found == saved.end()) {
      faults.expect(false, "'", name, "' is missing");
      continue;
    }
    const auto& saved_value = found->second;
    constexpr const char* kinds[] = {"a whole number", "a real number", "a text", "a tensor"};
    if (saved_value.index() != value.index()) {
      faults.expect(false, "'", name, "' is ", kinds[saved_value.index()], ", expected ",
                    kinds[value.index()]);
    } else if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      faults.expect_like(name, std::get<at::Tensor>(saved_value), *tensor);
    }
  }
  for (const auto& [name, value] : saved)
    faults.expect(live.contains(name), in_quotes(name), " is unknown");
  faults.throw_if_any(std::string(whose).c_str());
}

}  // namespace halfstep
