"""`halfstep rehearse`: against single runs of `halfstep train`, and stopped on the way."""
import fcntl
import json
import pathlib
import signal
import subprocess
import tempfile
import time
import unittest

from program import PROGRAM, ask, run, tiny_run


def losses(folder):
    records = [json.loads(line) for line in (pathlib.Path(folder) / "log.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "step"]


class Rehearse(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        _, config = tiny_run(self.folder, "seed = 5\n")
        self.config = str(config)

    def arguments(self, name, *more, recipes="bf16,mxfp8", steps=30):
        return ["rehearse", self.config, "--recipes", recipes, "--steps", str(steps), "--folder", str(self.folder / name), *more]

    def test_each_recipe_has_the_losses_of_a_run_by_itself(self):
        # Wide enough for activations to take more than what operations need while they run.
        answer = ask(*self.arguments("all", "--device", "h100", "--set", "model.width=64"))
        self.assertEqual([row["recipe"] for row in answer["recipes"]], ["fp32", "bf16", "mxfp8"])
        self.assertEqual(answer["recipes"][0]["verdict"], "baseline")
        # The last one: two others ran before it in the same process.
        rehearsed = self.folder / "all" / "mxfp8-seed-0"
        done = run("train", str(rehearsed / "config.toml"), "--folder", str(self.folder / "alone"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(losses(rehearsed), losses(self.folder / "alone"))
        self.assertNotEqual(losses(rehearsed), losses(self.folder / "all" / "fp32-seed-0"))
        # The difference by hand: over the last ten of thirty steps.
        before, after = losses(self.folder / "all" / "fp32-seed-0")[20:], losses(rehearsed)[20:]
        row = answer["recipes"][2]
        self.assertAlmostEqual(row["training_difference"]["mean"], sum(after) / sum(before) - 1, places=9)
        self.assertGreater(row["held_out_loss"], 0)
        self.assertTrue(row["emulated"])
        self.assertIsNone(row["seconds_per_step"])
        self.assertLess(row["forecast_seconds"], 1)
        self.assertGreater(answer["recipes"][0]["peak_bytes"], answer["recipes"][1]["peak_bytes"])
        self.assertFalse((rehearsed / "checkpoints").exists())
        self.assertIn("Rehearsal of run", pathlib.Path(answer["page"]).read_text())

    def test_a_stopped_rehearsal_goes_on_and_ends_as_one_that_was_not(self):
        steps = 200
        whole = ask(*self.arguments("whole", recipes="bf16", steps=steps))
        process = subprocess.Popen([PROGRAM, *self.arguments("stopped", recipes="bf16", steps=steps)],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        log = self.folder / "stopped" / "bf16-seed-0" / "log.jsonl"
        for _ in range(600):
            if log.exists() and log.read_text().count("\n") > 20:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        self.assertEqual(process.returncode, 130, errors)
        self.assertIn("The same command resumes", errors)
        self.assertLess(len(losses(log.parent)), steps)
        done = run(*self.arguments("stopped", "--json", recipes="bf16", steps=steps))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("fp32: was already done", done.stderr)
        self.assertIn("resumed after step", done.stderr)
        answer = json.loads(done.stdout)
        for one, other in zip(answer["recipes"], whole["recipes"]):
            for key in ("verdict", "held_out_loss", "training_loss", "training_difference"):
                self.assertEqual(one[key], other[key], key)

    def test_more_seeds_add_their_runs_and_judge_by_held_out_losses(self):
        ask(*self.arguments("seeds", recipes="bf16"))
        done = run(*self.arguments("seeds", "--seeds", "2", "--json", recipes="bf16"))
        self.assertEqual(done.stderr.count("was already done"), 2, done.stderr)
        answer = json.loads(done.stdout)
        self.assertEqual((answer["seeds"], answer["judged_by"]), (2, "held_out"))
        self.assertIsNotNone(answer["recipes"][1]["held_out_difference"]["half_width"])
        self.assertNotEqual(losses(self.folder / "seeds" / "fp32-seed-0"), losses(self.folder / "seeds" / "fp32-seed-1"))

    def test_what_cannot_be_rehearsed_is_refused_before_anything_runs(self):
        for more, words in ((["--device", "h900"], "h900"), (["--precision", "bf16"], "--precision"),
                            (["--set", "data.train=none.txt"], "none.txt")):
            done = run(*self.arguments("refused", *more))
            self.assertIn(done.returncode, (2, 3), more)
            self.assertIn(words, done.stderr)
            self.assertFalse((self.folder / "refused").exists(), more)
        self.assertEqual(run(*self.arguments("refused", recipes="bf17")).returncode, 2)

    def test_a_page_that_cannot_be_written_is_said_before_anything_runs(self):
        for output, words in ((self.folder / "none" / "page.html", "none"), (self.folder, "is a folder")):
            done = run(*self.arguments("page", "--output", str(output)))
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertIn(words, done.stderr)
            self.assertFalse((self.folder / "page").exists())

    def test_an_answer_whose_page_is_refused_in_the_end_is_given_all_the_same(self):
        (self.folder / "late" / "rehearsal.html").mkdir(parents=True)  # as a disk that is full by then refuses it
        done = run(*self.arguments("late", recipes="bf16"))
        self.assertEqual(done.returncode, 3, done.stdout + done.stderr)
        self.assertIn("baseline", done.stdout)
        self.assertIn("repeats no run", done.stderr)
        self.assertNotIn("rehearsal.html", done.stdout)

    def test_what_the_disk_refuses_is_said_while_a_recipe_trains(self):
        # Of each file 200 kB: a checkpoint is smaller, and the log of 40 steps that are all looked at is larger.
        done = run(*self.arguments("limited", "--set", "watch.every=1", recipes="bf16", steps=40), prefix=("prlimit", "--fsize=200000"))
        self.assertEqual(done.returncode, 3, done.stdout + done.stderr)
        self.assertRegex(done.stderr, r"\[1/2\] fp32: step \d+: the log cannot be written: .*EFBIG")

    def test_another_process_in_the_folder_is_no_fault_of_a_recipe(self):
        for busy in ("two", "two/bf16-seed-0"):
            folder = self.folder / busy
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / ".lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                done = run(*self.arguments("two", recipes="bf16"))
            self.assertEqual(done.returncode, 3, done.stdout + done.stderr)
            self.assertIn(f"{busy}: another process writes into this folder", done.stderr)
            self.assertEqual(done.stdout, "")
        self.assertEqual(ask(*self.arguments("two", recipes="bf16"))["recipes"][1]["recipe"], "bf16")

    def test_losses_of_other_settings_are_not_mixed(self):
        ask(*self.arguments("mixed", recipes="fp32"))
        done = run(*self.arguments("mixed", "--set", "optimizer.lr=0.5", recipes="fp32"))
        self.assertEqual(done.returncode, 2)
        self.assertIn("optimizer.lr is now 0.5", done.stderr)

    def test_the_answer_fits_80_columns(self):
        for arguments in (self.arguments("columns"), ["rehearse", "--help"]):
            done = run(*arguments)
            self.assertEqual(done.returncode, 0, done.stderr)
            # The page's own path is as long as it is.
            lines = [line for line in done.stdout.splitlines() if not line.startswith("/")]
            self.assertLessEqual(max(map(len, lines)), 80, done.stdout)

    def test_a_baseline_that_diverges_has_a_code_of_its_own(self):
        done = run(*self.arguments("diverged", "--set", "optimizer.lr=1e30", recipes="fp32", steps=300))
        self.assertEqual(done.returncode, 4, done.stdout + done.stderr)
        self.assertIn("fp32 itself", done.stdout)

    def shadow(self, name, *more, recipes="bf16,mxfp8,fp8-delayed", steps=20):
        return self.arguments(name, "--set", "model.width=32", "--fast", *more, recipes=recipes, steps=steps)

    def test_shadow_mode_changes_no_loss_and_writes_configurations_that_train_takes(self):
        answer = ask(*self.shadow("shadow"))
        self.assertEqual((answer["steps"], answer["looks"]), (20, 11))
        self.assertTrue(answer["layers"])
        for layer in answer["layers"]:
            # BF16 keeps eight digits, E4M3 four: no error of a product is larger than a few roundings of its operands.
            self.assertGreater(layer["precisions"]["bf16"]["output_error"], 2**-12)
            self.assertLess(layer["precisions"]["bf16"]["output_error"], 2**-6)
            if "mxfp8" in layer["precisions"]:
                self.assertGreater(layer["precisions"]["mxfp8"]["output_error"], layer["precisions"]["bf16"]["output_error"])
        alone = run("train", self.config, "--set", "model.width=32", "--set", "train.steps=20", "--set", "precision.compute=fp32",
                    "--set", "log.every=1", "--folder", str(self.folder / "alone"))
        self.assertEqual(alone.returncode, 0, alone.stderr)
        (folder,) = {path.parent for path in (self.folder / "shadow").rglob("log.jsonl")}
        self.assertEqual(losses(folder), losses(self.folder / "alone"))
        for rule in answer["rules"]:
            done = run("train", rule["configuration"], "--set", "train.steps=2", "--folder", str(self.folder / rule["precision"]))
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Shadow rehearsal of run", pathlib.Path(answer["page"]).read_text())

    def test_shadow_mode_repeats_no_run_and_fits_80_columns(self):
        ask(*self.shadow("again"))
        done = run(*self.shadow("again"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("was already done", done.stderr)
        self.assertLessEqual(max(len(line) for line in done.stdout.splitlines() if not line.startswith("/")), 80, done.stdout)
        other = run(*self.shadow("again", recipes="nvfp4"))
        self.assertEqual(other.returncode, 2, other.stdout)
        self.assertIn("without nvfp4", other.stderr)

    def test_shadow_mode_goes_on_after_a_stop_with_the_losses_of_a_whole_run(self):
        steps = 400
        whole = self.shadow("whole", recipes="mxfp8", steps=steps)
        self.assertEqual(run(*whole).returncode, 0)
        process = subprocess.Popen([PROGRAM, *self.shadow("cut", recipes="mxfp8", steps=steps)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(600):
            logs = list((self.folder / "cut").rglob("log.jsonl"))
            if logs and logs[0].read_text().count('"step"') > 40:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.communicate() and process.returncode, 130)
        answer = ask(*self.shadow("cut", recipes="mxfp8", steps=steps))
        self.assertEqual(answer["steps"], steps)
        (one,), (other,) = (list((self.folder / name).rglob("log.jsonl")) for name in ("whole", "cut"))
        self.assertEqual(losses(one.parent), losses(other.parent))

    def test_shadow_mode_compares_what_its_configurations_train(self):
        products = [word for op in ("addmm", "linear", "matmul", "mm") for word in ("--set", f"precision.ops.{op}=fp32")]
        answer = ask(*self.shadow("ops", "--set", "precision.compute=bf16", *products, recipes="bf16", steps=2))
        for layer in answer["layers"]:
            self.assertEqual(layer["precisions"]["bf16"]["output_error"], 0)
        self.assertIn('linear = "fp32"', pathlib.Path(answer["rules"][0]["configuration"]).read_text())
        other = run(*self.shadow("ops", recipes="bf16", steps=2))
        self.assertEqual(other.returncode, 2, other.stdout)
        self.assertIn("other settings", other.stderr)

    def test_shadow_mode_goes_on_with_the_precisions_it_began_with(self):
        process = subprocess.Popen([PROGRAM, *self.shadow("part", steps=4000)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(600):
            if list((self.folder / "part").rglob("log.jsonl")):
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.communicate() and process.returncode, 130)
        for recipes, words in (("mxfp8,bf16,nvfp4", "without nvfp4"), ("bf16,mxfp8", "of fp8-delayed, too")):
            other = run(*self.shadow("part", recipes=recipes, steps=4000))
            self.assertEqual(other.returncode, 2, other.stdout)
            self.assertIn(words, other.stderr)

    def test_what_was_trained_in_a_finished_run_stays(self):
        ask(*self.arguments("kept", recipes="bf16"))
        folder = self.folder / "kept" / "bf16-seed-0"
        done = run("train", str(folder))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue((folder / "model").exists())
        ask(*self.arguments("kept", recipes="bf16,mxfp8"))
        self.assertTrue((folder / "model").exists())
        self.assertTrue(list((folder / "checkpoints").glob("step-*")))

    def test_shadow_mode_replaces_no_file_of_another(self):
        folder = self.folder / "mine"
        folder.mkdir()
        (folder / "mxfp8.toml").write_text("[train]\nsteps = 7\n")
        refused = run(*self.shadow("mine", recipes="bf16,mxfp8", steps=3))
        self.assertEqual(refused.returncode, 2, refused.stdout)
        self.assertIn("mxfp8.toml would be replaced", refused.stderr)
        self.assertEqual([path.name for path in folder.iterdir()], ["mxfp8.toml"])
        self.assertEqual(ask(*self.shadow("mine", recipes="bf16", steps=3))["steps"], 3)
        self.assertEqual(ask(*self.shadow("mine", recipes="bf16", steps=3))["steps"], 3)  # its own it replaces

    def test_shadow_mode_begins_again_where_it_could_not_begin(self):
        refused = run(*self.arguments("begins", "--fast", "--set", "model.width=20", recipes="mxfp8", steps=3))
        self.assertIn("mxfp8 covers none of the model's weights", refused.stderr)
        self.assertEqual(ask(*self.shadow("begins", recipes="mxfp8", steps=3))["steps"], 3)

    def test_shadow_mode_blames_no_precision_for_what_fp32_cannot_hold(self):
        diverging = ["--set", "optimizer.lr=1e30", "--unset", "optimizer.clip_norm"]
        done = run(*self.shadow("diverging", *diverging, "--json", recipes="bf16,mxfp8", steps=40))
        self.assertEqual(done.returncode, 4, done.stdout + done.stderr)
        if done.stdout:
            for layer in json.loads(done.stdout)["layers"]:
                for cell in layer["precisions"].values():
                    self.assertLess(cell["output_error"], 1)

    def test_a_rehearsal_leaves_the_runs_figures_alone(self):
        figures = self.folder / "figures.prom"
        figures.write_text("of the run")
        for more in ([], ["--fast"]):
            ask(*self.arguments("figures" + "".join(more), "--set", f"watch.prometheus={figures}", *more, recipes="bf16", steps=3))
            self.assertEqual(figures.read_text(), "of the run")

    def test_what_shadow_mode_cannot_do_is_refused_before_anything_runs(self):
        for more, words in ((["--seeds", "2"], "--seeds"), (["--device", "h100"], "--device"), (["--recipes", "fp32"], "names none"),
                            (["--output", str(self.folder / "none" / "page.html")], "none")):
            done = run("rehearse", self.config, "--fast", "--steps", "3", "--folder", str(self.folder / "refused"), *more)
            self.assertIn(done.returncode, (2, 3), done.stdout + done.stderr)
            self.assertIn(words, done.stderr)
            self.assertFalse((self.folder / "refused").exists(), more)


if __name__ == "__main__":
    unittest.main()
