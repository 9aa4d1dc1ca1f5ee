// Models small enough to run in a test, unlike one another in what can differ.
#pragma once

#include <halfstep/models.h>

namespace halfstep::testing {

inline Gpt2Config tiny_gpt2() {
  return {.vocab_size = 61,
          .n_positions = 32,
          .n_embd = 32,
          .n_layer = 2,
          .n_head = 4,
          .resid_pdrop = 0,
          .embd_pdrop = 0,
          .attn_pdrop = 0};
}

/// Two queries' heads to one of keys and values, a free head.
inline LlamaConfig tiny_llama() {
  return {.vocab_size = 61,
          .hidden_size = 32,
          .intermediate_size = 48,
          .num_hidden_layers = 2,
          .num_attention_heads = 4,
          .num_key_value_heads = 2,
          .max_position_embeddings = 32};
}

}  // namespace halfstep::testing
