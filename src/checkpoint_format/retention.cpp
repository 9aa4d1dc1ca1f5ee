#include "checkpoint_format/retention.h"

#include <cmath>
#include <set>

namespace halfstep::files {

std::vector<int64_t> steps_to_remove(const std::vector<KeptCheckpoint>& all, const Retention& retention) {
  if (all.empty() || retention.keep_last == 0) return {};
  std::set<int64_t> stay{all.back().step};
  const KeptCheckpoint* best = nullptr;
  int64_t healthy = 0;
  for (auto one = all.rbegin(); one != all.rend(); ++one) {
    if (one->pinned) stay.insert(one->step);
    if (one->healthy && healthy++ < retention.keep_last) stay.insert(one->step);
    if (retention.keep_every > 0 && one->step % retention.keep_every == 0) stay.insert(one->step);
    // Of equal scores the newest: it was trained for longer.
    if (one->score && !std::isnan(*one->score) && (best == nullptr || *one->score < *best->score))
      best = &*one;
  }
  if (retention.keep_best && best != nullptr) stay.insert(best->step);
  std::vector<int64_t> go;
  for (const KeptCheckpoint& one : all)
    if (!stay.contains(one.step)) go.push_back(one.step);
  return go;
}

}  // namespace halfstep::files
