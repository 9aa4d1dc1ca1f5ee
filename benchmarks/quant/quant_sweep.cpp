// quant_sweep: codes and scales of every recipe's operands, beside an exact reference and beside torchao.
//
//   quant_sweep [--json] [--rows N]
//
// Eight adversarial distributions of N x 1,024 values, which sums along columns and along rows. Exits with 1
// where a code or scale differs from the reference, or from torchao without one of the reasons that are told.
#include <CLI/CLI.hpp>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "kernels/quantise.h"
#include "support/python.h"
#include "support/quantise_reference.h"

namespace halfstep {
namespace {

using nlohmann::ordered_json;
using testing::Matrix;
using testing::Reference;

constexpr std::size_t kColumns = 1024;

struct Made {
  std::vector<std::uint8_t> codes;
  std::vector<std::uint8_t> scales;  // bytes as stored
};

struct Operand {
  std::string name;
  OperandRule rule;
};

/// Each rule that a recipe uses, once.
std::vector<Operand> operands() {
  std::vector<Operand> found;
  for (const Recipe& recipe : {Recipe::fp8_current(), Recipe::fp8_rowwise(), Recipe::fp8_block(),
                               Recipe::mxfp8(), Recipe::mxfp8(ScaleRule::E8m0Floor), Recipe::nvfp4()})
    for (const ProductRule& product : {recipe.forward, recipe.input_grad, recipe.weight_grad})
      for (OperandRule rule : {product.left, product.right}) {
        rule.stochastic = rule.hadamard =
            false;  // tests/quant has their mean; the transform comes before the codes
        const auto same = [&](const Operand& each) { return each.rule == rule; };
        if (std::none_of(found.begin(), found.end(), same))
          found.push_back({recipe.name + " " + traits(rule.format).name + " " +
                               std::to_string(rule.block_across) + "x" + std::to_string(rule.block_along) +
                               (rule.scale == ScaleRule::E8m0Floor ? " floor" : ""),
                           rule});
      }
  return found;
}

QuantiseRule kernel_rule(const OperandRule& rule, bool over_rows, const Matrix& matrix, float amax) {
  const auto part = [](std::int64_t block, std::size_t whole) {
    return block == 0 ? whole : static_cast<std::size_t>(block);
  };
  const BlockShape block =
      over_rows ? BlockShape{part(rule.block_along, matrix.rows), part(rule.block_across, matrix.columns)}
                : BlockShape{part(rule.block_across, matrix.rows), part(rule.block_along, matrix.columns)};
  return {.codes = rule.format,
          .block = block,
          .scale = rule.scale,
          .tensor_scale = nvfp4_tensor_scale(std::bit_cast<std::uint32_t>(amax))};
}

std::size_t block_count(const QuantiseRule& rule, const Matrix& matrix) {
  const auto count = [](std::size_t size, std::size_t block) { return (size + block - 1) / block; };
  return count(matrix.rows, rule.block.rows) * count(matrix.columns, rule.block.columns);
}

Made by_kernels(const Matrix& matrix, const QuantiseRule& rule) {
  Made made{std::vector<std::uint8_t>(matrix.values.size()),
            std::vector<std::uint8_t>(block_count(rule, matrix) * scale_bytes(rule.scale))};
  QuantiseCounts counts;
  quantise({Format::FP32, matrix.values.data(), matrix.rows, matrix.columns, matrix.columns}, rule,
           {0, matrix.rows, 0, matrix.columns}, made.codes.data(), made.scales.data(), counts);
  return made;
}

Made by_reference(const Matrix& matrix, const QuantiseRule& rule) {
  const std::size_t across = (matrix.columns + rule.block.columns - 1) / rule.block.columns;
  const auto block_of = [&](std::size_t i) {
    return i / matrix.columns / rule.block.rows * across + i % matrix.columns / rule.block.columns;
  };
  std::vector<double> amax(block_count(rule, matrix));
  for (std::size_t i = 0; i < matrix.values.size(); ++i)
    amax[block_of(i)] = std::max(amax[block_of(i)], std::abs(double{matrix.values[i]}));
  Made made;
  std::vector<Reference> scales;
  for (const double each : amax) {
    scales.push_back(testing::reference_scale(each, rule));
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(&scales.back().stored);
    made.scales.insert(made.scales.end(), bytes, bytes + scale_bytes(rule.scale));
  }
  for (std::size_t i = 0; i < matrix.values.size(); ++i)
    made.codes.push_back(
        static_cast<std::uint8_t>(encode_float(matrix.values[i] * scales[block_of(i)].encode, rule.codes)));
  return made;
}

std::vector<std::uint8_t> read_bytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// What differs from torchao, by the reason. Nothing else may differ.
struct Differences {
  std::int64_t codes = 0, scales = 0, unexplained = 0;
  std::map<std::string, std::int64_t> reasons{};
};

constexpr const char* kTinyBlock =
    "a block below 2^-118: torchao divides by 2^-126, or by 1 where the scale's code is 0; E8M0's code 0 is "
    "2^-127";
constexpr const char* kTinyTensor =
    "a tensor below 2^-108: torchao's tensor scale is subnormal or 0, ours 2^-119";
constexpr const char* kLogarithm =
    "torchao takes an FP32 logarithm, which rounds a quotient just below a power of two up";

std::string reason_for(const std::string& recipe, double block_amax, double tensor_amax) {
  if (recipe.starts_with("mx") && block_amax < 0x1p-110) return kTinyBlock;
  if (recipe == "nvfp4" && tensor_amax < 0x1p-105) return kTinyTensor;
  if (recipe == "rowwise" || recipe == "mx_ceil") {
    // Only where the quotient is within FP32's rounding of a power of two.
    const double quotient = recipe == "rowwise" ? 448 / block_amax : block_amax / 448;
    const double nearest = std::exp2(std::round(std::log2(quotient)));
    if (std::abs(quotient / nearest - 1) < 0x1p-16) return kLogarithm;
  }
  return "";
}

Differences compare_with_torchao(const std::string& name, const Matrix& matrix, const QuantiseRule& rule,
                                 const Made& ours, const Made& theirs, double tensor_amax) {
  Differences found;
  const std::size_t across = (matrix.columns + rule.block.columns - 1) / rule.block.columns;
  std::vector<double> amax(block_count(rule, matrix));
  const auto block_of = [&](std::size_t i) {
    return i / matrix.columns / rule.block.rows * across + i % matrix.columns / rule.block.columns;
  };
  for (std::size_t i = 0; i < matrix.values.size(); ++i)
    amax[block_of(i)] = std::max(amax[block_of(i)], std::abs(double{matrix.values[i]}));
  const auto note = [&](std::size_t block) {
    const std::string reason = reason_for(name, amax[block], tensor_amax);
    reason.empty() ? ++found.unexplained : ++found.reasons[reason];
  };
  if (ours.codes.size() != theirs.codes.size() || ours.scales.size() != theirs.scales.size()) {
    found.unexplained = static_cast<std::int64_t>(ours.codes.size());
    return found;
  }
  for (std::size_t i = 0; i < ours.codes.size(); ++i)
    if (ours.codes[i] != theirs.codes[i]) {
      ++found.codes;
      note(block_of(i));
    }
  const std::size_t bytes = scale_bytes(rule.scale);
  for (std::size_t block = 0; block < amax.size(); ++block)
    if (std::memcmp(&ours.scales[block * bytes], &theirs.scales[block * bytes], bytes) != 0) {
      ++found.scales;
      note(block);
    }
  return found;
}

int run(int argc, char** argv) {
  CLI::App app("Codes and scales of every recipe beside an exact reference and beside torchao");
  bool as_json = false;
  std::size_t rows = 1280;
  app.add_flag("--json", as_json, "Print the figures as JSON");
  app.add_option("--rows", rows, "Of each matrix; a multiple of 128")->check(CLI::Range(128, 100'000));
  CLI11_PARSE(app, argc, argv);
  rows = rows / 128 * 128;

  ordered_json answer{{"operands", ordered_json::array()}, {"torchao", ordered_json::array()}};
  bool good = true;
  const std::vector<Matrix> matrices = testing::adversarial(rows, kColumns, 21);
  for (const Operand& operand : operands()) {
    std::int64_t values = 0, different = 0;
    for (const Matrix& matrix : matrices) {
      float amax = 0;
      for (const float value : matrix.values) amax = std::max(amax, std::abs(value));
      for (const bool over_rows : {false, true}) {
        const QuantiseRule rule = kernel_rule(operand.rule, over_rows, matrix, amax);
        const Made ours = by_kernels(matrix, rule), expected = by_reference(matrix, rule);
        values += static_cast<std::int64_t>(matrix.values.size());
        for (std::size_t i = 0; i < ours.codes.size(); ++i) different += ours.codes[i] != expected.codes[i];
        for (std::size_t i = 0; i < ours.scales.size(); ++i)
          different += ours.scales[i] != expected.scales[i];
      }
    }
    good = good && different == 0;
    answer["operands"].push_back({{"operand", operand.name}, {"values", values}, {"different", different}});
    std::fprintf(stderr, "%-28s %12lld values, %lld differ from the reference\n", operand.name.c_str(),
                 static_cast<long long>(values), static_cast<long long>(different));
  }

  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("quant_sweep_" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  const std::map<std::string, OperandRule> theirs = {
      {"tensor_e4m3", {}},
      {"tensor_e5m2", {.format = Format::E5M2}},
      {"rowwise", Recipe::fp8_rowwise().forward.left},
      {"mx_floor", Recipe::mxfp8(ScaleRule::E8m0Floor).forward.left},
      {"mx_ceil", Recipe::mxfp8().forward.left},
      {"nvfp4", Recipe::nvfp4().forward.left}};
  std::map<std::string, Differences> totals;
  std::string version;
  for (const Matrix& matrix : matrices) {
    float amax = 0;
    for (const float value : matrix.values) amax = std::max(amax, std::abs(value));
    if (amax == 0) continue;  // torchao's NVFP4 divides by 0 there; the others are in the unit tests
    std::ofstream(folder / "values", std::ios::binary)
        .write(reinterpret_cast<const char*>(matrix.values.data()),
               static_cast<std::streamsize>(matrix.values.size() * sizeof(float)));
    const nlohmann::json told = testing::ask_python(
        "benchmarks/quant/torchao_oracle.py",
        {{"values", folder / "values"}, {"rows", rows}, {"columns", kColumns}, {"out", folder}});
    version = told["torchao"];
    for (const auto& [name, operand] : theirs) {
      const QuantiseRule rule = kernel_rule(operand, /*over_rows=*/false, matrix, amax);
      const Made made{read_bytes(folder / (name + ".codes")), read_bytes(folder / (name + ".scales"))};
      const Differences found =
          compare_with_torchao(name, matrix, rule, by_kernels(matrix, rule), made, double{amax});
      Differences& total = totals[name];
      total.codes += found.codes;
      total.scales += found.scales;
      total.unexplained += found.unexplained;
      for (const auto& [reason, count] : found.reasons) total.reasons[reason] += count;
      if (found.unexplained > 0)
        std::fprintf(stderr,
                     "%s, %s: %lld codes and %lld scales differ from torchao's, %lld without a reason\n",
                     name.c_str(), matrix.what.c_str(), static_cast<long long>(found.codes),
                     static_cast<long long>(found.scales), static_cast<long long>(found.unexplained));
    }
  }
  std::filesystem::remove_all(folder);
  for (const auto& [name, total] : totals) {
    answer["torchao"].push_back({{"recipe", name},
                                 {"codes_different", total.codes},
                                 {"scales_different", total.scales},
                                 {"reasons", total.reasons},
                                 {"unexplained", total.unexplained}});
    good = good && total.unexplained == 0;
    if (!as_json) {
      std::printf("torchao %s %-12s %lld codes and %lld scales differ, %lld without a reason\n",
                  version.c_str(), name.c_str(), static_cast<long long>(total.codes),
                  static_cast<long long>(total.scales), static_cast<long long>(total.unexplained));
      for (const auto& [reason, count] : total.reasons)
        std::printf("    %lld: %s\n", static_cast<long long>(count), reason.c_str());
    }
  }
  answer["torchao_version"] = version;
  answer["good"] = good;
  if (as_json) std::printf("%s\n", answer.dump(2).c_str());
  return good ? 0 : 1;
}

}  // namespace
}  // namespace halfstep

int main(int argc, char** argv) {
  try {
    return halfstep::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "quant_sweep: " << error.what() << "\n";
    return 1;
  }
}
