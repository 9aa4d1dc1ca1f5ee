"""What an operator does to `halfstep train`: signals, full disks, closed descriptors, changed settings."""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import unittest

from prometheus_client.parser import text_string_to_metric_families

from program import CORPUS, PROGRAM

SHIM = os.environ["HALFSTEP_FAULT_SHIM"]


class Run:
    """A tiny training run in a folder of its own."""

    def __init__(self, case, *more, steps=100000, every=5, fault=None, wrapper=()):
        self.case = case
        self.arguments = [
            "train", "--folder", str(case.folder / "run"), "--json", *sum((["--set", item] for item in (
                "model.kind=gpt2", "model.layers=1", "model.width=16", "model.heads=2",
                f"data.train={case.folder / 'corpus.txt'}", "data.sequence_length=16", "data.batch_size=2",
                f"train.steps={steps}", f"checkpoint.every={every}", "train.threads=1", *more)), [])]
        environment = dict(os.environ)
        if fault:
            environment.update(LD_PRELOAD=SHIM, HALFSTEP_FAULT=fault)
        self.errors = tempfile.TemporaryFile("w+")
        case.addCleanup(self.errors.close)
        self.process = subprocess.Popen([*wrapper, PROGRAM, *self.arguments], stdout=subprocess.PIPE,
                                        stderr=self.errors, text=True, env=environment)
        case.addCleanup(self.process.stdout.close)
        case.addCleanup(self.process.kill)
        # A program that hangs fails its test, not the whole file.
        self.limit = threading.Timer(120, self.process.kill)
        self.limit.start()
        case.addCleanup(self.limit.cancel)

    def until(self, kind, step):
        """Reads what it prints until a record of that kind with at least this step."""
        for line in self.process.stdout:
            record = json.loads(line)
            if record["kind"] == kind and record["step"] >= step:
                return record
        raise AssertionError(f"ended before {kind} {step}: {self.end()[1]}")

    def end(self):
        """Exit code, standard error, and the records that were left."""
        # By the same reader as before: communicate() would lose the half of a line that it holds.
        records = [json.loads(line) for line in self.process.stdout]
        self.process.wait()
        self.limit.cancel()
        self.errors.seek(0)
        return self.process.returncode, self.errors.read(), records


class LongRun(unittest.TestCase):
    def setUp(self):
        held = tempfile.TemporaryDirectory()
        self.addCleanup(held.cleanup)
        self.folder = pathlib.Path(held.name)
        (self.folder / "corpus.txt").write_text(CORPUS)

    def log(self):
        return [json.loads(line) for line in (self.folder / "run" / "log.jsonl").read_text().splitlines()]

    def steps(self):
        return sorted(int(path.name[5:]) for path in (self.folder / "run" / "checkpoints").glob("step-*"))

    def test_a_second_sigterm_means_the_same_as_the_first(self):
        run = Run(self, every=0)
        run.until("step", 20)
        for _ in range(3):
            run.process.send_signal(signal.SIGTERM)
        code, err, _ = run.end()
        self.assertEqual(code, 128 + signal.SIGTERM, err)
        self.assertEqual(self.steps(), [self.log()[-1]["step"]])
        self.assertEqual(self.log()[-1]["outcome"], "interrupted")

    def test_sighup_saves(self):
        run = Run(self, every=0)
        run.until("step", 10)
        run.process.send_signal(signal.SIGHUP)
        self.assertEqual(run.end()[0], 128 + signal.SIGHUP)
        self.assertEqual(len(self.steps()), 1)

    def test_a_second_interrupt_ends_at_once_with_a_code_that_says_so(self):
        run = Run(self, every=0)
        run.until("step", 10)
        run.process.send_signal(signal.SIGINT)
        run.process.send_signal(signal.SIGINT)
        code, err, _ = run.end()
        self.assertIn(code, (6, 130))  # two signals may arrive as one
        self.assertEqual(code == 6, "ended at once" in err, err)

    def test_one_refused_save_is_told_and_tried_again(self):
        run = Run(self, "precision.compute=bf16", steps=400, every=100, fault="write:tensors.safetensors:1-1:ENOSPC")
        code, err, records = run.end()
        self.assertEqual(code, 0, err)
        notes = [record["text"] for record in self.log() if record["kind"] == "note"]
        self.assertTrue(any("could not be saved" in note for note in notes), notes)
        self.assertEqual(self.steps()[-1], 400)

    def test_after_a_refused_save_sigterm_still_saves(self):
        run = Run(self, every=20, fault="write:tensors.safetensors:1-1:ENOSPC")
        run.until("step", 100)
        run.process.send_signal(signal.SIGTERM)
        code, err, _ = run.end()
        self.assertEqual(code, 143, err)
        self.assertEqual(self.steps()[-1], self.log()[-1]["step"])

    def test_a_disk_that_stays_full_ends_with_the_reason_and_the_end_record(self):
        run = Run(self, steps=30, every=0, fault="write:tensors.safetensors:1-999999:ENOSPC")
        code, err, _ = run.end()
        self.assertEqual(code, 3, err)
        self.assertIn("could not be saved in 6 attempts", err)
        self.assertEqual(self.log()[-1]["outcome"], "failed")

    def test_under_nohup_a_hangup_is_nothing(self):
        run = Run(self, every=0, wrapper=("nohup",))
        run.until("step", 10)
        run.process.send_signal(signal.SIGHUP)
        run.until("step", 40)
        run.process.send_signal(signal.SIGTERM)
        self.assertEqual(run.end()[0], 143)

    def test_what_somebody_puts_among_the_checkpoints_ends_nothing(self):
        run = Run(self, every=20, steps=3000)
        run.until("step", 30)
        stray = self.folder / "run" / "checkpoints" / "step-000999999"
        stray.symlink_to("step-000000020")
        run.until("step", 100)
        stray.unlink()
        code, err, records = run.end()
        self.assertEqual(code, 0, err)
        self.assertEqual(self.steps()[-1], 3000)

    def test_refused_events_end_nothing(self):
        run = Run(self, "log.tensorboard=true", steps=250, fault="write:events.out:3-60:ENOSPC")
        code, err, records = run.end()
        self.assertEqual(code, 0, err)
        self.assertEqual(self.steps()[-1], 250)
        # What only reached memory is not called written, and what is lost at the end is named.
        notes = [record["text"] for record in records if record["kind"] == "note"]
        self.assertFalse([text for text in notes if "event file can be written again" in text], notes)
        self.assertTrue([text for text in notes if "could not be written and are lost" in text], notes)

    def test_refused_figures_for_prometheus_end_nothing_and_are_written_later(self):
        run = Run(self, "watch.prometheus=figures.prom", every=0, fault="write:figures.prom:1-2:ENOSPC")
        figures = self.folder / "run" / "figures.prom"
        records = []  # until the third attempt, however fast the steps are
        for line in run.process.stdout:
            records.append(json.loads(line))
            if figures.exists():
                break
        run.process.send_signal(signal.SIGTERM)
        code, err, later = run.end()
        self.assertEqual(code, 143, err)
        notes = [record["text"] for record in records + later if record["kind"] == "note" and "Prometheus" in record["text"]]
        self.assertEqual(len(notes), 1, notes)
        self.assertIn("the run continues", notes[0])
        families = {family.name: family for family in text_string_to_metric_families(figures.read_text())}
        self.assertEqual(families["halfstep_step"].samples[0].value, self.log()[-1]["step"])

    def test_figures_for_prometheus_take_the_place_of_nothing_else(self):
        (self.folder / "folder.prom").mkdir()
        for path, code, word in (("log.jsonl", 2, "does not end in .prom"), (str(self.folder / "folder.prom"), 3, "is a folder")):
            found, err, records = Run(self, f"watch.prometheus={path}", steps=2, every=0).end()
            self.assertEqual(found, code, err)
            self.assertIn(word, err)
            self.assertEqual(records, [])

    def test_a_rollback_that_the_disk_refuses_to_log_is_made_all_the_same(self):
        wild = ("train.on_divergence=rollback", "train.most_rollbacks=1", "optimizer.clip_norm=1000",
                "checkpoint.every=10")
        calm = Run(self, *wild, "optimizer.lr=3e-3", steps=60)
        self.assertEqual(calm.end()[0], 0)
        run = Run(self, *wild, "optimizer.lr=10", steps=400, fault="write:log.jsonl:20-100000:ENOSPC")
        code, err, records = run.end()
        self.assertEqual(code, 4, err)
        notes = [record["text"] for record in records if record["kind"] == "note"]
        self.assertTrue(any("rolled back from step" in note for note in notes), notes)

    @unittest.skipIf(os.geteuid() != 0, "needs root, to mount a small disk")
    def test_a_disk_without_room_for_a_checkpoint_is_told_before_the_first_step(self):
        disk = self.folder / "run"
        disk.mkdir()
        wide = ("model.width=128", "model.layers=4", "checkpoint.keep_last=3")  # 10 MB a checkpoint
        for megabytes, code, word in ((8, 3, "MB are free, and a checkpoint takes"), (24, 0, "the disk has room for 2")):
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", disk], check=True)
            try:
                found, err, records = Run(self, *wide, steps=2, every=0).end()
                told = err + "".join(record.get("text", "") for record in records)
                self.assertEqual(found, code, told)
                self.assertIn(word, told)
                self.assertEqual((disk / "log.jsonl").exists(), code == 0)
            finally:
                subprocess.run(["umount", "-l", disk], check=True)

    def test_refused_log_lines_are_kept_and_written_later(self):
        run = Run(self, steps=300, fault="write:log.jsonl:20-120:ENOSPC")
        code, err, _ = run.end()
        self.assertEqual(code, 0, err)
        steps = [record["step"] for record in self.log() if record["kind"] == "step"]
        self.assertEqual(steps, list(range(1, 301)))
        self.assertTrue(any("can be written again" in record.get("text", "") for record in self.log()))

    def test_records_that_are_refused_until_the_end_are_counted_and_missed_on_resume(self):
        code, err, _ = Run(self, steps=60, every=50, fault="write:log.jsonl:20-100000:ENOSPC").end()
        self.assertEqual(code, 3, err)
        lost = 60 - max(record["step"] for record in self.log())
        self.assertRegex(err, r"\d+ records of the log could not be written and are lost, since step \d+: .*ENOSPC")
        self.assertGreater(lost, 0)
        self.assertEqual(self.steps()[-1], 60)
        self.assertTrue((self.folder / "run" / "model" / "model.safetensors").exists())
        code, err, _ = Run(self, steps=62).end()
        self.assertEqual(code, 0, err)
        notes = [record["text"] for record in self.log() if record["kind"] == "note"]
        self.assertIn(f"the log has no records of steps {61 - lost} to 60", notes)

    def test_a_log_of_every_tenth_step_lacks_nothing_on_resume(self):
        Run(self, "log.every=10", steps=25).end()
        self.assertEqual(Run(self, "log.every=1", steps=30).end()[0], 0)
        self.assertNotIn("has no records", (self.folder / "run" / "log.jsonl").read_text())

    def test_a_file_size_limit_is_a_full_disk(self):
        run = Run(self, steps=60, every=0, wrapper=("prlimit", "--fsize=30000"))
        code, err, _ = run.end()
        self.assertEqual(code, 3, err)
        self.assertIn("ulimit -f", err)
        self.assertNotIn("ree some space", err)

    def test_a_token_file_cut_short_is_told(self):
        (self.folder / "ids.bin").write_bytes(bytes([1, 0]) * 2000000)
        run = Run(self, f"data.train={self.folder / 'ids.bin'}")
        run.until("step", 10)
        os.truncate(self.folder / "ids.bin", 100)
        code, err, _ = run.end()
        self.assertEqual(code, 3, err)
        self.assertIn("cut short", err)

    def test_a_dry_run_leaves_nothing_behind_when_it_is_killed(self):
        temporary = self.folder / "tmp"
        temporary.mkdir()
        environment = {**os.environ, "TMPDIR": str(temporary)}
        run = subprocess.Popen([PROGRAM, "train", "--preset", "tiny", "--dry-run", "--set",
                                f"data.train={self.folder / 'corpus.txt'}"], env=environment,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(1.0)
        run.send_signal(signal.SIGTERM)
        run.wait()
        self.assertEqual(list(temporary.iterdir()), [])
        self.assertFalse((self.folder / "runs").exists())

    def test_checkpoints_are_listed_pinned_and_removed(self):
        Run(self, "checkpoint.keep_last=0", steps=20).end()
        folder = str(self.folder / "run")

        def ask(*arguments):
            return subprocess.run([PROGRAM, "checkpoint", *arguments], capture_output=True, text=True)

        listed = json.loads(ask("ls", folder, "--json").stdout)
        self.assertEqual([row["step"] for row in listed], [5, 10, 15, 20])
        self.assertEqual(ask("pin", folder, "--step", "10").returncode, 0)
        refused = ask("rm", folder, "--step", "10")
        self.assertEqual(refused.returncode, 3)
        self.assertIn("pinned", refused.stderr)
        Run(self, "checkpoint.keep_last=1", steps=40).end()
        self.assertEqual(self.steps(), [10, 40])
        self.assertEqual(ask("unpin", folder, "--step", "10").returncode, 0)
        self.assertEqual(ask("rm", folder, "--step", "10").returncode, 0)
        self.assertEqual(self.steps(), [40])
        self.assertIn("40", ask("ls", folder).stdout)

    def test_a_run_without_a_folder_of_checkpoints_keeps_its_log(self):
        Run(self, steps=10).end()
        shutil.rmtree(self.folder / "run" / "checkpoints")
        Run(self, steps=10).end()
        self.assertTrue((self.folder / "run" / "earlier-1" / "log.jsonl").exists())


if __name__ == "__main__":
    unittest.main()
