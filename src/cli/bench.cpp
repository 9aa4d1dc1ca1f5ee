// `halfstep bench --calibrate`: what this machine can do, as constants for `halfstep forecast`.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <halfstep/autocast.h>
#include <halfstep/printable.h>
#include <halfstep/ranks.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <limits>

#include "cli/commands.h"
#include "cli/terminal_text.h"
#include "forecast/device.h"
#include "io/durable_file.h"
#include "words/numbers.h"

namespace halfstep::cli {
namespace {

using Clock = std::chrono::steady_clock;

/// The least of several: others on this machine only add to it.
double least_seconds(const std::function<void()>& work) {
  constexpr int kLeastTimes = 5;
  constexpr double kEnoughSeconds = 1.0;
  work();  // makes what is made once
  double least = std::numeric_limits<double>::infinity(), all = 0;
  for (int times = 0; times < kLeastTimes || all < kEnoughSeconds; ++times) {
    const auto begin = Clock::now();
    work();
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    least = std::min(least, seconds);
    all += seconds;
  }
  return least;
}

/// Operations per second of a product of the size that blocks of small models have.
double product_flops(c10::ScalarType type) {
  constexpr int64_t kTokens = 1024, kWidth = 1024, kInner = 4096;
  const at::Tensor x = at::rand({kTokens, kWidth}).to(type), weight = at::rand({kInner, kWidth}).to(type);
  const double seconds = least_seconds([&] {
    if (type == at::kFloat) {
      at::linear(x, weight);
      return;
    }
    const AutocastScope scope(type, OpPolicy::standard(), {.allow_emulated = true});
    at::linear(x, weight);
  });
  return 2.0 * kTokens * kWidth * kInner / seconds;
}

/// A copy reads and writes each byte.
double memory_bytes_per_second() {
  constexpr int64_t kBytes = int64_t{256} << 20;
  const at::Tensor from = at::ones({kBytes / 4}), to = at::empty({kBytes / 4});
  return 2.0 * kBytes / least_seconds([&] { to.copy_(from); });
}

/// A ring of n ranks passes 2 (n - 1) hops, and of each byte 2 (n - 1) / n through each link.
forecast::Link measured_link(const Ranks& ranks) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  const auto sum_seconds = [&](int64_t elements) {
    const at::Tensor values = at::ones({elements});
    double least = std::numeric_limits<double>::infinity();
    for (int times = 0; times < 10; ++times) {
      ranks.barrier();
      const auto begin = Clock::now();
      ranks.sum(values);
      least = std::min(least, std::chrono::duration<double>(Clock::now() - begin).count());
    }
    return least;
  };
  const double hops = 2.0 * (ranks.size() - 1), small = sum_seconds(1), large = sum_seconds(kBytes / 4);
  return {
      .bytes_per_second = static_cast<double>(kBytes) * hops / ranks.size() / std::max(large - small, 1e-9),
      .seconds_per_hop = small / hops};
}

double machine_bytes() {
  return static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
}

forecast::Device calibrated(const Ranks& ranks) {
  const at::NoGradGuard no_grad;
  forecast::Device device{.name = "this machine",
                          .memory_bytes = machine_bytes() / ranks.size(),
                          .usable_share = 0.9,
                          .memory_bytes_per_second = memory_bytes_per_second(),
                          .fp32_flops = product_flops(at::kFloat),
                          .bf16_flops = product_flops(at::kBFloat16),
                          .fp16_flops = product_flops(at::kHalf),
                          .products_in_fp32 = precision_support(at::kBFloat16).support != Support::Native,
                          .swiglu_in_one_pass = true,
                          .exchanges_by_gloo = true,
                          .ranks_per_node = ranks.size()};
  // A recipe decodes its operands and multiplies in the type around it (docs/recipes.md).
  device.fp8_flops = device.fp4_flops = device.bf16_flops;
  device.sources = {
      detail::concat("measured by halfstep bench --calibrate, ", counted(at::get_num_threads(), "thread"),
                     " of a rank: products of 1024 x 1024 x 4096, a copy of 256 MiB"),
      "assumed: 0.9 of the memory is for tensors"};
  if (ranks.size() > 1) {
    device.within_node = measured_link(ranks);
    device.sources.push_back(detail::concat("links: an exchange of 64 MiB and one of 4 bytes among ",
                                            ranks.size(), " ranks of this machine"));
  } else {
    // Another process takes a copy in and a copy out.
    device.within_node = {.bytes_per_second = device.memory_bytes_per_second / 4, .seconds_per_hop = 1e-4};
    device.sources.push_back(
        "links: assumed, a quarter of the memory's bandwidth and 100 us; measured if "
        "started by 'halfstep launch -n 2 bench --calibrate FILE'");
  }
  device.between_nodes = device.within_node;
  return device;
}

void calibrate(const std::string& path, bool json) {
  const Ranks ranks = Ranks::from_environment();
  const forecast::Device device = calibrated(ranks);
  ranks.barrier();
  if (ranks.rank() != 0) return;
  keep_answer_out_of(path);
  about_files([&] { files::replace_file(path, forecast::to_json(device)); });
  if (json) return print_answer(nlohmann::ordered_json::parse(forecast::to_json(device)));
  const auto rate = [](double flops) { return digits(flops / 1e9, 3) + " GFLOP/s\n"; };
  std::cout << "FP32 products  " << rate(device.fp32_flops) << "BF16 products  " << rate(device.bf16_flops)
            << "FP16 products  " << rate(device.fp16_flops) << "memory         "
            << bytes_text(device.memory_bytes_per_second) << "/s\n"
            << "exchange       " << bytes_text(device.within_node.bytes_per_second) << "/s, "
            << duration(device.within_node.seconds_per_hop) << " a hop"
            << (ranks.size() > 1 ? "" : ", assumed: start it by 'halfstep launch -n 2'") << "\n"
            << printable(path, Unprintable::Escaped) << "\n";
}

}  // namespace

void add_bench(CLI::App& program) {
  CLI::App* const command = program.add_subcommand("bench", "What this machine can do");
  auto path = std::make_shared<std::string>();
  command->add_option("--calibrate", *path, std::string("Write it, for 'halfstep forecast --device FILE'"))
      ->type_name("FILE")
      ->required();
  CLI::Option* const json = add_switch(*command, "--json", "The answer as JSON too");
  command->footer(
      "Takes half a minute. What a rank has is measured: with several ranks, started\n"
      "by 'halfstep launch -n 2 bench --calibrate FILE', their links too.");
  command->callback([path, json] { calibrate(*path, json->count() > 0); });
}

}  // namespace halfstep::cli
