// Causal attention in BF16, at the shapes of small models and of larger ones.
#include "block_bench/block_bench.h"

namespace bench {
namespace {

struct Shape {
  int64_t batch, heads, key_heads, length, head_size;
};
constexpr Shape kShapes[] = {
    {16, 4, 4, 128, 32}, {4, 9, 3, 512, 64}, {1, 12, 12, 1024, 64}, {1, 8, 8, 2048, 64}};

std::string text_of(const Shape& shape) {
  const std::string shared = shape.key_heads == shape.heads ? "" : "/" + std::to_string(shape.key_heads);
  return std::to_string(shape.batch) + "," + std::to_string(shape.heads) + shared + "," +
         std::to_string(shape.length) + "," + std::to_string(shape.head_size);
}

/// Of one product of queries and keys that see each other, or of as many probabilities with values.
double operations_of_a_product(const Shape& shape) {
  const auto length = static_cast<double>(shape.length);
  return 2.0 * static_cast<double>(shape.batch * shape.heads * shape.head_size) * length * (length + 1) / 2;
}

at::Tensor attention(const Tensors& inputs) {
  return at::scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], /*attn_mask=*/{}, /*dropout_p=*/0,
                                          /*is_causal=*/true, /*scale=*/std::nullopt, /*enable_gqa=*/true);
}

}  // namespace

std::vector<Block> attention_blocks() {
  std::vector<Block> blocks;
  for (const Shape& shape : kShapes) {
    // As a layer has them: the heads of a position side by side.
    const auto heads = [&](int64_t count) {
      return at::randn({shape.batch, shape.length, count, shape.head_size})
          .to(at::kBFloat16)
          .transpose(1, 2)
          .requires_grad_();
    };
    blocks.push_back({.name = "attention",
                      .shape = text_of(shape),
                      .inputs = {heads(shape.heads), heads(shape.key_heads), heads(shape.key_heads)},
                      .ours = attention,
                      .libtorch = attention,
                      .exact = attention,
                      // Scores and output; backward makes scores again, and four gradients.
                      .forward_operations = 2 * operations_of_a_product(shape),
                      .backward_operations = 5 * operations_of_a_product(shape)});
  }
  return blocks;
}

}  // namespace bench
