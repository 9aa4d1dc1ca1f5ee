// What a call that must fail says.
#pragma once

#include <halfstep/error.h>

#include <string>

namespace halfstep::testing {

/// The message of the Error that `body` throws, or "no error".
std::string error_of(auto&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace halfstep::testing
