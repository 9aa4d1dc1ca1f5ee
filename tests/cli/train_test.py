"""`halfstep train` and `halfstep preset`, as a person, a scheduler and a script use them."""
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time
import unittest

from program import PROGRAM, ask, run, tiny_run


class Train(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        _, self.config = tiny_run(self.folder, "steps = 6\nevaluate_every = 3\n")

    def train(self, *arguments, **environment):
        return run("train", str(self.config), *arguments, **environment)

    def read_until(self, words, process):
        for line in process.stdout:
            if words in line:
                return
        self.fail(f"the run ended before it said {words}")

    def records(self, name):
        return [json.loads(line) for line in (self.folder / name / "log.jsonl").read_text().splitlines()]

    def test_done_is_0_and_plain_lines_have_no_escape_codes(self):
        done = self.train("--folder", str(self.folder / "a"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertNotIn("\033", done.stderr)
        self.assertIn("done after step 6", done.stderr)

    def test_json_tells_every_step(self):
        done = self.train("--folder", str(self.folder / "a"), "--json")
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        steps = [line["step"] for line in lines if line["kind"] == "step"]
        self.assertEqual(steps, [1, 2, 3, 4, 5, 6])
        self.assertEqual(lines[-1]["outcome"], "done")

    def test_a_recipe_is_one_word_and_its_shares_are_logged(self):
        for recipe in ("fp8-delayed", "nvfp4"):
            done = self.train("--folder", str(self.folder / recipe), "--precision", recipe)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(recipe, done.stderr)
            steps = [line for line in self.records(recipe) if line["kind"] == "step"]
            for step in steps:
                self.assertTrue(0 <= step["saturated_share"] < 0.2 and 0 <= step["vanished_share"] < 0.5, step)
        done = self.train("--folder", str(self.folder / "a"), "--precision", "fp8-delaid")
        self.assertEqual(done.returncode, 2)
        self.assertIn("fp8-delayed", done.stderr)

    def test_other_sizes_than_the_run_was_started_with_are_named(self):
        folder = str(self.folder / "sizes")
        self.assertEqual(self.train("--folder", folder).returncode, 0)
        # The lock has the number of the last process.
        before = {path: path.read_bytes() for path in pathlib.Path(folder).rglob("[!.]*") if path.is_file()}
        for key, value in (("layers", 3), ("width", 64)):
            done = self.train("--folder", folder, "--set", f"model.{key}={value}", "--set", "train.steps=8")
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertIn(f"model.{key} is {value}, and this run was started with", done.stderr)
            self.assertIn("new --folder", done.stderr)
        self.assertEqual({path: path.read_bytes() for path in before}, before)

    def test_wrong_configuration_is_2_and_nothing_is_written(self):
        for wrong in ("optimizer.lrate=1", "optimizer.lr=-1", "optimizer.lr=1e999", "train.steps=nan",
                      "data.train=/no/such/file", "precision.loss_scale.initial=4"):
            done = self.train("--folder", str(self.folder / "a"), "--set", wrong)
            self.assertEqual(done.returncode, 2 if "no/such" not in wrong else 3, (wrong, done.stderr))
            self.assertIn(wrong.split("=")[0].split(".")[-1][:4], done.stderr)
        self.assertFalse((self.folder / "a").exists())
        for words, advice in [(["trian"], "Did you mean 'train'?"),
                              (["train", "--lr", "1e-3"], "--set optimizer.lr=..."),
                              (["train", "--steps=10"], "--set train.steps=..."),
                              (["train", "--batch-size", "4"], "--set data.batch_size=..."),
                              (["train", "--fodler", "x"], "Did you mean '--folder'?"),
                              (["checkpoint", "inspct", "x"], "Did you mean 'inspect'?")]:
            with self.subTest(words):
                done = run(*words)
                self.assertEqual(done.returncode, 2)
                self.assertIn(advice, done.stderr)
        self.assertEqual(run("train", "--preset", "tinny").returncode, 2)
        self.assertEqual(run("train", "--no-such-flag").returncode, 2)

    def test_a_model_whose_tokens_are_unknown_is_refused_and_what_lies_beside_it_is_kept(self):
        self.assertEqual(self.train("--folder", str(self.folder / "a"), "--set", "model.vocabulary=300").returncode, 0)
        model = self.folder / "a/model"
        (model / "generation_config.json").write_text('{"temperature": 0.5}')
        further = ["train", "--set", f"model.from={model}", "--set", f"data.train={self.folder / 'corpus.txt'}", "--set",
                   "data.sequence_length=16", "--set", "train.steps=1"]
        refused = run(*further, "--folder", str(self.folder / "b"))
        self.assertEqual(refused.returncode, 3, refused.stderr)
        self.assertIn("has no tokenizer.json, and its 300 tokens are not bytes", refused.stderr)
        done = run(*further, "--folder", str(self.folder / "b"), "--set", "data.tokenizer=bytes")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("tokenizer bytes", done.stderr)
        self.assertIn(f"the model is in {self.folder / 'b/model'}", done.stderr)
        self.assertEqual((self.folder / "b/model/generation_config.json").read_text(), '{"temperature": 0.5}')

    def test_too_little_text_is_named_by_key_and_file(self):
        small = self.folder / "small.txt"
        small.write_text("x" * 2000)
        for settings, words in [
                (["data.sequence_length=256", "data.validation_fraction=0.05"],
                 f"data.validation_fraction: 0.05 of {small} is too short: it has 100 tokens"),
                (["data.sequence_length=2000"], f"data.train: {small} is too short: it has 1,800 tokens")]:
            done = self.train("--folder", str(self.folder / "a"), "--set", f"data.train={small}",
                              *(word for setting in settings for word in ("--set", setting)))
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertIn(words, done.stderr)

    def test_held_out_data_without_text_is_refused(self):
        (self.folder / "nothing").mkdir()
        done = self.train("--folder", str(self.folder / "a"), "--unset", "data.validation_fraction", "--set",
                          f"data.validation={self.folder / 'nothing'}")
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("data.validation: holds no text and no tokens.", done.stderr)

    def test_a_run_resumes_by_its_folder_and_only_with_its_own_data(self):
        folder = str(self.folder / "a")
        # By itself the context is that of the sequences, and another one would be another model.
        self.assertEqual(self.train("--folder", folder, "--set", "model.context=16").returncode, 0)
        done = run("train", folder, "--set", "train.steps=8")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("resumed after step 6", done.stderr)
        for setting, words in [("data.seed=7", "data.seed was 0 and is 7"),
                               ("data.sequence_length=8", "data.sequence_length was 16 and is 8")]:
            done = run("train", folder, "--set", "train.steps=9", "--set", setting)
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertIn(words, done.stderr)
            self.assertIn("start another run in a new --folder", done.stderr)
        self.assertIn("No recipe", run("explain", "model", folder).stdout)
        done = run("train", str(self.folder))
        self.assertEqual(done.returncode, 2)
        self.assertIn("is a folder without a config.toml", done.stderr)

    def test_the_weights_of_a_run_are_exported_without_naming_a_part(self):
        self.assertEqual(self.train("--folder", str(self.folder / "a"), "--precision", "bf16").returncode, 0)
        answer = ask("checkpoint", "export", str(self.folder / "a"), "--full-precision", "-o", str(self.folder / "w"))
        self.assertGreater(answer["tensors"], 0)

    def test_data_that_does_not_serve_is_3(self):
        short = self.folder / "short.txt"
        short.write_text("too short")
        done = self.train("--folder", str(self.folder / "a"), "--set", f"data.train={short}")
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("0.1 of 1 document with 9 bytes in all is nothing. Give more text in data.train", done.stderr)

    def test_damaged_checkpoint_is_3(self):
        self.train("--folder", str(self.folder / "a"), "--set", "train.steps=3")
        tensors = next((self.folder / "a" / "checkpoints").glob("step-*/tensors.safetensors"))
        damaged = bytearray(tensors.read_bytes())
        damaged[-1] ^= 1
        tensors.write_bytes(damaged)
        done = self.train("--folder", str(self.folder / "a"))
        self.assertEqual(done.returncode, 3, done.stderr)

    def test_divergence_is_4(self):
        done = self.train("--folder", str(self.folder / "a"), "--set", "precision.compute=fp16",
                          "--set", "precision.loss_scale.initial=8e37",
                          "--set", "precision.loss_scale.backoff_factor=0.999",
                          "--set", "precision.loss_scale.max_consecutive_skips=3")
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn("skipped", done.stderr)
        self.assertEqual(self.records("a")[-1]["outcome"], "diverged")

    def test_out_of_memory_is_5(self):
        done = run("train", str(self.config), "--folder", str(self.folder / "a"),
                   "--set", "data.batch_size=1048576", prefix=("prlimit", "--as=8000000000"))
        self.assertEqual(done.returncode, 5, done.stderr)

    def test_signal_saves_and_the_same_command_goes_on(self):
        for name, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)):
            folder = self.folder / name.name
            command = [PROGRAM, "train", str(self.config), "--folder", str(folder), "--json",
                       "--set", "train.steps=100000"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
                self.read_until('"step":5,', process)
                process.send_signal(name)
                process.stdout.read()
                process.wait()
                self.assertEqual(process.returncode, code, process.stderr.read())
            last = self.records(name.name)[-1]
            self.assertEqual(last["outcome"], "interrupted")
            steps = ask("checkpoint", "inspect", str(folder / "checkpoints"))
            self.assertIn(str(last["step"]), json.dumps(steps))
            done = self.train("--folder", str(folder), "--set", f"train.steps={last['step'] + 2}")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(f"resumed after step {last['step']}", done.stderr)

    def test_second_signal_ends_at_once(self):
        command = [PROGRAM, "train", str(self.config), "--folder", str(self.folder / "a"), "--json",
                   "--set", "train.steps=100000", "--set", "data.batch_size=4096", "--set", "train.evaluate_every=0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            self.read_until('"kind":"step"', process)
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            self.assertEqual(process.wait(), 6)

    def waits(self, **environment):
        """What says to OpenMP how its threads wait, in a run that goes on."""
        command = [PROGRAM, "train", str(self.config), "--json", "--set", "train.steps=100000",
                   "--folder", tempfile.mkdtemp(dir=self.folder)]
        names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
        clean = {name: value for name, value in os.environ.items() if name not in names}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**clean, **environment}) as process:
            self.read_until('"kind":"step"', process)
            words = pathlib.Path(f"/proc/{process.pid}/environ").read_bytes().decode().split("\0")
            process.kill()
        return sorted(word for word in words if word.startswith(names))

    def test_threads_spin_briefly_unless_told_otherwise(self):
        self.assertEqual(self.waits(), ["GOMP_SPINCOUNT=10000"])
        self.assertEqual(self.waits(GOMP_SPINCOUNT="5"), ["GOMP_SPINCOUNT=5"])
        self.assertEqual(self.waits(OMP_WAIT_POLICY="active"), ["OMP_WAIT_POLICY=active"])

    def test_reader_that_goes_away_ends_nothing(self):
        command = f"{PROGRAM} train {self.config} --folder {self.folder / 'a'} --json | head -1"
        subprocess.run(["bash", "-c", command], stdout=subprocess.DEVNULL, check=True)
        self.assertEqual(self.records("a")[-1]["outcome"], "done")

    def test_dry_run_says_memory_and_time_and_writes_nothing(self):
        before = sorted(self.folder.rglob("*"))
        done = self.train("--dry-run", "--folder", str(self.folder / "a"))
        self.assertEqual(done.returncode, 0, done.stderr)
        for word in ("memory", "time", "parameters"):
            self.assertIn(word, done.stdout)
        self.assertEqual(sorted(self.folder.rglob("*")), before)
        answer = json.loads(self.train("--dry-run", "--json").stdout)
        self.assertGreater(answer["peak_bytes"], 0)
        self.assertGreater(answer["total_seconds"], 0)

    def test_dry_run_says_when_it_has_read_only_the_beginning(self):
        self.assertNotIn("first 4 MiB", self.train("--dry-run").stdout)
        (self.folder / "corpus.txt").write_text("line of text\n" * 500_000)
        done = self.train("--dry-run", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("in the first 4 MiB of text (the rest was not checked): 4,194,304 tokens to train on",
                      json.loads(done.stdout)["data"])

    def test_print_config_says_where_values_came_from(self):
        done = run("train", "--preset", "tiny", str(self.config), "--set", "optimizer.lr=0.25",
                   "--set", "optimizer.warmup_steps=0", "--print-config",
                   HALFSTEP_TRAIN__SEED="7")
        self.assertEqual(done.returncode, 0, done.stderr)
        text = done.stdout
        self.assertRegex(text, r"lr = 0\.25\s+# --set")
        self.assertRegex(text, r"seed = 7\s+# HALFSTEP_TRAIN__SEED")
        self.assertRegex(text, r"width = 16\s+# .*run\.toml:5")
        self.assertRegex(text, r"weight_decay = 0\.1\s+# preset tiny")

    def test_presets_are_listed_and_what_is_shown_can_be_given_back(self):
        names = [preset["name"] for preset in ask("preset", "ls")]
        self.assertIn("tiny", names)
        for name in names:
            shown = run("preset", "show", name)
            self.assertEqual(shown.returncode, 0, shown.stderr)
            own = self.folder / "own.toml"
            own.write_text(shown.stdout)
            done = run("train", str(own), "--print-config")
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(run("preset", "show", "tinny").returncode, 2)


if __name__ == "__main__":
    unittest.main()
