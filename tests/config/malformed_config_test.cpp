// Configurations that are refused before any work: each by its line, with what is wrong and what to do.
#include <gtest/gtest.h>
#include <halfstep/run_config.h>

#include <algorithm>

#include "support/error_of.h"

namespace halfstep {
namespace {

using testing::error_of;

/// A run that is taken; cases go behind it, from line 5 on.
constexpr const char* kGood = R"(model = {kind = "gpt2", layers = 2, width = 64, heads = 4}
data.train = ["book.txt"]
train.steps = 100

)";

struct Case {
  const char* text;    ///< line 5
  const char* says;    ///< what is wrong
  const char* remedy;  ///< what to do
  const char* where = "run.toml:5";
};

const Case kCases[] = {
    // unknown
    {"optimizer.lrate = 1e-3", "unknown key 'optimizer.lrate'", "Did you mean 'optimizer.lr'?"},
    {"optimzer.lr = 1e-3", "unknown key 'optimzer.lr'", "Did you mean 'optimizer.lr'?"},
    {"lr = 1e-3", "unknown key 'lr'", "Did you mean 'optimizer.lr'?"},
    {"train.lr = 1e-3", "unknown key 'train.lr'", "Did you mean 'optimizer.lr'?"},
    {"precision.los_scale.initial = 2", "unknown key 'precision.los_scale.initial'",
     "precision.loss_scale.initial"},
    {"train.batch_size = 2", "unknown key 'train.batch_size'", "Did you mean 'data.batch_size'?"},
    {"[checkpoints]", "unknown key 'checkpoints'", "docs/configuration.md"},
    {"zzz = 1", "unknown key 'zzz'", "docs/configuration.md"},
    {"optimizer.lr.x = 1", "unknown key 'optimizer.lr.x'", "Did you mean 'optimizer.lr'?"},
    {"\"a\\u001bb\" = 1", "unknown key 'a\\x1bb'", "docs/configuration.md"},
    // not TOML
    {"optimizer.lr = ", "not TOML", "docs/configuration.md", "run.toml:5:"},
    {"optimizer.kind = adamw", "not TOML", "Text needs quotes", "run.toml:5:"},
    {"train.seed = 1\ntrain.seed = 2", "not TOML", "Keep one", "run.toml:6:"},
    {"[.optimizer]\nlr = 1", "not TOML", "docs/configuration.md", "run.toml:5:"},
    {"a\u00e9 = 1", "not TOML", "docs/configuration.md", "run.toml:5:"},
    {"[. ", "not TOML", "docs/configuration.md", "run.toml:5:"},
    {"[optimizer", "not TOML", "docs/configuration.md", "run.toml:5:"},
    {"train.sample_prompt = \"\xff\"", "not TOML", "docs/configuration.md", "run.toml:"},
    {"train.seed = 99999999999999999999", "not TOML", "9223372036854775807", "run.toml:5:"},
    {"train.seed = 1\n\"train.seed\" = 2", "given twice", "Keep one", "run.toml:6"},
    // wrong type
    {"optimizer.lr = \"fast\"", "is the text 'fast', expected a number", "The default is 3e-4"},
    {"optimizer.lr = true", "is true, expected a number", "The default is 3e-4"},
    {"optimizer.lr = [1]", "a list that is not all text", "The default"},
    {"optimizer.lr = 2026-01-01", "a date", "The default"},
    {"optimizer = 3", "is a section", "Write [optimizer]"},
    {"optimizer.lr = {}", "is a table", "The default"},
    {"data.seed = 1.5", "is 1.5, expected a whole number", "The default is 0"},
    {"data.batch_size = 1e3", "expected a whole number", "Write it without point and exponent: 1000"},
    {"data.batch_size = \"8\"", "is the text '8', expected a whole number", "The default is 8"},
    {"log.tensorboard = 1", "expected true or false", "The default is false"},
    {"log.tensorboard = \"yes\"", "expected true or false", "The default is false"},
    {"data.validation = [1, 2]", "not all text", ""},
    {"run.folder = 3", "expected text", "If not given"},
    {"precision.ops = \"low\"", "expected one of low", "precision.ops.softmax"},
    {"precision.ops.softmax = 3", "expected one of low", ""},
    {"precision.compute = 16", "expected one of fp32, tf32, bf16, fp16", "The default is \"fp32\""},
    // not finite, out of range
    {"optimizer.lr = nan", "is nan, expected a number above 0", "The default is 3e-4"},
    {"optimizer.lr = inf", "is inf", "The default is 3e-4"},
    {"optimizer.lr = -inf", "is -inf", "The default is 3e-4"},
    {"optimizer.lr = 1e999", "'1e999' could not be interpreted", "Numbers go up to 1.7e308", "run.toml:5:"},
    {"optimizer.lr = -1e-3", "is -0.001, expected a number above 0", "The default is 3e-4"},
    {"optimizer.lr = 0", "is 0, expected a number above 0", "The default is 3e-4"},
    {"optimizer.lr = 1e300", "expected a number above 0, at most 1e30", "The default is 3e-4"},
    {"optimizer.beta1 = 1.0", "is 1, expected a number from 0 to below 1", "If not given: 0.9."},
    {"optimizer.eps = 0.0", "is 0, expected a number from 2^-126", "If not given: 1e-8."},
    {"optimizer.weight_decay = -0.1", "expected a number from 0", "If not given"},
    {"optimizer.clip_norm = 0", "expected a number above 0", "not clipped"},
    {"data.batch_size = 0", "is 0, expected a whole number of samples from 1", "The default is 8"},
    {"data.sequence_length = 0", "expected a whole number of tokens from 1", "The default is 256"},
    {"data.seed = -1", "expected a whole number from 0", "The default is 0"},
    {"data.validation_fraction = 1.0", "expected a number above 0 to below 1", "nothing is held out"},
    {"train.accumulation = 0", "whole number of batches from 1", "The default is 1"},
    {"train.threads = 0", "whole number of threads from 1", "one a core"},
    {"checkpoint.keep_last = -1", "whole number of checkpoints from 0", "The default is 2"},
    {"log.every = 0", "whole number of steps from 1", "The default is 1"},
    {"log.trace_steps = 5000", "to 1000", "The default is 0"},
    // words and texts
    {"precision.compute = \"bf61\"", "expected one of fp32, tf32, bf16, fp16", "Did you mean 'bf16'?"},
    {"precision.compute = \"BF16\"", "expected one of fp32, tf32, bf16, fp16", ""},
    {"precision.weights = \"split master\"", "expected one of split_master", "Did you mean 'split_master'?"},
    {"precision.moments = \"int8\"", "expected one of fp32, bf16, 8bit", ""},
    {"optimizer.kind = \"adam\"", "expected one of adamw, sgd", "Did you mean 'adamw'?"},
    {"optimizer.schedule = \"cosinus\"", "expected one of constant", "Did you mean 'cosine'?"},
    {"precision.ops.softmax = \"high\"", "expected one of low, fp32", ""},
    {"precision.ops.\"soft max\" = \"low\"", "'precision.ops.soft max'", "named as in ATen"},
    {"run.folder = \"\"", "is the text ''", "Leave the key out"},
    {"run.folder = \"a\\u0000b\"", "expected text", "NUL"},
    {"data.validation = [\"\"]", "expected a list of texts", "Leave the key out"},
    // contradictions
    {"precision.loss_scale.initial = 8", "is for fp16", "Leave it out"},
    {"precision.compute = \"bf16\"\nprecision.loss_scale.floor = 0.5", "is for fp16", "Leave it out",
     "run.toml:6"},
    {"precision.weights = \"kahan\"", "whose weights are fp32", "Leave it out"},
    {"precision.weights = \"split_master\"\nprecision.compute = \"fp16\"", "below a BF16 weight",
     "use fp32_master"},
    {"precision.ops.softmax = \"low\"", "is a rule for bf16 and fp16", "Leave it out"},
    {"precision.compute = \"fp16\"\nprecision.loss_scale.cap = 2", "below the initial scale", "Raise it",
     "run.toml:6"},
    {"precision.compute = \"fp16\"\nprecision.loss_scale.initial = 1e-9", "above the initial scale",
     "Lower it", ""},
    {"optimizer.momentum = 0.9", "is for sgd", "Leave it out"},
    {"optimizer.kind = \"sgd\"\noptimizer.beta1 = 0.9", "is for adamw", "Leave it out", "run.toml:6"},
    {"optimizer.nesterov = true\noptimizer.kind = \"sgd\"", "needs a momentum", "momentum = 0.9"},
    {"optimizer.final_lr = 1e-4", "constant schedule", "Use linear"},
    {"optimizer.final_lr = 1e-3\noptimizer.schedule = \"cosine\"", "above optimizer.lr (default), 3e-4",
     "lower it"},
    {"optimizer.warmup_steps = 101", "train.steps (run.toml:3) is 100", "Lower optimizer.warmup_steps"},
    {"optimizer.warmup_steps = 100\noptimizer.schedule = \"linear\"", "train.steps (run.toml:3) is 100",
     "Lower optimizer.warmup_steps"},
    {"optimizer.schedule = \"wsd\"", "optimizer.decay_steps is not given", "a tenth", ""},
    {"optimizer.decay_steps = 101\noptimizer.schedule = \"wsd\"", "100 steps are left", "Lower it"},
    {"optimizer.decay_steps = 5", "is for the schedule wsd", "Leave it out"},
    {"precision.compute = \"tf32\"\nprecision.weights = \"kahan\"", "precision.compute (run.toml:5) is tf32",
     "Leave it out", "run.toml:6"},
    {"data.images = \"x\"", "is for resnet18", "Use data.train"},
    {"data.validation = \"x\"\ndata.validation_fraction = 0.5", "both say what is held out", "Leave one",
     "run.toml:6"},
    {"train.evaluate_every = 10", "nothing is held out", "data.validation"},
    {"log.trace_steps = 101", "the run has 100 steps", "Lower it"},
    {"checkpoint.resume = \"must\"", "run.folder is not given", "Name the folder"},
};

TEST(MalformedConfig, IsRefusedWithItsLineAndARemedy) {
  ASSERT_EQ(error_of([] { (void)resolve_config({.file = ConfigText{"run.toml", kGood}}); }), "no error");
  for (const Case& wrong : kCases) {
    const std::string error = error_of(
        [&] { (void)resolve_config({.file = ConfigText{"run.toml", kGood + std::string(wrong.text)}}); });
    EXPECT_NE(error, "no error") << wrong.text;
    EXPECT_TRUE(error.starts_with(wrong.where)) << wrong.text << "\n" << error;
    EXPECT_NE(error.find(wrong.says), std::string::npos) << wrong.text << "\n" << error;
    EXPECT_NE(error.find(wrong.remedy), std::string::npos) << wrong.text << "\n" << error;
  }
  EXPECT_GE(std::size(kCases), 60u);
}

/// Whole files; the model is what is wrong.
const Case kModels[] = {
    {"", "model.kind is not given", "take a preset", ""},
    {"model.kind = 'gpt2'\ndata.train='x'", "model.layers is not given", "A preset has all sizes", ""},
    {"model = {kind = 'gpt2', layers = 2, width = 65, heads = 4}\ndata.train='x'", "not a multiple",
     "Write 68", "run.toml:1"},
    {"model = {kind = 'llama', layers = 2, width = 12, heads = 4}\ndata.train='x'", "heads of 3", "Write 16",
     "run.toml:1"},
    {"model = {kind = 'llama', layers = 2, width = 64, heads = 4, kv_heads = 3}\ndata.train='x'",
     "does not divide model.heads (run.toml:1), 4", "divisor", "run.toml:1"},
    {"model = {kind = 'gpt2', layers = 2, width = 64, heads = 4, kv_heads = 2}\ndata.train='x'",
     "is for llama", "Leave it out", "run.toml:1"},
    {"model = {kind = 'gpt2', layers = 2, width = 64, heads = 4, context = 64}\ndata.train='x'",
     "fewer than data.sequence_length (default), 256", "Raise it", "run.toml:1"},
    {"model = {kind = 'gpt2', layers = 2, width = 64, heads = 4, vocabulary = 99}\ndata.train='x'",
     "has 256 tokens", "Leave it out", "run.toml:1"},
    {"model = {kind = 'gpt2', layers = 2, width = 64, heads = 4}", "data.train is not given", "book.txt", ""},
    {"model = {from = 'x', layers = 2}\ndata.train='x'", "is for new models", "Leave one", "run.toml:1"},
    {"model = {from = 'x', kind = 'resnet18'}\ndata.images='x'", "cannot be a resnet18", "train a new one",
     "run.toml:1"},
    {"model = {kind = 'resnet18', width = 3}\ndata.images='x'", "has fixed sizes", "Leave it out",
     "run.toml:1"},
    {"model.kind = 'resnet18'", "data.images is not given", "IDX", ""},
    {"model.kind = 'resnet18'\ndata.images = 'x'\ndata.train='x'", "is for text", "Use data.images",
     "run.toml:3"},
    {"model.kind = 'resnet18'\ndata.images = 'x'\ntrain.sample_every=3", "is for text", "Leave it out",
     "run.toml:3"},
    {"model.kind = 'resnet18'\ndata.images = 'x'\ntrain.recompute_blocks=true", "is for language models",
     "Leave it out", "run.toml:3"},
};

TEST(MalformedConfig, ModelsThatCannotBeMadeAreRefused) {
  for (const Case& wrong : kModels) {
    const std::string error =
        error_of([&] { (void)resolve_config({.file = ConfigText{"run.toml", wrong.text}}); });
    EXPECT_NE(error.find(wrong.says), std::string::npos) << wrong.text << "\n" << error;
    EXPECT_NE(error.find(wrong.remedy), std::string::npos) << wrong.text << "\n" << error;
    EXPECT_TRUE(error.starts_with(wrong.where)) << wrong.text << "\n" << error;
  }
}

TEST(MalformedConfig, FlagsVariablesAndPresetsAreNamed) {
  const auto flag = [](std::string text) {
    return error_of([&] { (void)resolve_config({.preset = "tiny", .set = {text}}); });
  };
  EXPECT_EQ(flag("optimizer.lrate=1"), "--set: unknown key 'optimizer.lrate'. Did you mean 'optimizer.lr'?");
  EXPECT_TRUE(flag("optimizer.lr").starts_with("--set: 'optimizer.lr' has no '='."));
  EXPECT_TRUE(
      flag("optimizer.lr=fast").starts_with("--set: optimizer.lr is 'fast', expected a number above 0"));
  EXPECT_TRUE(flag("optimizer.lr=").starts_with("--set: optimizer.lr is '', expected a number"));
  EXPECT_TRUE(flag("train.steps=1\ntrain.seed=2").starts_with("--set: train.steps is '1\\x0atrain.seed=2'"));
  EXPECT_TRUE(flag("run.folder=\xff").starts_with("--set: run.folder is "));
  EXPECT_TRUE(flag("=3").starts_with("--set: unknown key ''"));
  EXPECT_TRUE(error_of([] {
                (void)resolve_config({.preset = "tiny", .environment = {{"HALFSTEP_OPTIMIZER__LRATE", "1"}}});
              }).starts_with("HALFSTEP_OPTIMIZER__LRATE: unknown key 'optimizer.lrate'"));
  EXPECT_TRUE(
      error_of([] {
        (void)resolve_config({.preset = "tinny"});
      }).starts_with("--preset: there is no preset 'tinny'. Did you mean 'tiny'? There are tiny, gpt-10m"));
}

TEST(MalformedConfig, AllFaultsAreListedAtOnce) {
  const std::string error = error_of([] {
    (void)resolve_config({.preset = "tinny",
                          .file = ConfigText{"run.toml", "optimizer.lr = nan\nx = 1\ndata.batch_size = 0\n"},
                          .environment = {{"HALFSTEP_A__B", ""}},
                          .set = {"c"}});
  });
  EXPECT_TRUE(error.starts_with("6 faults in the configuration:\n  --preset: ")) << error;
  EXPECT_EQ(std::ranges::count(error, '\n'), 6) << error;
}

TEST(MalformedConfig, TooMuchTextIsRefused) {
  std::string text(kGood);
  text.append("run.folder = '").append(20'000, 'x').append("'");
  EXPECT_NE(error_of([&] {
              (void)resolve_config({.file = ConfigText{"run.toml", text}});
            }).find("name their folder"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep
