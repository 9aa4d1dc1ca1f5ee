// Opens a Hugging Face folder and prints its loss on token ids, in FP32 and BF16: 05_pretrained FOLDER
// [IDS.txt]
#include <halfstep/halfstep.h>
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <iterator>

/// Ids from a text file, parted by spaces; random ones without a file.
torch::Tensor ids_from(const char* path, int64_t vocabulary) {
  if (path == nullptr) return torch::randint(vocabulary, {1, 33}, torch::kLong);
  std::ifstream file(path);
  const std::vector<int64_t> ids{std::istream_iterator<int64_t>(file), std::istream_iterator<int64_t>()};
  if (!file.eof() || ids.size() < 2)
    throw halfstep::Error(std::string(path) + ": wants two token ids or more, and nothing else");
  return torch::tensor(ids).unsqueeze(0);
}

int main(int argc, char** argv) try {
  if (argc < 2) throw halfstep::Error("05_pretrained FOLDER [IDS.txt]");
  const auto model = halfstep::load_pretrained(argv[1]);
  model->eval();
  const auto ids = ids_from(argc > 2 ? argv[2] : nullptr, model->vocabulary());
  const auto inputs = ids.narrow(1, 0, ids.size(1) - 1), targets = ids.narrow(1, 1, ids.size(1) - 1);
  const torch::NoGradGuard no_grad;
  std::printf("FP32: %.4f\n", model->loss(inputs, targets).item<double>());

  const halfstep::MixedPrecision mp(halfstep::Precision::bf16(), *model,
                                    {.autocast = {.allow_emulated = true}});
  std::printf("BF16: %.4f\n", mp.forward([&] { return model->loss(inputs, targets); }).item<double>());
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}
