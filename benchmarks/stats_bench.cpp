// stats_bench: how fast the statistics of a tensor are beside a pass that only reads it, interleaved in one
// run.
//
//   stats_bench [--json] [--rounds N] [--megabytes N] [--floor SHARE]
//
// FP32, BF16 and FP16 values of a normal distribution, and half zeros as behind a ReLU, on one thread and on
// two. Counts are compared with the scalar table's first. Exits with 1 when FP32 reaches less than 70% of the
// bandwidth of reading, or than that times SHARE; the other figures have no goal.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "kernels/statistics.h"
#include "support/program.h"
#include "support/statistics.h"

namespace bench {
namespace {

using halfstep::Format;
using halfstep::TensorStats;
using nlohmann::ordered_json;

constexpr double kGoal = 0.7;

/// Sums of whole numbers, which compilers make vectors of. Compiled for each width, as kernels are.
template <int ahead_bytes>
__attribute__((target_clones("avx512f", "avx2", "default"))) std::uint32_t read_words(
    const std::uint32_t* words, std::size_t count) {
  constexpr std::size_t kLanes = 64;
  std::uint32_t lanes[kLanes] = {};
  for (std::size_t i = 0; i + kLanes <= count; i += kLanes) {
    if (ahead_bytes > 0)
      for (std::size_t line = 0; line < 4; ++line)
        __builtin_prefetch(words + i + 16 * line + ahead_bytes / 4);
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += words[i + lane];
  }
  std::uint32_t sum = 0;
  for (const std::uint32_t lane : lanes) sum += lane;
  return sum;
}

/// Calls work(part, of) on so many threads; the slowest decides.
template <typename Work>
double seconds_of(int threads, const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int part = 1; part < threads; ++part) others.emplace_back([&work, part] { work(part); });
  work(0);
  for (std::thread& other : others) other.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::size_t bytes_of(Format format) { return format == Format::FP32 ? 4 : 2; }

/// A million values, over and over.
std::vector<std::uint32_t> values_of(Format format, bool half_zeros, std::size_t bytes) {
  constexpr std::size_t kPeriod = 1 << 20;
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<std::uint32_t> words(bytes / 4);
  auto* out = reinterpret_cast<unsigned char*>(words.data());
  const std::size_t element_bytes = bytes_of(format), period_bytes = std::min(kPeriod * element_bytes, bytes);
  for (std::size_t at = 0; at < period_bytes; at += element_bytes) {
    const float drawn = normal(generator), value = half_zeros ? std::max(drawn, 0.0f) : drawn;
    const std::uint32_t code =
        format == Format::FP32 ? std::bit_cast<std::uint32_t>(value) : halfstep::encode_float(value, format);
    std::copy_n(reinterpret_cast<const unsigned char*>(&code), element_bytes, out + at);
  }
  for (std::size_t at = period_bytes; at < bytes; at += period_bytes)
    std::copy_n(out, std::min(period_bytes, bytes - at), out + at);
  return words;
}

struct Figures {
  double read_gb_per_s, share, share_error, least_share, most_share;
};

Figures measure(Format format, const std::vector<std::uint32_t>& words, int threads, int rounds) {
  const std::size_t part_words = words.size() / static_cast<std::size_t>(threads);
  const std::size_t part_count = part_words * 4 / bytes_of(format);
  std::vector<double> read_ahead, read_plainly, statistics;
  std::uint32_t sink = 0;
  for (int round = -1; round < rounds; ++round) {
    const auto at = [&](int part) { return words.data() + static_cast<std::size_t>(part) * part_words; };
    std::vector<std::uint32_t> sums(static_cast<std::size_t>(threads));
    const auto reading = [&](auto pass) {
      return seconds_of(threads,
                        [&](int part) { sums[static_cast<std::size_t>(part)] = pass(at(part), part_words); });
    };
    const double ahead = reading(read_words<4096>);
    const double took = seconds_of(threads, [&](int part) {
      TensorStats stats;
      halfstep::add_statistics(format, at(part), part_count, stats);
    });
    const double plainly = reading(read_words<0>);
    for (const std::uint32_t sum : sums) sink += sum;
    if (round < 0) continue;
    read_ahead.push_back(ahead);
    read_plainly.push_back(plainly);
    statistics.push_back(took);
  }
  // The better way to read is chosen for all rounds: the better one of each would be luck.
  const std::vector<double>& read = median(read_ahead) < median(read_plainly) ? read_ahead : read_plainly;
  std::vector<double> shares;
  for (std::size_t i = 0; i < read.size(); ++i) shares.push_back(read[i] / statistics[i]);
  HALFSTEP_CHECK(sink != 1, "a sum that nobody needs, so that it is computed");
  return {static_cast<double>(words.size()) * 4e-9 / median(read), median(shares),
          standard_error_of_median(shares), *std::min_element(shares.begin(), shares.end()),
          *std::max_element(shares.begin(), shares.end())};
}

void verify(Format format, const std::vector<std::uint32_t>& words) {
  const std::size_t count = std::min<std::size_t>(words.size() * 4 / bytes_of(format), 3'000'001);
  TensorStats fast, twin;
  halfstep::add_statistics(format, words.data(), count, fast);
  halfstep::add_statistics(format, words.data(), count, twin, halfstep::kScalarKernels);
  HALFSTEP_CHECK(fast.packed() == twin.packed(), halfstep::traits(format).name, ": ", halfstep::kernels().isa,
                 " and scalar statistics differ");
}

int run(int argc, char** argv) {
  CLI::App app("How fast the statistics of a tensor are beside reading it");
  bool as_json = false;
  int rounds = 15;
  std::size_t megabytes = 256;
  double floor = 1;
  app.add_flag("--json", as_json, "Print the figures as JSON");
  app.add_option("--rounds", rounds, "Interleaved rounds")->check(CLI::Range(3, 10'000));
  app.add_option("--megabytes", megabytes, "Size of the array")->check(CLI::Range(1, 4096));
  app.add_option("--floor", floor, "Share of the goal to insist on")->check(CLI::Range(0.0, 1.0));
  CLI11_PARSE(app, argc, argv);

  ordered_json answer;
  bool good = true;
  for (Format format : {Format::FP32, Format::BF16, Format::FP16})
    for (const bool half_zeros : {false, true}) {
      const auto words = values_of(format, half_zeros, megabytes << 20);
      verify(format, words);
      for (int threads : {1, 2}) {
        const Figures found = measure(format, words, threads, rounds);
        const std::string name =
            std::string(halfstep::traits(format).name) + (half_zeros ? ", half zeros" : "");
        answer["bandwidth_share"][name + ", threads " + std::to_string(threads)] = {
            {"median", found.share},
            {"standard_error", found.share_error},
            {"least", found.least_share},
            {"most", found.most_share},
            {"read_gb_per_s", found.read_gb_per_s}};
        if (format == Format::FP32 && !half_zeros) good = good && found.share >= kGoal * floor;
      }
    }
  answer["goals"] = {{"bandwidth_share of FP32", kGoal}};
  answer["good"] = good;
  answer["isa"] = halfstep::kernels().isa;
  if (as_json) {
    std::printf("%s\n", answer.dump(2).c_str());
  } else {
    for (const auto& [name, figures] : answer["bandwidth_share"].items())
      std::printf("%-30s %.2f of reading's %.1f GB/s (%.2f to %.2f)\n", name.c_str(),
                  figures["median"].get<double>(), figures["read_gb_per_s"].get<double>(),
                  figures["least"].get<double>(), figures["most"].get<double>());
    std::printf("%s: FP32 %s\n", halfstep::kernels().isa,
                good ? "reaches its goal" : "falls short of its goal");
  }
  return good ? 0 : 1;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) { return bench::exit_code_of(bench::run, argc, argv); }
