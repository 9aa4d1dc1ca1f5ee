#include <halfstep/checkpoint.h>
#include <halfstep/error.h>
#include <halfstep/storage.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>

#include "checkpoint/resharding.h"
#include "tensor/dense.h"

namespace halfstep {
namespace {

/// "working.a.weight[0:65536]": a name, and which elements of what it names.
struct RunOfElements {
  std::string name;
  int64_t begin = 0, end = 0;
};

std::optional<RunOfElements> parsed(const std::string& name) {
  const std::size_t open = name.rfind('['), colon = name.rfind(':');
  if (open == std::string::npos || colon == std::string::npos || colon < open || !name.ends_with("]"))
    return std::nullopt;
  RunOfElements run{.name = name.substr(0, open)};
  const auto read = [&](std::size_t from, std::size_t to, int64_t& number) {
    const auto [end, error] = std::from_chars(name.data() + from, name.data() + to, number);
    return error == std::errc() && end == name.data() + to && from < to;
  };
  if (!read(open + 1, colon, run.begin) || !read(colon + 1, name.size() - 1, run.end) || run.begin < 0 ||
      run.begin > run.end)
    return std::nullopt;
  return run;
}

struct SavedRun {
  std::size_t rank = 0;
  std::string saved_name;
  int64_t begin = 0, end = 0;
};

/// All elements as they lie in memory.
at::Tensor in_memory_order(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

/// How the whole of a parameter lies, of which a rank has a part: "layout.a.weight".
constexpr std::string_view kLayout = "layout.";
bool is_layout(std::string_view name) { return name.starts_with(kLayout); }

/// The parameter that something is kept for.
std::string param_of(std::string_view name) {
  for (const std::string_view prefix : {"working.", "master.", "param."})
    if (name.starts_with(prefix)) {
      name.remove_prefix(prefix.size());
      break;
    }
  for (const std::string_view suffix :
       {".first_moment", ".second_moment", ".first_moment_scales", ".second_moment_scales"})
    if (name.ends_with(suffix)) name.remove_suffix(suffix.size());
  return std::string(name);
}

/// Which elements of a parameter a rank has: "param.a.weight.part", where it has a part.
bool is_part_text(std::string_view name) { return name.starts_with("param.") && name.ends_with(".part"); }

class Resharding {
 public:
  Resharding(const SavedByRanks& saved, const StateDict& live) : saved_(saved), live_(live) {
    for (std::size_t rank = 0; rank < saved.names.size(); ++rank)
      for (const std::string& name : saved.names[rank])
        if (const auto run = parsed(name)) runs_[run->name].push_back({rank, name, run->begin, run->end});
    for (auto& [name, runs] : runs_)
      std::ranges::sort(runs, {}, [](const SavedRun& run) { return run.begin; });
    whole_.insert(saved.names[saved.own].begin(), saved.names[saved.own].end());
  }

  StateDict result() {
    const at::NoGradGuard no_grad;
    StateDict found;
    std::set<std::string> used;
    for (const auto& [name, value] : live_) {
      const auto run = parsed(name);
      const std::string base = run ? run->name : name;
      used.insert(base);
      if (is_part_text(name)) {
        found.set(name, value);  // says what is here, not what was saved
        continue;
      }
      const auto* tensor = std::get_if<at::Tensor>(&value);
      if (const auto saved_runs = runs_.find(base); saved_runs != runs_.end() && tensor != nullptr)
        found.set(name, of_runs(name, run, saved_runs->second, *tensor));
      else if (run && whole_.contains(base))
        found.set(name, of_whole(*run, std::get<at::Tensor>(saved_.read(saved_.own, base))));
      else if (whole_.contains(name))
        found.set(name, saved_.read(saved_.own, name));
      else if (is_layout(name) && whole_.contains(working_of(name)))
        found.set(name, layout_text(std::get<at::Tensor>(saved_.read(saved_.own, working_of(name)))));
    }
    // What nobody here asks for: whoever loads it says so.
    std::set<std::string> unasked;
    for (const auto& [base, runs] : runs_)
      if (!used.contains(base)) unasked.insert(base);
    for (const std::string& name : saved_.names[saved_.own])
      if (!parsed(name) && !used.contains(name)) unasked.insert(name);
    for (const std::string& name : unasked) {
      if (is_part_text(name) || take_unasked(name, found)) continue;
      if (is_layout(name) && live_.contains(working_of(name))) {
        check_layout(name);
        continue;
      }
      // Elements of a parameter that is not here: more than those is left over.
      if (!runs_.contains(name)) found.set(name, saved_.read(saved_.own, name));
    }
    return found;
  }

 private:
  static std::string working_of(const std::string& name) { return "working." + name.substr(kLayout.size()); }

  /// Kept for a parameter that is here, of which what is kept is not: of a part without elements, or of a
  /// parameter that was frozen when this state was made and not when the other was.
  bool take_unasked(const std::string& base, StateDict& found) const {
    const std::string param = param_of(base);
    if (param == base) return false;
    if (live_.contains(std::string(kLayout) + param)) return true;  // of a part without elements
    if (!live_.contains("param." + param + ".steps")) return false;
    const std::string part_name = "param." + param + ".part";
    const bool is_part = live_.contains(part_name);
    std::optional<RunOfElements> run;
    if (is_part) {
      run = parsed(live_.text(part_name));
      HALFSTEP_CHECK(run, "resharded: '", part_name, "' is ", live_.text(part_name), ".");
      const int64_t per_entry = base.ends_with("_scales") ? kMomentBlockElements : 1;
      run->name = base;
      run->begin = (run->begin + per_entry - 1) / per_entry;
      run->end = (run->end + per_entry - 1) / per_entry;
      if (run->begin == run->end) return true;
    }
    const std::string name = run ? detail::concat(base, "[", run->begin, ":", run->end, "]") : base;
    if (const auto saved_runs = runs_.find(base); saved_runs != runs_.end())
      found.set(name, of_runs(name, run, saved_runs->second, at::empty({0})));
    else if (run)
      found.set(name, of_whole(*run, std::get<at::Tensor>(saved_.read(saved_.own, base))));
    else
      return false;
    return true;
  }

  /// The saved state is of ranks, this one is not: its elements must lie in the same order.
  void check_layout(const std::string& name) const {
    const std::string here = layout_text(live_.tensor(working_of(name)));
    const std::string there = std::get<std::string>(saved_.read(saved_.own, name));
    HALFSTEP_CHECK(here == there, "resharded: '", working_of(name), "' is stored in memory as ", here,
                   ", and was saved in parts of ", there, ".");
  }

  at::Tensor of_whole(const RunOfElements& run, const at::Tensor& whole) const {
    if (whole.numel() == 0) return whole;  // a master that was not made yet
    HALFSTEP_CHECK(run.end <= whole.numel(), "resharded: '", run.name, "' has ", whole.numel(), " elements; ",
                   run.begin, " to ", run.end, " are asked for.");
    return in_memory_order(whole).narrow(0, run.begin, run.end - run.begin).clone();
  }

  /// What is kept for a frozen parameter has no shape yet: that of the parameter. Undefined if it is not
  /// known.
  at::Tensor shaped_as(const std::string& name, const at::Tensor& live, int64_t elements) const {
    if (live.numel() == elements) return live;
    const std::string working = "working." + param_of(name);
    const bool is_known = live_.contains(working) && live_.tensor(working).numel() == elements;
    return is_known ? live_.tensor(working) : at::Tensor();
  }

  at::Tensor of_runs(const std::string& name, const std::optional<RunOfElements>& wanted,
                     const std::vector<SavedRun>& runs, const at::Tensor& live) const {
    const int64_t begin = wanted ? wanted->begin : 0;
    const int64_t end = wanted ? wanted->end : runs.back().end;
    HALFSTEP_CHECK(wanted || live.numel() == 0 || live.numel() == end, "resharded: '", name, "' has ",
                   live.numel(), " elements, and the ranks saved ", end, ".");
    at::Tensor made;
    int64_t next = begin;
    for (const SavedRun& run : runs) {
      if (run.end <= begin || run.begin >= end) continue;
      const at::Tensor part = std::get<at::Tensor>(saved_.read(run.rank, run.saved_name));
      if (part.numel() == 0 && run.end > run.begin) return part;  // a master that was not made yet
      HALFSTEP_CHECK(run.begin <= next && part.numel() == run.end - run.begin, "resharded: '", name,
                     "': elements ", next, " to ", run.begin, " are in no rank's state.");
      if (!made.defined()) {
        const at::Tensor like = shaped_as(name, live, end);
        made = !wanted && like.defined() ? at::empty_strided(like.sizes(), like.strides(), part.options())
                                         : at::empty({end - begin}, part.options());
      }
      const int64_t from = std::max(begin, run.begin), to = std::min(end, run.end);
      in_memory_order(made)
          .narrow(0, from - begin, to - from)
          .copy_(part.narrow(0, from - run.begin, to - from));
      next = to;
    }
    HALFSTEP_CHECK(next == end, "resharded: '", name, "': elements ", next, " to ", end,
                   " are in no rank's state.");
    return made;
  }

  const SavedByRanks& saved_;
  const StateDict& live_;
  std::map<std::string, std::vector<SavedRun>> runs_;
  std::set<std::string> whole_;
};

}  // namespace

StateDict resharded(const SavedByRanks& saved, const StateDict& live) {
  HALFSTEP_CHECK(!saved.names.empty(), "resharded: no rank's state is given.");
  return Resharding(saved, live).result();
}

StateDict resharded(const std::vector<StateDict>& saved, const StateDict& live) {
  SavedByRanks all;
  for (const StateDict& state : saved) {
    auto& names = all.names.emplace_back();
    for (const auto& [name, value] : state) names.push_back(name);
  }
  all.read = [&](std::size_t rank, const std::string& name) {
    return std::ranges::find_if(saved[rank], [&](const auto& item) { return item.first == name; })->second;
  };
  return resharded(all, live);
}

namespace checkpoint {

bool is_of_parts(const StateDict& state) {
  return std::ranges::any_of(
      state, [](const auto& item) { return is_layout(item.first) || is_part_text(item.first); });
}

std::optional<std::string> param_of_layout(std::string_view name) {
  return is_layout(name) ? std::optional(std::string(name.substr(kLayout.size()))) : std::nullopt;
}

StateDict whole_state(const SavedByRanks& saved, const std::map<std::string, std::string>& layouts) {
  std::map<std::string, int64_t> ends;  // of what is in runs
  for (const auto& names : saved.names)
    for (const std::string& name : names)
      if (const auto run = parsed(name)) {
        int64_t& end = ends[run->name];
        end = std::max(end, run->end);
      }
  StateDict whole;
  for (const auto& [name, end] : ends) {
    const auto layout = layouts.find(param_of(name));
    at::Tensor like = layout == layouts.end() ? at::Tensor() : layout_of(layout->second);
    if (!like.defined() || like.numel() != end)
      like = at::empty({end}, at::TensorOptions(at::kMeta).dtype(at::kByte));
    whole.set(name, like);
  }
  for (const std::string& name : saved.names[saved.own])
    if (!parsed(name) && !is_layout(name) && !is_part_text(name))
      whole.set(name, saved.read(saved.own, name));
  StateDict found;
  for (const auto& [name, value] : resharded(saved, whole))
    if (!is_layout(name) && !is_part_text(name)) found.set(name, value);
  return found;
}

}  // namespace checkpoint
}  // namespace halfstep
