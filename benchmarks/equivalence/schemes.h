// The ways of training whose losses are compared.
#pragma once

#include <halfstep/precision.h>
#include <halfstep/storage.h>

#include <optional>
#include <string>
#include <vector>

namespace bench {

enum class Role {
  Reference,  ///< FP32 training by LibTorch alone
  Candidate,  ///< must be equivalent to it
  Control,  ///< must be told apart from it, in the same run: else the run could not have told anything apart
};

/// What is done wrong on purpose.
enum class Flaw {
  None,
  OneUlp,        ///< one weight starts 1 ulp higher: no flaw at all, and must not look like one
  UnscaledTwice  ///< the loss scale is divided out twice, as when both the loop and the optimizer do it
};

struct Scheme {
  std::string name;
  Role role = Role::Candidate;
  std::optional<halfstep::Precision> precision = {};  ///< none: LibTorch alone, without Halfstep
  halfstep::MomentStorage moments = halfstep::MomentStorage::Fp32;
  Flaw flaw = Flaw::None;
};

/// The reference first.
const std::vector<Scheme>& schemes();

const Scheme& scheme_named(const std::string& name);

inline constexpr const char* kDefaultScheme = "bf16";
inline constexpr const char* kPureBf16Scheme = "pure_bf16";

}  // namespace bench
