// AVX-512 (F, BW, DQ, VL): 16 elements at a time.
#include "kernels/attention_blocks.h"
#include "kernels/attention_vectors_avx512.h"

namespace halfstep {

constinit const AttentionLoops kAvx512Attention = Attention<Avx512>::kLoops;

}  // namespace halfstep
