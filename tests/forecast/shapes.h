// Shapes that the tests of this room share.
#pragma once

#include <string>

#include "forecast/shape.h"

namespace halfstep::forecast {

inline ModelShape known(std::string_view name) {
  for (const KnownShape& shape : known_shapes())
    if (shape.name == name) return read_shape(shape.config_json, std::string(name));
  throw std::invalid_argument(std::string(name));
}

}  // namespace halfstep::forecast
