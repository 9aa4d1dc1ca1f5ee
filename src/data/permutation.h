// An order of n things that is computed, not stored.
#pragma once

#include <cstdint>

namespace halfstep {

/// Where `index` of 0..count-1 goes. For one seed and epoch every place is taken exactly once.
///
/// A Feistel network over the next even power of two, with Philox for its rounds; what lands outside is sent
/// through again until it lands inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
uint64_t permuted(uint64_t index, uint64_t count, uint64_t seed, uint64_t epoch);

}  // namespace halfstep
