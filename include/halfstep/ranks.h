// The processes of one training run: who they are, and what they tell one another. A program of one process
// needs none of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/config.h>
#include <halfstep/error.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace halfstep {

/// Another process of the run is gone, does not answer, or does something else. The processes that are left
/// cannot go on together: end, and start again from the last checkpoint.
class HALFSTEP_API RankError : public Error {
 public:
  RankError(const std::string& message, std::vector<int> ranks) : Error(message), ranks_(std::move(ranks)) {}
  /// Those that are gone or do not answer; none where all answer and disagree.
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  std::vector<int> ranks_;
};

/// A run of the parts of something that ranks share.
struct RankShare {
  int64_t first = 0, count = 0;
};

/// Of Ranks::from_environment.
struct RanksOptions {
  /// How long a rank may keep the others waiting before it counts as hung.
  std::chrono::milliseconds timeout{60'000};
};

/// The processes of a run, numbered from 0, of which this is one. A handle: copies share the connections.
///
///     const auto ranks = halfstep::Ranks::from_environment();
///     halfstep::TrainStep step(halfstep::Precision::bf16(), *model, halfstep::AdamWOptions{.lr = 3e-4},
///                              {.precision = {.ranks = ranks}});
///
/// Started by `halfstep launch -n 8 -- ./program` or by torchrun. Every rank makes the same calls in the same
/// order: a call that only some make is a RankError after the timeout.
///
/// The connections are LibTorch's: Gloo for tensors on a CPU, NCCL for CUDA where LibTorch has it (compiled,
/// not run); tensors of any other accelerator go by way of the host. They are not encrypted, and whoever
/// reaches the ports can join. So all listens on the loopback address, unless MASTER_ADDR is another one:
/// then on the address of this host that leads there.
class HALFSTEP_API Ranks {
 public:
  /// One process: this one. Nothing is opened.
  Ranks();
  /// By the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without any of them, one process.
  static Ranks from_environment(const RanksOptions& options = {});

  int rank() const;        ///< of this process
  int local_rank() const;  ///< among those of this host: LOCAL_RANK
  int size() const;        ///< how many there are
  /// Which of `total` parts are this rank's. Ranks' shares follow one another, and differ by one part at
  /// most.
  RankShare share(int64_t total) const { return share(total, rank()); }
  RankShare share(int64_t total, int of_rank) const;

  /// Element by element, over all ranks, in place: each then has the same bits.
  void sum(at::Tensor tensor) const;
  /// The largest of each element. For integers: that of floating-point numbers may lose a NaN.
  void largest(at::Tensor tensor) const;
  /// Rank `from`'s values, in place.
  void broadcast(at::Tensor tensor, int from = 0) const;
  /// Those of all ranks, by rank: [size, ...].
  at::Tensor gathered(const at::Tensor& tensor) const;
  /// Rank 0's text.
  std::string told(std::string text) const;
  /// What rank 0's `decide` makes of the texts of all ranks, by rank, on each of them; an Error on all if it
  /// throws. Waits for all, however long that takes, unless one of them hangs: for what each does by itself,
  /// such as writing to a disk. Unlike the other calls it may be under way on several threads, and beside
  /// exchanges of tensors, if each is `about` something else: those about the same come one after another.
  std::string decided(const std::string& about, const std::string& text,
                      const std::function<std::string(const std::vector<std::string>&)>& decide) const;
  /// Returns when all ranks have called it.
  void barrier() const;
  /// Returns when rank 0 has called it for the so-manieth time, however long that takes: for what one rank
  /// does and the others wait for.
  void wait_for_first() const;

  /// Something that was begun, and goes on beside the program.
  class HALFSTEP_API Pending {
   public:
    void wait();  ///< until it is done; a RankError if it fails

   private:
    friend class Ranks;
    struct State;
    std::shared_ptr<State> state_;
  };
  /// sum(), begun. The tensor is in use until wait(). `owner`: whose piece it is, of what begin_pieces began.
  [[nodiscard]] Pending begin_sum(at::Tensor tensor, std::string what, const void* owner = nullptr) const;
  /// `part` of each rank, by rank, as `all`: [size x n] elements. Both are in use until wait().
  [[nodiscard]] Pending begin_gather(at::Tensor part, at::Tensor all, std::string what) const;

  /// From here to end_pieces, `owner` begins sums at moments that differ from rank to rank. Exchanges match
  /// by their order, so `begin_rest` is called before anything else is exchanged, and has to begin those that
  /// are left.
  void begin_pieces(const void* owner, std::function<void()> begin_rest) const;
  void end_pieces(const void* owner) const;

 private:
  template <typename Begin>
  Pending begun(std::vector<at::Tensor> tensors, std::string what, Begin begin,
                const void* owner = nullptr) const;

  struct State;
  std::shared_ptr<State> state_;
};

/// A rank that is gone, and why.
struct LostRank {
  int rank = 0;
  std::string why;
};

/// The meeting place of the ranks of one run, where they find one another: held by the process that starts
/// them (`halfstep launch`), so that it outlives each of them. On several hosts the process on the first one
/// holds it and those on the others find it. Ranks that are started again are another attempt: what is said
/// of one attempt is not heard in the next.
///
/// A RankError where the process that holds it is gone.
class HALFSTEP_API MeetingPlace {
 public:
  /// Listens on `address`. Port 0: one that is free.
  explicit MeetingPlace(const std::string& address = "127.0.0.1", uint16_t port = 0);
  /// One that another process holds; nothing while none does.
  static std::optional<MeetingPlace> find(const std::string& address, uint16_t port);
  uint16_t port() const;

  /// Tells the others why a rank is gone: they would only see that it is. The first announcement of an
  /// attempt stays, and is returned.
  LostRank announce_lost(int rank, const std::string& why, int attempt = 0);
  std::optional<LostRank> lost(int attempt = 0) const;
  /// Ranks that others have waited for in vain, where nobody announced why.
  std::vector<int> unanswering(int attempt = 0) const;
  /// Whether a rank's Ranks::from_environment has come here: it then hears by itself of one that is lost.
  bool has_joined(int rank, int attempt = 0) const;
  /// A rank has come to its end, with nothing wrong: others that still need it can say so.
  void announce_end(int rank, int attempt = 0);

  /// For what processes that start ranks agree on. The first text of a name stays, and is returned.
  std::string leave_note(const std::string& name, const std::string& text);
  std::optional<std::string> note(const std::string& name) const;

  /// Whether `address` is one of this host's.
  static bool is_own(const std::string& address);
  /// Whether nobody but this host reaches it.
  static bool is_loopback(const std::string& address);

 private:
  struct State;
  explicit MeetingPlace(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace halfstep
