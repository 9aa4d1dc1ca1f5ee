#include <halfstep/error.h>
#include <halfstep/recipe.h>

namespace halfstep {
namespace {

constexpr std::int64_t kAll = 0;
constexpr std::int64_t kBlock = 128, kMxBlock = 32, kNvBlock = 16;

/// The same for all operands, but for the format of gradients.
Recipe recipe_of(std::string name, OperandRule operand, OperandRule grad) {
  return {.name = std::move(name),
          .forward = {operand, operand},
          .input_grad = {grad, operand},
          .weight_grad = {grad, operand}};
}

void check_operand(const Recipe& recipe, const char* product, const OperandRule& rule) {
  const auto refuse = [&](auto&&... why) {
    detail::throw_error(detail::concat("Recipe ", recipe.name, ": ", product, ": ", why...));
  };
  if (rule.format != Format::E4M3 && rule.format != Format::E5M2 && rule.format != Format::E2M1)
    refuse("operands in ", traits(rule.format).name, ". Use E4M3, E5M2 or E2M1.");
  if (rule.block_along < 0 || rule.block_across < 0)
    refuse("a block of ", rule.block_along, " x ", rule.block_across, ". Use 0 for all elements.");
  // Neither a code nor an FP32 scale would show a value that is not finite: the step would not be skipped.
  if (rule.format == Format::E2M1 && rule.scale != ScaleRule::E4m3 && rule.scale != ScaleRule::E8m0Floor &&
      rule.scale != ScaleRule::E8m0Ceil)
    refuse("E2M1 codes need scales in E4M3 or E8M0, which can say that a value is not finite.");
  if (rule.scale == ScaleRule::E4m3 && rule.format != Format::E2M1)
    refuse("scales in E4M3 belong to E2M1 codes, not to ", traits(rule.format).name, ".");
  if (rule.scale == ScaleRule::E4m3 && (rule.block_along == kAll || rule.block_across == kAll))
    refuse("scales in E4M3 are for blocks: set block_along and block_across.");
  // What is remembered is how large values are before the transform, which makes them up to 4 times larger.
  if (recipe.delayed && rule.hadamard)
    refuse("delayed scaling and the Hadamard transform do not go together. Use fp8_current().");
  // Such a scale varies along the sum and must be exact beside a code: no epilogue can apply it.
  if (rule.scale == ScaleRule::Fp32 && rule.block_along != kAll)
    refuse("FP32 scales for blocks of ", rule.block_along,
           " along the sum. Use ScaleRule::PowerOfTwo, or block_along = 0.");
  if (recipe.delayed && (rule.block_along != kAll || rule.block_across != kAll))
    refuse("delayed scaling has one scale for a tensor; set block_along and block_across to 0.");
  if (recipe.delayed && rule.scale != ScaleRule::Fp32 && rule.scale != ScaleRule::PowerOfTwo)
    refuse("delayed scaling has FP32 or power-of-two scales.");
}

}  // namespace

Recipe Recipe::fp8_delayed() {
  Recipe recipe = recipe_of("fp8-delayed", {.format = Format::E4M3}, {.format = Format::E5M2});
  recipe.delayed.emplace();
  return recipe;
}

Recipe Recipe::fp8_current() {
  return recipe_of("fp8-current", {.format = Format::E4M3}, {.format = Format::E5M2});
}

Recipe Recipe::fp8_rowwise() {
  const OperandRule row{.scale = ScaleRule::PowerOfTwo, .block_along = kAll, .block_across = 1};
  return recipe_of("fp8-rowwise", row, row);
}

Recipe Recipe::fp8_block() {
  const OperandRule line{.scale = ScaleRule::PowerOfTwo, .block_along = kBlock, .block_across = 1};
  Recipe recipe = recipe_of("fp8-block", line, line);
  recipe.forward.right.block_across = recipe.input_grad.right.block_across = kBlock;
  return recipe;
}

Recipe Recipe::mxfp8(ScaleRule scale) {
  const OperandRule line{.scale = scale, .block_along = kMxBlock, .block_across = 1};
  return recipe_of("mxfp8", line, line);
}

Recipe Recipe::nvfp4() {
  const OperandRule line{
      .format = Format::E2M1, .scale = ScaleRule::E4m3, .block_along = kNvBlock, .block_across = 1};
  OperandRule grad = line;
  grad.stochastic = true;
  Recipe recipe = recipe_of("nvfp4", line, grad);
  recipe.forward.right.block_across = recipe.input_grad.right.block_across = kNvBlock;
  recipe.weight_grad.left.hadamard = recipe.weight_grad.right.hadamard = true;
  return recipe;
}

void Recipe::check() const {
  const auto check_product = [&](const char* which, const ProductRule& product) {
    if (!product.quantised) return;
    check_operand(*this, which, product.left);
    check_operand(*this, which, product.right);
    HALFSTEP_CHECK(product.left.hadamard == product.right.hadamard, "Recipe ", name, ": ", which,
                   ": one operand has the Hadamard transform and the other has not. It cancels only if both "
                   "have it.");
  };
  // Gradients are drawn once. What forward computes is computed again: by an evaluation of the same weights,
  // and by a region that recomputes its activations.
  HALFSTEP_CHECK(!forward.quantised || !(forward.left.stochastic || forward.right.stochastic), "Recipe ",
                 name,
                 ": forward: an operand is rounded stochastically, and the same input would give another "
                 "output each time. Set stochastic in input_grad and weight_grad alone.");
  check_product("forward", forward);
  check_product("input_grad", input_grad);
  check_product("weight_grad", weight_grad);
  HALFSTEP_CHECK(!delayed || (delayed->history >= 1 && delayed->history <= 1'000'000), "Recipe ", name,
                 ": a history of ", delayed ? delayed->history : 0, " steps. Use 1 to 1,000,000.");
  HALFSTEP_CHECK(!delayed || (delayed->margin >= 0 && delayed->margin <= 30), "Recipe ", name,
                 ": a margin of ", delayed ? delayed->margin : 0, ". Use 0 to 30.");
}

}  // namespace halfstep
