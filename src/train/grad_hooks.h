// Tells when the gradient of a parameter is complete, while backward goes on with others.
#pragma once

#include <halfstep/params.h>

#include <functional>
#include <memory>
#include <vector>

namespace halfstep::train {

/// `on_grad(i)` is called where autograd has just added to the gradient of parameter `i`: once in a backward,
/// but for parameters of several regions that are computed again in backward, each of which adds its part.
class GradHooks {
 public:
  explicit GradHooks(std::function<void(std::size_t)> on_grad);
  ~GradHooks();

  /// While one lives, hooks are called.
  class Armed {
   public:
    Armed(GradHooks& hooks, const std::vector<Param>& params);
    ~Armed();
    Armed(const Armed&) = delete;
    Armed& operator=(const Armed&) = delete;

   private:
    GradHooks& hooks_;
  };

 private:
  struct State;
  struct Watched;
  void watch(const std::vector<Param>& params);

  std::shared_ptr<State> state_;
  std::vector<Watched> watched_;
};

}  // namespace halfstep::train
