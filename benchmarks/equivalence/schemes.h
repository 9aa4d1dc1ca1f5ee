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
  Shown,      ///< is measured; nothing is asked of it
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

/// What is compared with what, and how far apart two may be.
struct Study {
  std::vector<Scheme> schemes;  ///< the reference first
  double margin_percent;        ///< of the reference's loss
};

const Study& storages();  ///< ways to keep weights and moments, beside FP32
const Study& recipes();   ///< FP8, MXFP8 and NVFP4, beside BF16

/// Of either study.
const Scheme& scheme_named(const std::string& name);

inline constexpr const char* kDefaultScheme = "bf16";
inline constexpr const char* kPureBf16Scheme = "pure_bf16";
inline constexpr const char* kUnscaledScheme = "fp8_unscaled";

}  // namespace bench
