"""`halfstep launch`: real processes as ranks, a run that all of them train, and what follows when one is lost."""
import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time
import unittest

PROGRAM = os.environ["HALFSTEP_PROGRAM"]
TEXT = "".join(f"line {i}: the quick brown fox jumps over the lazy dog {i * i}\n" for i in range(400))
SMALL = ["--preset", "tiny", "--set", "data.batch_size=24", "--set", "data.sequence_length=32", "--set", "model.layers=1",
         "--set", "model.width=32", "--set", "train.sample_every=0", "--set", "train.evaluate_every=5", "--set",
         "data.validation_fraction=0.1", "--set", "model.dropout=0.1", "--unset", "optimizer.warmup_steps"]


def environment() -> dict:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def tensors_of(run: pathlib.Path) -> str:
    """Of the last checkpoint: every tensor's hash and every value."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    manifest = json.loads(next(last.glob("*.json")).read_text())
    for part in ("fingerprint", "machine"):
        manifest.pop(part, None)
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def losses_of(run: pathlib.Path) -> list:
    return [(record["step"], record["loss"]) for record in map(json.loads, (run / "log.jsonl").read_text().splitlines())
            if record.get("kind", record.get("type")) == "step"]


class Launch(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        (self.folder / "text.txt").write_text(TEXT)

    def command(self, ranks: int, run: str, *more: str, launch: tuple = ()) -> list:
        train = ["train", *SMALL, "--set", f"data.train={self.folder / 'text.txt'}", "--folder", str(self.folder / run), *more]
        return [PROGRAM, *(("launch", "-n", str(ranks), *launch) if ranks > 1 else ()), *train]

    def train(self, ranks: int, run: str, *more: str, launch: tuple = (), code: int = 0):
        done = subprocess.run(self.command(ranks, run, *more, launch=launch), capture_output=True, text=True, env=environment(), timeout=300)
        self.assertEqual(done.returncode, code, done.stderr)
        return done

    def start(self, ranks: int, run: str, *more: str, launch: tuple = ()):
        process = subprocess.Popen(self.command(ranks, run, *more, launch=launch), stderr=subprocess.PIPE, text=True, env=environment())
        self.addCleanup(process.stderr.close)
        return process

    def ranks_of(self, process) -> dict:
        """Process numbers by rank."""
        found = {}
        for child in pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            variables = pathlib.Path(f"/proc/{child}/environ").read_bytes().decode(errors="replace").split("\0")
            for variable in variables:
                if variable.startswith("RANK="):
                    found[int(variable[5:])] = int(child)
        return found

    def wait_for_checkpoint(self, run: str) -> None:
        deadline = time.monotonic() + 120
        while not list((self.folder / run / "checkpoints").glob("step-*")):
            self.assertLess(time.monotonic(), deadline, "no checkpoint")
            time.sleep(0.02)

    def test_a_run_of_several_ranks_sees_the_batches_of_one(self):
        more = ("--set", "train.steps=10", "--set", "model.dropout=0", "--set", "precision.compute=fp32")
        self.train(1, "one", *more)
        expected = losses_of(self.folder / "one")
        self.assertEqual(len(expected), 10)
        for ranks in (2, 3):
            self.train(ranks, f"ranks{ranks}", *more)
            found = losses_of(self.folder / f"ranks{ranks}")
            # Loss of the same 24 rows, added up in another order: FP32's last digits. Another row would be percents.
            for (step, loss), (_, other) in zip(expected, found, strict=True):
                self.assertAlmostEqual(loss, other, delta=2e-5 * loss, msg=f"{ranks} ranks, step {step}")

    def test_a_rank_that_is_lost_is_named_and_restarts_end_with_the_same_bits(self):
        more = ("--set", "train.steps=40", "--set", "checkpoint.every=4", "--set", "train.accumulation=2")
        self.train(2, "undisturbed", *more)
        process = self.start(2, "killed", *more, launch=("--restarts", "1"))
        self.wait_for_checkpoint("killed")
        os.kill(self.ranks_of(process)[1], signal.SIGKILL)
        told = process.stderr.read()
        self.assertEqual(process.wait(timeout=200), 0, told)
        self.assertIn("rank 0 of 2", told)
        self.assertIn("rank 1 is gone: killed by signal 9 (SIGKILL)", told)
        self.assertIn("halfstep: restart 1 of 1", told)
        self.assertEqual(tensors_of(self.folder / "killed"), tensors_of(self.folder / "undisturbed"))
        self.assertEqual(losses_of(self.folder / "killed"), losses_of(self.folder / "undisturbed"))

    def test_parts_on_each_rank_train_as_one_process_does(self):
        more = ("--set", "train.steps=12", "--set", "model.dropout=0", "--set", "precision.compute=fp32", "--set",
                "checkpoint.every=4", "--set", "train.sample_every=6")
        self.train(1, "one", *more)
        expected = losses_of(self.folder / "one")
        for shard in ("states", "gradients", "weights"):
            run = self.folder / shard
            self.train(2, shard, *more, "--set", f"run.shard={shard}")
            for (step, loss), (_, other) in zip(expected, losses_of(run), strict=True):
                self.assertAlmostEqual(loss, other, delta=2e-5 * loss, msg=f"{shard}, step {step}")
            last = run / "checkpoints" / "step-000000012"
            self.assertTrue((last / "rank-00001" / "tensors.safetensors").exists())
            verified = subprocess.run([PROGRAM, "checkpoint", "verify", str(run)], capture_output=True, text=True)
            self.assertEqual(verified.returncode, 0, verified.stderr + verified.stdout)
            sizes = {name: (run / "model" / name).stat().st_size for name in ("model.safetensors", "config.json")}
            self.assertEqual(sizes["model.safetensors"], (self.folder / "one/model/model.safetensors").stat().st_size)
        # What a bit of another rank's file has become is found, and named.
        damaged = last / "rank-00001" / "tensors.safetensors"
        content = bytearray(damaged.read_bytes())
        content[-5] ^= 1
        damaged.write_bytes(content)
        verified = subprocess.run([PROGRAM, "checkpoint", "verify", str(run)], capture_output=True, text=True)
        self.assertNotEqual(verified.returncode, 0)
        self.assertIn("rank-00001", verified.stderr + verified.stdout)

    def test_parts_are_resumed_by_any_number_of_ranks_with_another_sharding(self):
        more = ("--set", "model.dropout=0", "--set", "precision.compute=fp32", "--set", "optimizer.schedule=constant")
        self.train(1, "one", *more, "--set", "train.steps=20")
        for number, (ranks, shard) in enumerate(((3, "weights"), (2, "states"), (1, "none"), (4, "gradients"))):
            self.train(ranks, "moved", *more, "--set", f"train.steps={5 * (number + 1)}", "--set", f"run.shard={shard}")
        for (step, loss), (_, other) in zip(losses_of(self.folder / "one"), losses_of(self.folder / "moved"), strict=True):
            self.assertAlmostEqual(loss, other, delta=5e-5 * loss, msg=f"step {step}")

    def test_parts_of_a_rank_that_is_lost_go_on_with_the_same_bits(self):
        more = ("--set", "train.steps=40", "--set", "checkpoint.every=4", "--set", "run.shard=weights")
        self.train(2, "undisturbed", *more)
        process = self.start(2, "killed", *more, launch=("--restarts", "1"))
        self.wait_for_checkpoint("killed")
        os.kill(self.ranks_of(process)[1], signal.SIGKILL)
        told = process.stderr.read()
        self.assertEqual(process.wait(timeout=200), 0, told)
        self.assertIn("rank 1 is gone: killed by signal 9 (SIGKILL)", told)
        self.assertEqual(tensors_of(self.folder / "killed"), tensors_of(self.folder / "undisturbed"))
        self.assertEqual(losses_of(self.folder / "killed"), losses_of(self.folder / "undisturbed"))

    def test_without_restarts_the_code_is_that_of_the_lost_rank(self):
        process = self.start(2, "lost", "--set", "train.steps=2000", "--set", "checkpoint.every=2")
        self.wait_for_checkpoint("lost")
        ranks = self.ranks_of(process)
        os.kill(ranks[0], signal.SIGKILL)
        told = process.stderr.read()
        self.assertEqual(process.wait(timeout=60), 128 + 9, told)
        self.assertIn("rank 0 of 2: killed by signal 9", told)
        for number in ranks.values():
            self.assertFalse(pathlib.Path(f"/proc/{number}").exists())

    def test_a_signal_saves_and_the_run_goes_on_with_another_number_of_ranks(self):
        more = ("--set", "train.steps=30", "--set", "model.dropout=0", "--set", "precision.compute=fp32")
        self.train(1, "one", *more)
        process = self.start(3, "moved", *more)
        self.wait_for_status("moved", 3)
        process.send_signal(signal.SIGTERM)
        told = process.stderr.read()
        self.assertEqual(process.wait(timeout=60), 128 + 15, told)
        self.train(2, "moved", *more)
        found = losses_of(self.folder / "moved")
        self.assertEqual([step for step, _ in found], list(range(1, 31)))
        for (step, loss), (_, other) in zip(losses_of(self.folder / "one"), found, strict=True):
            self.assertAlmostEqual(loss, other, delta=2e-4 * loss, msg=f"step {step}")

    def wait_for_status(self, run: str, step: int) -> None:
        log = self.folder / run / "log.jsonl"
        deadline = time.monotonic() + 120
        while not log.exists() or len(losses_of(self.folder / run)) < step:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)

    def test_ranks_do_not_outlive_their_launcher(self):
        process = self.start(2, "orphans", "--set", "train.steps=5000")
        self.wait_for_status("orphans", 2)
        ranks = self.ranks_of(process)
        self.assertEqual(sorted(ranks), [0, 1])
        process.kill()
        process.wait()
        deadline = time.monotonic() + 10
        while any(pathlib.Path(f"/proc/{number}").exists() for number in ranks.values()):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    def test_a_batch_that_ranks_cannot_share_is_refused(self):
        done = self.train(2, "odd", "--set", "data.batch_size=5", code=3)
        self.assertIn("data.batch_size is 5, of which 2 ranks take equal parts. Set it to 4 or 6", done.stderr)

    def test_other_programs_and_what_they_say(self):
        done = subprocess.run([PROGRAM, "launch", "-n", "3", "--logs", str(self.folder / "logs"), "--", "sh", "-c",
                               'echo "$RANK of $WORLD_SIZE at $MASTER_ADDR"; exit $((RANK == 2 ? 9 : 0))'],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 9)
        self.assertEqual(done.stdout, "0 of 3 at 127.0.0.1\n")
        self.assertIn("halfstep: rank 2 of 3: ended with code 9.\n  | 2 of 3 at 127.0.0.1\n", done.stderr)
        self.assertEqual((self.folder / "logs/rank-1.log").read_text(), "1 of 3 at 127.0.0.1\n")

    def test_usage(self):
        for arguments, word in (((), "--ranks is required"), (("-n", "2"), "which command?"), (("-n", "0", "train"), "not in range")):
            done = subprocess.run([PROGRAM, "launch", *arguments], capture_output=True, text=True)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(word, done.stderr)
        done = subprocess.run([PROGRAM, "launch", "-n", "1", "--", "no-such-program"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 127)
        self.assertIn("cannot start no-such-program: No such file", done.stderr)


if __name__ == "__main__":
    unittest.main()
