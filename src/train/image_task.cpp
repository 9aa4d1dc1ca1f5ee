#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/sum.h>
#include <halfstep/checkpoint.h>
#include <halfstep/data.h>
#include <halfstep/error.h>
#include <halfstep/models.h>

#include "tensor/transfers.h"
#include "train/tasks.h"
#include "words/numbers.h"

namespace halfstep::train {
namespace {

using Path = std::filesystem::path;

constexpr const char* kDataPrefix = "data.";

/// Compressed or not.
at::Tensor read_part(const Path& folder, const std::string& name) {
  const Path plain = folder / name;
  return read_idx(std::filesystem::exists(plain) ? plain : Path(plain.string() + ".gz"));
}

struct Images {
  at::Tensor images, labels;
};

Images read_images(const Path& folder, const std::string& part) {
  return {read_part(folder, part + "-images-idx3-ubyte"), read_part(folder, part + "-labels-idx1-ubyte")};
}

class ImageTask final : public Task {
 public:
  ImageTask(const RunConfig& config, const Ranks& ranks)
      : config_(config),
        ranks_(takes_whole_batches(config) ? Ranks() : ranks),
        training_(read_images(*config.data.images, "train")),
        held_out_(read_images(*config.data.images, "t10k")),
        options_(batch_options()),
        model_(ResNet18Options{.classes = training_.labels.max().item<int64_t>() + 1, .channels = 1},
               static_cast<uint64_t>(config.train.seed)),
        batches_(training_.images, training_.labels, options_) {}

  torch::nn::Module& model() override { return *model_; }
  std::string model_text() const override { return "resnet18"; }

  std::string data_text() const override {
    return detail::concat(with_commas(training_.images.size(0)), " images of ", training_.images.size(1),
                          " x ", training_.images.size(2), " to train on, ",
                          with_commas(held_out_.images.size(0)), " held out");
  }

  std::string unit() const override { return "images"; }
  int64_t items_per_batch() const override { return config_.data.batch_size; }

  void take_batch() override { batch_ = on_device(batches_.next_part(ranks_.rank(), ranks_.size())); }
  at::Tensor loss() override { return at::cross_entropy_loss(model_->forward(batch_.images), batch_.labels); }

  Score evaluate(const MixedPrecision& precision) override {
    const EvaluationScope evaluation(*model_);
    ImageBatchOptions in_order = options_;
    in_order.shuffle = false;
    ImageBatches held(held_out_.images, held_out_.labels, in_order);
    Score score;
    std::vector<at::Tensor>
        found;  // loss and right answers, read together: an accelerator is waited for once
    int64_t right = 0;
    for (int64_t batches = 0, taken = 0; taken < held.count(); ++batches, taken += options_.batch_size) {
      if (config_.train.evaluate_batches > 0 && batches == config_.train.evaluate_batches) break;
      const ImageBatch batch = on_device(held.next_part(ranks_.rank(), ranks_.size()));
      if (batch.labels.numel() == 0) continue;
      const at::Tensor logits = precision.forward([&] { return model_->forward(batch.images); });
      found.push_back(at::cross_entropy_loss(logits.to(at::kFloat), batch.labels, {}, at::Reduction::Sum));
      found.push_back(logits.argmax(1).eq(batch.labels).sum());
      score.count += batch.labels.size(0);
    }
    const Arrival arrival(found);
    for (size_t i = 0; i < found.size(); i += 2) {
      score.loss += arrival.wait_for(i).item<double>();
      right += arrival.wait_for(i + 1).item<int64_t>();
    }
    score.accuracy = static_cast<double>(right);
    return mean_of_ranks(score, ranks_);
  }

  StateDict state_dict() const override {
    StateDict state;
    for (const auto& [name, value] : batches_.state_dict()) state.set(kDataPrefix + name, value);
    return state;
  }

  void load_state_dict(const StateDict& saved) override {
    expect_like("Images", saved, state_dict());
    StateDict data;
    for (const auto& [name, value] : saved)
      if (name.starts_with(kDataPrefix)) data.set(name.substr(std::string_view(kDataPrefix).size()), value);
    batches_.load_state_dict(data);
  }

 private:
  ImageBatch on_device(const ImageBatch& batch) const {
    const at::Device device = model_->parameters().front().device();
    return {.images = sent_to(device, batch.images), .labels = sent_to(device, batch.labels)};
  }

  /// Pixels with the training images' mean 0 and deviation 1.
  ImageBatchOptions batch_options() const {
    const at::Tensor pixels = training_.images.to(at::kFloat) / 255;
    return {.batch_size = config_.data.batch_size,
            .mean = pixels.mean().item<double>(),
            .deviation = pixels.std().item<double>(),
            .seed = static_cast<uint64_t>(config_.data.seed)};
  }

  RunConfig config_;
  Ranks ranks_;
  Images training_, held_out_;
  ImageBatchOptions options_;
  ResNet18 model_;
  ImageBatches batches_;
  ImageBatch batch_;
};

}  // namespace

std::unique_ptr<Task> image_task(const RunConfig& config, const Ranks& ranks) {
  check_batch_divides(config, ranks);
  return std::make_unique<ImageTask>(config, ranks);
}

}  // namespace halfstep::train
