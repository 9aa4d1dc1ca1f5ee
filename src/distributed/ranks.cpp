#include <halfstep/ranks.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>

#include "distributed/meeting_place.h"
#include "distributed/nccl.h"

namespace halfstep {
namespace {

using Clock = std::chrono::steady_clock;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

/// Of kLostKey.
LostRank read_lost(const std::string& text) {
  const size_t space = std::min(text.find(' '), text.size());
  return {.rank = std::atoi(text.c_str()), .why = text.substr(std::min(space + 1, text.size()))};
}

std::string numbers_text(const std::vector<int>& numbers) {
  std::string text;
  for (const int each : numbers) text += (text.empty() ? "" : ", ") + std::to_string(each);
  return text;
}

/// LibTorch's messages end with advice and a stack.
std::string first_sentence(std::string_view text) {
  text = text.substr(0, text.find('\n'));
  return std::string(text.substr(0, text.find(". ")));
}

/// What torchrun sets for each process, and `halfstep launch` too.
struct Environment {
  int rank = 0, local_rank = 0, size = 1;
  std::string address;
  uint16_t port = 0;
  bool store_is_there = false;  // held by whoever starts the ranks
  std::string attempt{};
};

const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

int number_in(const char* name, int most) {
  const std::string text = variable(name);
  const bool digits =
      text.size() <= 9 && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  const int value = digits ? std::atoi(text.c_str()) : -1;
  HALFSTEP_CHECK(value >= 0 && value <= most, "Ranks: the variable ", name, " is '", text,
                 "', expected a whole number from 0 to ", most, ".");
  return value;
}

std::optional<Environment> environment() {
  static constexpr const char* kNames[] = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};
  std::string missing;
  for (const char* name : kNames)
    if (variable(name) == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
  // An address alone is a leftover of another program; a number of this process is not.
  if (variable("RANK") == nullptr && variable("WORLD_SIZE") == nullptr) return std::nullopt;
  constexpr int kMostRanks = 1 << 20;
  if (variable("WORLD_SIZE") != nullptr && number_in("WORLD_SIZE", kMostRanks) == 1 &&
      (variable("RANK") == nullptr || number_in("RANK", kMostRanks) == 0))
    return std::nullopt;
  HALFSTEP_CHECK(missing.empty(), "Ranks: the variables RANK and WORLD_SIZE ask for several processes, and ",
                 missing,
                 " is not set. `halfstep launch -n N -- PROGRAM` sets all of them, as torchrun does.");
  Environment found{.rank = number_in("RANK", kMostRanks),
                    .local_rank = variable("LOCAL_RANK") != nullptr ? number_in("LOCAL_RANK", kMostRanks) : 0,
                    .size = number_in("WORLD_SIZE", kMostRanks),
                    .address = variable("MASTER_ADDR"),
                    .port = static_cast<uint16_t>(number_in("MASTER_PORT", 65535))};
  HALFSTEP_CHECK(found.rank < found.size, "Ranks: RANK is ", found.rank, " of WORLD_SIZE ", found.size,
                 "; ranks are counted from 0.");
  const char* agent = variable("TORCHELASTIC_USE_AGENT_STORE");
  found.store_is_there = agent != nullptr && std::string_view(agent) == "True";
  const char* attempt = variable("TORCHELASTIC_RESTART_COUNT");
  found.attempt = attempt != nullptr ? attempt : "0";
  return found;
}

/// Runs `function` on another thread; the caller may stop waiting for it.
template <typename Function>
std::future<std::invoke_result_t<Function>> started(Function function) {
  std::promise<std::invoke_result_t<Function>> promise;
  auto result = promise.get_future();
  std::thread([promise = std::move(promise), function = std::move(function)]() mutable {
    try {
      promise.set_value(function());
    } catch (...) {
      promise.set_exception(std::current_exception());
    }
  }).detach();
  return result;
}

/// LibTorch's own wait for a server has no limit: another program may accept connections and never answer.
c10::intrusive_ptr<c10d::TCPStore> connected_store(const std::string& address,
                                                   const c10d::TCPStoreOptions& options,
                                                   std::chrono::milliseconds longest_answer) {
  auto store = started([=] { return c10::make_intrusive<c10d::TCPStore>(address, options); });
  constexpr std::chrono::seconds kMargin{1};  // where nobody listens, its own message comes first
  if (store.wait_for(options.timeout + kMargin) != std::future_status::ready)
    throw std::runtime_error(detail::concat("a program accepts connections there and did not answer within ",
                                            options.timeout.count() / 1000.0, " s"));
  const auto connected = store.get();
  distributed::limit_answers(options.port, longest_answer);
  return connected;
}

StorePtr open_store(const Environment& where, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = where.port;
  options.isServer = where.rank == 0 && !where.store_is_there;
  options.waitWorkers = false;
  options.timeout = timeout;
  // LibTorch's own socket would listen on every address of the host.
  if (options.isServer) options.masterListenFd = distributed::listen_on(where.address, where.port).fd;
  return c10::make_intrusive<c10d::PrefixStore>(distributed::attempt_prefix(where.attempt),
                                                connected_store(where.address, options, timeout));
}

}  // namespace

struct Ranks::State {
  int rank = 0, local_rank = 0, size = 1;
  std::chrono::milliseconds timeout{};
  StorePtr store{};
  c10::intrusive_ptr<c10d::Backend> group{}, nccl{};
  int64_t handle = 0;  // of those that this rank has made, the same on all ranks
  int64_t waits_for_first = 0;
  std::map<std::string, int64_t> decisions{};                              // by what they are about
  std::vector<std::pair<const void*, std::function<void()>>> in_pieces{};  // as they were begun
  bool completing = false;
  std::mutex asking;                   // of the store: `decided` may be called beside the rest
  std::atomic<bool> is_silent{false};  // the store has failed to answer
  std::mutex failing;                  // the first to find out asks the others
  std::optional<RankError> failed{};

  /// What a function of the store says. Once an answer failed to come, a late one would be taken for that to
  /// the next question: nothing more is asked.
  template <typename Function>
  auto asked(Function function) {
    const std::lock_guard lock(asking);
    if (is_silent) throw std::runtime_error("it did not answer before");
    try {
      return function(*store);
    } catch (...) {
      is_silent = true;
      throw;
    }
  }
  bool is_set(const std::string& key) {
    return asked([&](c10d::Store& at) { return at.check({key}); });
  }
  void set(const std::string& key, const std::string& text) {
    asked([&](c10d::Store& at) { at.set(key, bytes_of(text)); });
  }
  std::string get(const std::string& key) {
    return asked([&](c10d::Store& at) { return text_of(at.get(key)); });
  }
  /// Of this handle: another one of the same process counts for itself.
  std::string own_key(const std::string& name) const { return detail::concat("handle-", handle, "/", name); }

  // Signs of life. Who waits without a limit, for a disk, learns by them that another process hangs.

  std::thread beating{};
  std::mutex beat_mutex;
  std::condition_variable ending;
  bool is_ending = false;

  std::string beat_key(int of_rank) const { return own_key("beat/" + std::to_string(of_rank)); }
  /// All of them go to the one process that holds the meeting place: thousands less often each.
  std::chrono::milliseconds beat_pause() const {
    return std::max({timeout / 5, std::chrono::milliseconds(20), std::chrono::milliseconds(1) * size});
  }
  void begin_beating() {
    beating = std::thread([this] {
      try {
        for (int64_t count = 0;; ++count) {
          set(beat_key(rank), std::to_string(count));
          std::unique_lock lock(beat_mutex);
          if (ending.wait_for(lock, beat_pause(), [this] { return is_ending; })) return;
        }
      } catch (const std::exception&) {
        // The meeting place is gone, or frozen: whatever exchanges next says so.
      }
    });
  }

  ~State() {
    // It would wait for its threads, and they for the rank that is lost, until time is up. The process ends.
    if (failed) (void)group.release();
    if (!beating.joinable()) return;
    {
      const std::lock_guard lock(beat_mutex);
      is_ending = true;
    }
    ending.notify_one();
    beating.join();
  }
  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  /// Before an exchange: what others have begun in pieces, in the order in which they began; for a piece, of
  /// those that began before its owner.
  void complete_pieces(const void* before_owner) {
    if (completing) return;
    completing = true;
    struct Done {
      bool& flag;
      ~Done() { flag = false; }
    } const done{completing};
    for (std::size_t i = 0; i < in_pieces.size() && in_pieces[i].first != before_owner; ++i)
      in_pieces[i].second();
  }

  /// Runs one exchange; what it throws becomes the name of the rank that is to blame.
  template <typename Function>
  auto guarded(const std::string& what, Function function) {
    try {
      return function();
    } catch (const std::exception& error) {
      fail(what, first_sentence(error.what()));
    }
  }

  /// NCCL's, for tensors of CUDA; null where they go by way of the host.
  c10d::Backend* backend_on_device(const at::Tensor& tensor) {
    if (!tensor.is_cuda()) return nullptr;
    if (!nccl)
      nccl = distributed::make_nccl(c10::make_intrusive<c10d::PrefixStore>("halfstep/nccl", store), rank,
                                    size, timeout);
    return nccl.get();
  }

  /// Without it nobody would learn of a loss, or end these processes if whoever started them is gone.
  void check_meeting_place(const std::string& what) {
    if (is_silent) fail(what, "no sign of life arrived there");
  }

  static void check_contiguous(const at::Tensor& tensor) {
    HALFSTEP_CHECK(tensor.is_contiguous(), "Ranks: a tensor of shape ", tensor.sizes(),
                   " that is not contiguous. Give tensor.contiguous(), or the memory that it is a view of.");
  }

  /// Not only for the exchange itself: a rank two places further on would learn of a failure late.
  void wait(const std::string& what, const c10::intrusive_ptr<c10d::Work>& work) {
    // All ask the one process that holds the meeting place: thousands less often each.
    const auto longest = std::max(std::chrono::milliseconds(500), std::chrono::milliseconds(1) * size);
    std::chrono::milliseconds pause{200}, waited{0};
    for (; waited < timeout; waited += pause, pause = std::min(2 * pause, longest)) {
      try {
        work->wait(std::min(pause, timeout - waited));
        return;
      } catch (const std::exception& error) {
        if (work->isCompleted()) fail(what, first_sentence(error.what()));
      }
      if (another_failed(what)) fail(what, "another rank has failed");
    }
    fail(what, "time is up");
  }

  /// Whether a rank's exchange has failed, or whoever started the ranks has lost one.
  bool another_failed(const std::string& what) {
    return guarded(what, [&] { return is_set(distributed::kLostKey) || is_set(distributed::kFailedKey); });
  }

  /// Found out once: whatever else is under way fails for the same reason, and need not ask again.
  [[noreturn]] void fail(const std::string& what, const std::string& cause) {
    const std::lock_guard lock(failing);
    if (!failed) failed.emplace(reason_of(what, cause));
    throw *failed;
  }

  RankError reason_of(const std::string& what, const std::string& cause);

  /// Makes the group, once all ranks are there.
  void connect(const std::string& own_address, uint16_t port);

  /// However long it takes, unless a rank is lost, or one of those that are waited for hangs.
  void wait_until(const std::string& what, const std::function<bool()>& holds,
                  const std::function<std::vector<int>()>& waited_for);
};

/// Gloo says that a connection broke, not whose. So those that are left sign in where they met: who does not
/// is gone or hangs.
RankError Ranks::State::reason_of(const std::string& what, const std::string& cause) {
  constexpr std::chrono::milliseconds kPatience{1200}, kPause{20};
  const std::string begin = detail::concat("rank ", rank, " of ", size, ", ", what, ": ");
  std::vector<int> missing;
  try {
    asked([&](c10d::Store& at) { at.setTimeout(kPatience); });
    const auto key_of = [](int each) { return distributed::kSignedInKey + std::to_string(each); };
    set(distributed::kFailedKey, what);
    set(key_of(rank), what);
    for (const auto start = Clock::now();; std::this_thread::sleep_for(kPause)) {
      if (is_set(distributed::kLostKey)) {
        const LostRank lost = read_lost(get(distributed::kLostKey));
        return RankError(detail::concat(begin, "rank ", lost.rank, " is gone: ", lost.why, "."), {lost.rank});
      }
      missing.clear();
      for (int each = 0; each < size; ++each)
        if (each != rank && !is_set(key_of(each))) missing.push_back(each);
      if (missing.empty() || Clock::now() - start > kPatience) break;
    }
    for (const int each : missing)
      if (is_set(distributed::kEndedKey + std::to_string(each)))
        return RankError(detail::concat(begin, "rank ", each,
                                        " has ended without an error, while this one continues. All ranks "
                                        "must take the same number of steps and make the same calls."),
                         {each});
    if (!missing.empty()) set(distributed::kUnansweringKey, numbers_text(missing));
  } catch (const std::exception&) {
    return RankError(detail::concat(begin,
                                    "the process that holds the ranks' meeting place is gone or does not "
                                    "answer: rank 0, or the one that started the ranks. LibTorch: ",
                                    cause),
                     {0});
  }
  if (missing.empty())
    return RankError(detail::concat(begin,
                                    "no rank is gone, yet the exchange failed. Do all of them make the same "
                                    "calls, within ",
                                    timeout.count() / 1000.0, " s? LibTorch: ", cause),
                     {});
  return RankError(detail::concat(begin, missing.size() == 1 ? "rank " : "ranks ", numbers_text(missing),
                                  missing.size() == 1 ? " is" : " are", " gone, or did not answer within ",
                                  timeout.count() / 1000.0, " s. LibTorch: ", cause),
                   missing);
}

/// Gloo waits for every rank until time is up, and does not ask whether one of them is gone. So it waits
/// beside this thread, which asks; a wait that is given up ends by itself.
void Ranks::State::connect(const std::string& own_address, uint16_t port) {
  const std::string what = "connecting";
  guarded(what, [&] { set(distributed::kJoinedKey + std::to_string(rank), "yes"); });
  // A store answers one question after the other: Gloo's would hold up those of this thread.
  const StorePtr waiting = store;
  guarded(what, [&] { store = waiting->clone(); });
  distributed::limit_answers(port, timeout);
  auto connected = started([own_address, timeout = timeout, rank = rank, size = size,
                            at = c10::make_intrusive<c10d::PrefixStore>(own_key("gloo"), waiting)] {
    auto options = c10d::ProcessGroupGloo::Options::create(timeout);
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(own_address));
    return c10::intrusive_ptr<c10d::Backend>(
        c10::make_intrusive<c10d::ProcessGroupGloo>(at, rank, size, options));
  });
  wait_until(
      what, [&] { return connected.wait_for(std::chrono::seconds(0)) == std::future_status::ready; },
      [] { return std::vector<int>{}; });
  group = guarded(what, [&] { return connected.get(); });
  store = waiting;
}

Ranks::Ranks() : state_(std::make_shared<State>()) {}

Ranks Ranks::from_environment(const RanksOptions& options) {
  HALFSTEP_CHECK(options.timeout.count() > 0, "Ranks: a timeout of ", options.timeout.count(),
                 " ms, expected a positive one.");
  Ranks ranks;
  const auto found = environment();
  if (!found) return ranks;
  State& state = *ranks.state_;
  state.rank = found->rank;
  state.local_rank = found->local_rank;
  state.size = found->size;
  state.timeout = options.timeout;
  const std::string met_at = detail::concat(found->address, ":", found->port);
  try {
    state.store = open_store(*found, options.timeout);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw RankError(detail::concat("rank ", found->rank, " of ", found->size,
                                   ": cannot join the ranks' meeting place at ", met_at, ": ",
                                   first_sentence(error.what()),
                                   ". Has rank 0 been started, and is the port not another program's?"),
                    {0});
  }
  // Not counted here: a rank may be several processes, one after another.
  state.handle = state.guarded("connecting", [&] {
    return state.asked([&](c10d::Store& at) { return at.add(detail::concat("handles/", found->rank), 1); });
  });
  state.connect(distributed::address_towards(found->address, found->port), found->port);
  state.begin_beating();
  return ranks;
}

int Ranks::rank() const { return state_->rank; }
int Ranks::local_rank() const { return state_->local_rank; }
int Ranks::size() const { return state_->size; }
RankShare Ranks::share(int64_t total, int of_rank) const {
  const int64_t first = total * of_rank / size();
  return {.first = first, .count = total * (of_rank + 1) / size() - first};
}

struct Ranks::Pending::State {
  std::shared_ptr<Ranks::State> ranks;
  std::string what;
  std::vector<at::Tensor> tensors;  // as they travel
  c10::intrusive_ptr<c10d::Work> work;
  at::Tensor result{};     // on its device, where the last of `tensors` is a copy of it on the host
  bool on_device = false;  // what comes later on its stream waits, and this process does not
};

void Ranks::Pending::wait() {
  if (!state_) return;
  const auto state = std::exchange(state_, nullptr);
  if (state->on_device)
    state->ranks->guarded(state->what, [&] { state->work->wait(); });
  else
    state->ranks->wait(state->what, state->work);
  if (state->result.defined()) state->result.copy_(state->tensors.back());
}

void Ranks::begin_pieces(const void* owner, std::function<void()> begin_rest) const {
  end_pieces(owner);
  state_->in_pieces.emplace_back(owner, std::move(begin_rest));
}

void Ranks::end_pieces(const void* owner) const {
  std::erase_if(state_->in_pieces, [&](const auto& each) { return each.first == owner; });
}

template <typename Begin>
Ranks::Pending Ranks::begun(std::vector<at::Tensor> tensors, std::string what, Begin begin,
                            const void* owner) const {
  state_->complete_pieces(owner);
  state_->check_meeting_place(what);
  for (const at::Tensor& tensor : tensors) State::check_contiguous(tensor);
  Pending pending;
  pending.state_ = std::make_shared<Pending::State>(
      Pending::State{.ranks = state_, .what = std::move(what), .tensors = std::move(tensors), .work = {}});
  auto& state = *pending.state_;
  c10d::Backend* const on_device = state_->backend_on_device(state.tensors.back());
  state.on_device = on_device != nullptr;
  if (!state.on_device && !state.tensors.back().is_cpu()) {
    state.result = state.tensors.back();
    for (at::Tensor& tensor : state.tensors) tensor = tensor.to(at::kCPU);
  }
  state_->guarded(state.what,
                  [&] { state.work = begin(state.on_device ? *on_device : *state_->group, state.tensors); });
  return pending;
}

Ranks::Pending Ranks::begin_sum(at::Tensor tensor, std::string what, const void* owner) const {
  if (state_->size == 1) return {};
  return begun(
      {std::move(tensor)}, std::move(what),
      [](c10d::Backend& backend, auto& tensors) { return backend.allreduce(tensors); }, owner);
}

Ranks::Pending Ranks::begin_gather(at::Tensor part, at::Tensor all, std::string what) const {
  HALFSTEP_CHECK(all.numel() == part.numel() * state_->size, "Ranks: ", state_->size, " parts of ",
                 part.numel(), " to be gathered in ", all.numel(), " elements.");
  if (state_->size == 1) {
    all.copy_(part);
    return {};
  }
  return begun({std::move(part), std::move(all)}, std::move(what), [](c10d::Backend& backend, auto& tensors) {
    return backend._allgather_base(tensors[1], tensors[0]);
  });
}

void Ranks::sum(at::Tensor tensor) const { begin_sum(std::move(tensor), "a sum").wait(); }

void Ranks::largest(at::Tensor tensor) const {
  HALFSTEP_CHECK(at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false), "Ranks: largest of ",
                 tensor.scalar_type(),
                 "; it is for integers: of floating-point numbers LibTorch may lose a NaN.");
  if (state_->size == 1) return;
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  begun({std::move(tensor)}, "an agreement", [&](c10d::Backend& backend, auto& tensors) {
    return backend.allreduce(tensors, options);
  }).wait();
}

void Ranks::broadcast(at::Tensor tensor, int from) const {
  HALFSTEP_CHECK(from >= 0 && from < state_->size, "Ranks: broadcast from rank ", from, " of ", state_->size,
                 ".");
  if (state_->size == 1) return;
  c10d::BroadcastOptions options;
  options.rootRank = from;
  begun({std::move(tensor)}, "a broadcast", [&](c10d::Backend& backend, auto& tensors) {
    return backend.broadcast(tensors, options);
  }).wait();
}

at::Tensor Ranks::gathered(const at::Tensor& tensor) const {
  std::vector<int64_t> shape{state_->size};
  shape.insert(shape.end(), tensor.sizes().begin(), tensor.sizes().end());
  at::Tensor all = at::empty(shape, tensor.options());
  State::check_contiguous(tensor);
  begin_gather(tensor.reshape({-1}), all.view({-1}), "a gathering").wait();
  return all;
}

void Ranks::barrier() const {
  if (state_->size == 1) return;
  state_->complete_pieces(nullptr);
  state_->check_meeting_place("a barrier");
  state_->wait("a barrier", state_->guarded("a barrier", [&] { return state_->group->barrier(); }));
}

std::string Ranks::told(std::string text) const {
  if (state_->size == 1) return text;
  const at::Tensor length = at::empty({1}, at::kLong);
  length.mutable_data_ptr<int64_t>()[0] = static_cast<int64_t>(text.size());
  broadcast(length);
  text.resize(static_cast<size_t>(length.const_data_ptr<int64_t>()[0]));
  if (text.empty()) return text;
  const at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), bytes.mutable_data_ptr<uint8_t>());
  broadcast(bytes);
  std::copy_n(bytes.const_data_ptr<uint8_t>(), text.size(), text.begin());
  return text;
}

void Ranks::State::wait_until(const std::string& what, const std::function<bool()>& holds,
                              const std::function<std::vector<int>()>& waited_for) {
  // All ask the one process that holds the meeting place: a thousand of them less often each.
  const auto longest = std::max(std::chrono::microseconds(20'000), std::chrono::microseconds(100) * size);
  auto pause = longest / 16;
  auto next_look = Clock::now() + beat_pause();
  std::map<int, std::pair<std::string, Clock::time_point>> beats;  // and since when they are the same
  for (;; std::this_thread::sleep_for(pause), pause = std::min(2 * pause, longest)) {
    if (guarded(what, holds)) return;
    if (another_failed(what)) fail(what, "another rank has failed");
    if (Clock::now() < next_look) continue;
    next_look = Clock::now() + beat_pause();
    for (const int each : guarded(what, waited_for)) {
      const std::string beat =
          guarded(what, [&] { return is_set(beat_key(each)) ? get(beat_key(each)) : ""; });
      auto& [last, since] = beats.try_emplace(each, std::string("none yet"), Clock::now()).first->second;
      if (last != beat) {
        last = beat;
        since = Clock::now();
      }
      if (Clock::now() - since > timeout) fail(what, "time is up");
    }
  }
}

void Ranks::wait_for_first() const {
  if (state_->size == 1) return;
  const std::string what = "waiting for rank 0";
  const std::string key = state_->own_key("first/" + std::to_string(state_->waits_for_first++));
  if (state_->rank == 0) return state_->guarded(what, [&] { state_->set(key, "here"); });
  state_->wait_until(what, [&] { return state_->is_set(key); }, [] { return std::vector<int>{0}; });
}

std::string Ranks::decided(const std::string& about, const std::string& text,
                           const std::function<std::string(const std::vector<std::string>&)>& decide) const {
  if (state_->size == 1) return decide({text});
  State& state = *state_;
  const std::string what = "waiting for all ranks, about " + about;
  const int64_t number = state.asked([&](c10d::Store&) { return state.decisions[about]++; });
  const auto key_of = [&](int64_t each) {
    return state.own_key(detail::concat("decided/", about, "/", each));
  };
  const std::string key = key_of(number), verdict_key = key + "/verdict";
  const auto text_key = [&](int rank) { return detail::concat(key, "/", rank); };
  state.guarded(what, [&] {
    state.set(text_key(state.rank), text);
    state.asked([&](c10d::Store& at) { at.add(key, 1); });
  });
  constexpr char kFine = '+', kThrew = '!';
  std::string verdict;
  if (state.rank != 0) {
    state.wait_until(what, [&] { return state.is_set(verdict_key); }, [] { return std::vector<int>{0}; });
    verdict = state.guarded(what, [&] { return state.get(verdict_key); });
  } else {
    state.wait_until(
        what, [&] { return state.asked([&](c10d::Store& at) { return at.add(key, 0); }) >= state.size; },
        [&] {
          std::vector<int> missing;
          for (int rank = 0; rank < state.size; ++rank)
            if (!state.is_set(text_key(rank))) missing.push_back(rank);
          return missing;
        });
    std::vector<std::string> texts;
    for (int rank = 0; rank < state.size; ++rank) {
      texts.push_back(state.guarded(what, [&] { return state.get(text_key(rank)); }));
      state.guarded(what, [&] { state.asked([&](c10d::Store& at) { at.deleteKey(text_key(rank)); }); });
    }
    try {
      verdict = kFine + decide(texts);
    } catch (const std::exception& error) {
      verdict = kThrew + std::string(error.what());
    }
    state.guarded(what, [&] {
      state.set(verdict_key, verdict);
      // All have read the one before: they would not be here otherwise.
      for (const std::string& old : {key_of(number - 1), key_of(number - 1) + "/verdict"})
        state.asked([&](c10d::Store& at) { at.deleteKey(old); });
    });
  }
  if (verdict.front() == kThrew) throw Error(verdict.substr(1));
  return verdict.substr(1);
}

struct MeetingPlace::State {
  uint16_t port = 0;
  StorePtr store{};

  template <typename Function>
  auto asked(Function function) const {
    try {
      return function(*store);
    } catch (const std::exception& error) {
      throw RankError(detail::concat("the process that holds the ranks' meeting place is gone or does not "
                                     "answer. LibTorch: ",
                                     first_sentence(error.what())),
                      {0});
    }
  }
};

namespace {

std::string key_of(int attempt, const char* name) {
  return distributed::attempt_prefix(std::to_string(attempt)) + "/" + name;
}

}  // namespace

MeetingPlace::MeetingPlace(const std::string& address, uint16_t port) : state_(std::make_shared<State>()) {
  const distributed::Listener listener = distributed::listen_on(address, port);
  c10d::TCPStoreOptions options;
  options.port = state_->port = listener.port;
  options.isServer = true;
  options.waitWorkers = false;
  options.masterListenFd = listener.fd;
  state_->store = c10::make_intrusive<c10d::TCPStore>(address, options);
}

std::optional<MeetingPlace> MeetingPlace::find(const std::string& address, uint16_t port) {
  // LibTorch would try by itself, and print a warning each time.
  if (!distributed::answers(address, port)) return std::nullopt;
  c10d::TCPStoreOptions options;
  options.port = port;
  options.waitWorkers = false;
  options.timeout = std::chrono::seconds(10);
  auto state = std::make_shared<State>();
  state->port = port;
  try {
    // As long as ranks wait for one another by default: a launcher that is slow is not gone.
    state->store = connected_store(address, options, RanksOptions{}.timeout);
  } catch (const std::exception&) {
    return std::nullopt;  // it has just ended, or is another program's
  }
  return MeetingPlace(std::move(state));
}

uint16_t MeetingPlace::port() const { return state_->port; }

LostRank MeetingPlace::announce_lost(int rank, const std::string& why, int attempt) {
  return read_lost(leave_note(key_of(attempt, distributed::kLostKey), detail::concat(rank, " ", why)));
}

std::optional<LostRank> MeetingPlace::lost(int attempt) const {
  const auto text = note(key_of(attempt, distributed::kLostKey));
  return text ? std::optional(read_lost(*text)) : std::nullopt;
}

void MeetingPlace::announce_end(int rank, int attempt) {
  leave_note(key_of(attempt, distributed::kEndedKey) + std::to_string(rank), "yes");
}

bool MeetingPlace::has_joined(int rank, int attempt) const {
  return note(key_of(attempt, distributed::kJoinedKey) + std::to_string(rank)).has_value();
}

std::vector<int> MeetingPlace::unanswering(int attempt) const {
  std::istringstream text(note(key_of(attempt, distributed::kUnansweringKey)).value_or(""));
  std::vector<int> ranks;
  for (std::string each; std::getline(text, each, ',');) ranks.push_back(std::atoi(each.c_str()));
  return ranks;
}

std::string MeetingPlace::leave_note(const std::string& name, const std::string& text) {
  return state_->asked(
      [&](c10d::Store& store) { return text_of(store.compareSet(name, bytes_of(""), bytes_of(text))); });
}

std::optional<std::string> MeetingPlace::note(const std::string& name) const {
  return state_->asked([&](c10d::Store& store) {
    return store.check({name}) ? std::optional(text_of(store.get(name))) : std::nullopt;
  });
}

bool MeetingPlace::is_own(const std::string& address) { return distributed::is_own(address); }
bool MeetingPlace::is_loopback(const std::string& address) { return distributed::is_loopback(address); }

}  // namespace halfstep
