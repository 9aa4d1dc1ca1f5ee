#include "fashion_mnist.h"

#include <zlib.h>

#include <stdexcept>

namespace {

constexpr char kFolder[] = "/usr/share/datasets/fashion-mnist/";
constexpr double kMean = 0.2860, kDeviation = 0.3530;  // of the training pixels, scaled to 0..1

// An IDX file is a header of big-endian 32-bit words (magic, then one size a dimension) and then bytes.
torch::Tensor read_idx(const std::string& file, int dimensions) {
  const std::string path = kFolder + file;
  gzFile in = gzopen(path.c_str(), "rb");
  if (!in)
    throw std::runtime_error(path + ": not found. Install it with: apt-get install dataset-fashion-mnist");
  std::vector<unsigned char> header(4 + 4 * dimensions);
  const bool has_header = gzread(in, header.data(), header.size()) == static_cast<int>(header.size());
  std::vector<int64_t> sizes;
  for (size_t at = 4; has_header && at < header.size(); at += 4)
    sizes.push_back(header[at] << 24 | header[at + 1] << 16 | header[at + 2] << 8 | header[at + 3]);
  auto bytes = torch::empty(sizes, torch::kUInt8);
  const bool has_all = has_header && gzread(in, bytes.data_ptr(), bytes.numel()) == bytes.numel();
  gzclose(in);
  if (!has_all) throw std::runtime_error(path + ": shorter than its header says");
  return bytes;
}

}  // namespace

Images load_fashion_mnist(const std::string& name) {
  const auto pixels = read_idx(name + "-images-idx3-ubyte.gz", 3).flatten(1).to(torch::kFloat).div_(255);
  return {(pixels - kMean) / kDeviation, read_idx(name + "-labels-idx1-ubyte.gz", 1).to(torch::kInt64)};
}

double accuracy(torch::nn::Sequential& model, const Images& images) {
  const torch::NoGradGuard no_grad;
  return model->forward(images.pixels).argmax(1).eq(images.labels).to(torch::kDouble).mean().item<double>();
}
