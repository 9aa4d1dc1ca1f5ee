// What a scope does where the processor has no instructions for the scope's type. (docs/decisions/0098.)
#pragma once

#include <c10/core/ScalarType.h>

#include <string_view>

namespace halfstep {

bool cpu_has_products_of(c10::ScalarType low);

/// One of LibTorch's convolutions, but not those of cuDNN.
bool is_convolution(std::string_view op);

/// A sum of products that is rounded once: what is inside has no roundings of its own to keep.
bool is_one_product(std::string_view op);

/// A GRU, LSTM or RNN over a sequence, or oneDNN's kernel for one.
bool is_recurrent_layer(std::string_view op);

/// Whether oneDNN trains an LSTM layer in this type: in BF16 with AVX-512, whose BF16 instructions it may
/// imitate, and in FP16 nowhere.
bool lstm_kernel_takes(c10::ScalarType low);

}  // namespace halfstep
