// The same program again in a process of its own, for what must not mix: peaks, thread counts, allocators.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace bench {

using Arguments = std::vector<std::string>;

/// Runs this program once for each of `jobs`, with those arguments, at most `at_once` at a time. Each child
/// prints one JSON value on its standard output; `finished` is called with the job's index and that value, in
/// the order in which they end. An Error that quotes the arguments when a child fails.
void run_children(const std::vector<Arguments>& jobs, int at_once,
                  const std::function<void(std::size_t, const nlohmann::json&)>& finished);

}  // namespace bench
