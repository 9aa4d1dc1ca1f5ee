// The batches that a training run sees, for another program to train on the same.
//
//   batch_dump --vocabulary N --sequence-length T --sequences S [--seed N | --in-order] TOKENS
//   OUT.safetensors
//
// Writes `inputs` and `targets`, int64 of [S, T], in the order of TokenBatches: rows i x B to i x B + B - 1
// are batch i of a run with B sequences a batch. With --in-order, those of an evaluation; --sequences 0 is
// one epoch.
#include <ATen/ops/cat.h>
#include <halfstep/data.h>
#include <halfstep/tensor_file.h>

#include <CLI/CLI.hpp>

#include "support/program.h"

namespace {

int run(int argc, char** argv) {
  CLI::App app("The batches that a training run sees, as one file.");
  std::string tokens, out;
  int64_t vocabulary = 0, sequences = 0;
  halfstep::TokenBatchOptions options{.batch_size = 1};
  bool in_order = false;
  app.add_option("tokens", tokens, "a token file")->required();
  app.add_option("out", out, "the safetensors file to write")->required();
  app.add_option("--vocabulary", vocabulary)->required();
  app.add_option("--sequence-length", options.sequence_length)->required();
  app.add_option("--sequences", sequences, "0: all of one epoch")->required();
  app.add_option("--seed", options.seed, "of the order (data.seed)");
  app.add_flag("--in-order", in_order, "in the order of the file, as evaluations go");
  CLI11_PARSE(app, argc, argv);

  options.shuffle = !in_order;
  std::vector<halfstep::TokenFile> files;
  files.emplace_back(tokens, halfstep::TokenFileOptions{.vocabulary_size = vocabulary});
  halfstep::TokenBatches batches(std::move(files), options);
  // An evaluation ends with the epoch, however many batches it asked for.
  if (sequences == 0 || (in_order && sequences > batches.windows())) sequences = batches.windows();
  std::vector<at::Tensor> inputs, targets;
  for (int64_t i = 0; i < sequences; ++i) {
    auto batch = batches.next();
    inputs.push_back(batch.inputs);
    targets.push_back(batch.targets);
  }
  halfstep::write_tensors(out, {{"inputs", at::cat(inputs)}, {"targets", at::cat(targets)}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::exit_code_of(run, argc, argv); }
