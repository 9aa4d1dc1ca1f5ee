// All constants of devices. A number that is not measured or published is called assumed.
#include "forecast/device.h"

#include <halfstep/error.h>

#include <nlohmann/json.hpp>
#include <tuple>

#include "io/json.h"
#include "io/json_place.h"
#include "words/names.h"

namespace halfstep::forecast {
namespace {

constexpr double kTera = 1e12, kGiga = 1e9, kMicro = 1e-6;

constexpr const char* kPeaks =
    "peaks, memory and its bandwidth: NVIDIA's data sheets, without sparsity, as listed in "
    "github.com/stas00/ml-engineering, compute/accelerator (2026-08)";
constexpr const char* kReached =
    "reached in products: the highest that the same page measured (MAMF); where it has none, the share of "
    "the "
    "peak that BF16 reaches";
constexpr const char* kLinks =
    "links: nccl-tests on one node without NVLink SHARP, and 0.95 of the network cards as four nodes of B200 "
    "reach, both in github.com/stas00/ml-engineering, network (2026-08)";
constexpr const char* kHops =
    "hops: the tuning constants of NCCL (src/graph/tuning.cc, 2026-06), protocol Simple";
constexpr const char* kAssumed =
    "assumed: 0.85 of the memory's bandwidth is reached, and 0.9 of the memory is for tensors";

constexpr const char* kCpu =
    "measured: a rank on one of two cores of a Xeon with AVX-512 and without BF16 instructions, the best of "
    "three next to other programs, by halfstep launch -n 2 bench --calibrate; measure your own";
constexpr const char* kCpuAssumed = "assumed: 0.9 of the memory is for tensors";

constexpr double kReachedBandwidth = 0.85;
constexpr double kReachedNetwork = 0.95;

/// Of the data sheet, dense; `reached` are measured.
struct Accelerator {
  const char* name;
  double memory_bytes, memory_bytes_per_second;
  double fp32_peak, tf32_peak, bf16_peak, fp8_peak, fp4_peak;
  double bf16_reached, fp8_reached;
  double ring_bytes_per_second;     ///< within a node
  double network_bytes_per_second;  ///< of all cards of a node
};

Device device_of(const Accelerator& given) {
  const double share = given.bf16_reached / given.bf16_peak;
  const double fp8_share = given.fp8_peak > 0 ? given.fp8_reached / given.fp8_peak : 0;
  return {.name = given.name,
          .memory_bytes = given.memory_bytes,
          .usable_share = 0.9,
          .memory_bytes_per_second = given.memory_bytes_per_second * kReachedBandwidth,
          .fp32_flops = given.fp32_peak * share,
          .tf32_flops = given.tf32_peak * share,
          .bf16_flops = given.bf16_reached,
          .fp16_flops = given.bf16_reached,
          .fp8_flops = given.fp8_reached,
          .fp4_flops = given.fp4_peak * fp8_share,
          .bf16_peak_flops = given.bf16_peak,
          .ranks_per_node = 8,
          .seconds_per_collective = 8.4 * kMicro,
          .within_node = {.bytes_per_second = given.ring_bytes_per_second, .seconds_per_hop = 3.4 * kMicro},
          .between_nodes = {.bytes_per_second = given.network_bytes_per_second * kReachedNetwork,
                            .seconds_per_hop = 14 * kMicro},
          .sources = {kPeaks, kReached, kLinks, kHops, kAssumed}};
}

const std::vector<Device>& all_devices() {
  static const std::vector<Device> devices = [] {
    std::vector<Device> all;
    all.push_back(device_of({.name = "a100",
                             .memory_bytes = 80 * kGiga,
                             .memory_bytes_per_second = 2.0 * kTera,
                             .fp32_peak = 19.5 * kTera,
                             .tf32_peak = 156 * kTera,
                             .bf16_peak = 312 * kTera,
                             .fp8_peak = 0,
                             .fp4_peak = 0,
                             .bf16_reached = 271.2 * kTera,
                             .fp8_reached = 0,
                             .ring_bytes_per_second = 235 * kGiga,
                             .network_bytes_per_second = 8 * 25 * kGiga}));
    all.push_back(device_of({.name = "h100",
                             .memory_bytes = 80 * kGiga,
                             .memory_bytes_per_second = 3.35 * kTera,
                             .fp32_peak = 67 * kTera,
                             .tf32_peak = 494.5 * kTera,
                             .bf16_peak = 989 * kTera,
                             .fp8_peak = 1979 * kTera,
                             .fp4_peak = 0,
                             .bf16_reached = 794.5 * kTera,
                             .fp8_reached = 1402.6 * kTera,
                             .ring_bytes_per_second = 365.6 * kGiga,
                             .network_bytes_per_second = 8 * 50 * kGiga}));
    all.push_back(device_of({.name = "h200",
                             .memory_bytes = 141 * kGiga,
                             .memory_bytes_per_second = 4.8 * kTera,
                             .fp32_peak = 67 * kTera,
                             .tf32_peak = 494.5 * kTera,
                             .bf16_peak = 989 * kTera,
                             .fp8_peak = 1979 * kTera,
                             .fp4_peak = 0,
                             .bf16_reached = 794.5 * kTera,
                             .fp8_reached = 1453.4 * kTera,
                             .ring_bytes_per_second = 365.6 * kGiga,
                             .network_bytes_per_second = 8 * 50 * kGiga}));
    all.push_back(device_of({.name = "b200",
                             .memory_bytes = 180 * kGiga,
                             .memory_bytes_per_second = 8.0 * kTera,
                             .fp32_peak = 80 * kTera,
                             .tf32_peak = 1125 * kTera,
                             .bf16_peak = 2250 * kTera,
                             .fp8_peak = 4500 * kTera,
                             .fp4_peak = 9000 * kTera,
                             .bf16_reached = 1745 * kTera,
                             .fp8_reached = 3432.5 * kTera,
                             .ring_bytes_per_second = 682.2 * kGiga,
                             .network_bytes_per_second = 8 * 50 * kGiga}));
    all.push_back({.name = "cpu",
                   .memory_bytes = 12 * kGiga,
                   .usable_share = 0.9,
                   .memory_bytes_per_second = 4.6 * kGiga,
                   .fp32_flops = 50.6 * kGiga,
                   .tf32_flops = 0,
                   .bf16_flops = 46.7 * kGiga,
                   .fp16_flops = 37.6 * kGiga,
                   .fp8_flops = 46.7 * kGiga,
                   .fp4_flops = 46.7 * kGiga,
                   .bf16_peak_flops = 0,
                   .products_in_fp32 = true,
                   .swiglu_in_one_pass = true,
                   .exchanges_by_gloo = true,
                   .ranks_per_node = 2,
                   .seconds_per_collective = 0,
                   .within_node = {.bytes_per_second = 0.67 * kGiga, .seconds_per_hop = 37 * kMicro},
                   .between_nodes = {.bytes_per_second = 0.67 * kGiga, .seconds_per_hop = 37 * kMicro},
                   .sources = {kCpu, kCpuAssumed}});
    return all;
  }();
  return devices;
}

/// Every number of a file, with its name there.
using Number = std::pair<const char*, double Device::*>;
constexpr Number kNumbers[] = {
    {"memory_bytes", &Device::memory_bytes},
    {"usable_share", &Device::usable_share},
    {"memory_bytes_per_second", &Device::memory_bytes_per_second},
    {"fp32_flops", &Device::fp32_flops},
    {"tf32_flops", &Device::tf32_flops},
    {"bf16_flops", &Device::bf16_flops},
    {"fp16_flops", &Device::fp16_flops},
    {"fp8_flops", &Device::fp8_flops},
    {"fp4_flops", &Device::fp4_flops},
    {"bf16_peak_flops", &Device::bf16_peak_flops},
    {"seconds_per_collective", &Device::seconds_per_collective},
};
using LinkNumber = std::tuple<const char*, Link Device::*, double Link::*>;
constexpr LinkNumber kLinkNumbers[] = {
    {"within_node_bytes_per_second", &Device::within_node, &Link::bytes_per_second},
    {"within_node_seconds_per_hop", &Device::within_node, &Link::seconds_per_hop},
    {"between_nodes_bytes_per_second", &Device::between_nodes, &Link::bytes_per_second},
    {"between_nodes_seconds_per_hop", &Device::between_nodes, &Link::seconds_per_hop},
};

}  // namespace

double Device::flops(Operands operands) const {
  const std::pair<const char*, double> rates[] = {{"fp32", fp32_flops}, {"tf32", tf32_flops},
                                                  {"bf16", bf16_flops}, {"fp16", fp16_flops},
                                                  {"fp8", fp8_flops},   {"fp4", fp4_flops}};
  const auto& [wanted, found] = rates[static_cast<int>(operands)];
  if (found > 0) return found;
  std::string known;
  for (const auto& [word, rate] : rates)
    if (rate > 0) known += (known.empty() ? "" : ", ") + std::string(word);
  throw Error(detail::concat("the device ", name, " has no ", wanted, " products. It has ", known, "."));
}

std::span<const Device> known_devices() { return all_devices(); }

const Device& device_named(std::string_view name) {
  std::string known;
  for (const Device& device : all_devices()) {
    if (device.name == name) return device;
    known += (known.empty() ? "" : ", ") + device.name;
  }
  throw Error(detail::concat("no device is called ", in_quotes(name), ": there are ", known,
                             ", or a file that 'halfstep bench --calibrate' wrote."));
}

Device read_device(std::string_view json, const std::string& where) {
  const nlohmann::json file = files::read_json(json, where);
  const files::JsonPlace place(file, where);
  place.expect_object();
  Device device;
  for (const auto& [key, value] : place.fields()) {
    bool is_known = key == "name" || key == "products_in_fp32" || key == "swiglu_in_one_pass" ||
                    key == "exchanges_by_gloo" || key == "ranks_per_node" || key == "sources";
    for (const auto& [known, field] : kNumbers) is_known |= key == known;
    for (const auto& [known, link, field] : kLinkNumbers) is_known |= key == known;
    HALFSTEP_CHECK(
        is_known, where, ": the key ", in_quotes(key),
        " is not known to this Halfstep. 'halfstep bench --calibrate' writes a new file of this machine.");
  }
  for (const auto& [key, field] : kNumbers) device.*field = place.at(key).number();
  for (const auto& [key, link, field] : kLinkNumbers) device.*link.*field = place.at(key).number();
  device.name = place.at("name").text();
  device.products_in_fp32 = place.at("products_in_fp32").truth();
  device.exchanges_by_gloo = place.at("exchanges_by_gloo").truth(/*absent=*/false);
  device.swiglu_in_one_pass = place.at("swiglu_in_one_pass").truth(/*absent=*/false);
  device.ranks_per_node = place.at("ranks_per_node").size(int64_t{1} << 20);
  for (const files::JsonPlace& source : place.at("sources").elements())
    device.sources.push_back(source.text());
  HALFSTEP_CHECK(device.memory_bytes_per_second > 0 && device.within_node.bytes_per_second > 0 &&
                     device.between_nodes.bytes_per_second > 0,
                 where, ": a bandwidth is 0.");
  return device;
}

std::string to_json(const Device& device) {
  nlohmann::ordered_json file{{"name", device.name}};
  for (const auto& [key, field] : kNumbers) file[key] = device.*field;
  file["products_in_fp32"] = device.products_in_fp32;
  file["swiglu_in_one_pass"] = device.swiglu_in_one_pass;
  file["exchanges_by_gloo"] = device.exchanges_by_gloo;
  file["ranks_per_node"] = device.ranks_per_node;
  for (const auto& [key, link, field] : kLinkNumbers) file[key] = device.*link.*field;
  file["sources"] = device.sources;
  return file.dump(2) + "\n";
}

}  // namespace halfstep::forecast
