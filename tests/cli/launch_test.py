"""`halfstep launch`: real processes as ranks, a run that all of them train, and what follows when one is lost."""
import hashlib
import json
import os
import pathlib
import re
import signal
import socket
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


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


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

    def wait_until(self, holds) -> None:
        deadline = time.monotonic() + 120
        while not holds():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.001)

    def is_at_the_meeting_place(self, rank: int) -> bool:
        """Whether a process has a connection, of which that one is the first."""
        try:
            return any(os.readlink(file).startswith("socket:") for file in pathlib.Path(f"/proc/{rank}/fd").iterdir())
        except FileNotFoundError:
            return False

    def wait_for_checkpoint(self, run: str) -> None:
        deadline = time.monotonic() + 120
        while not list((self.folder / run / "checkpoints").glob("step-*")):
            self.assertLess(time.monotonic(), deadline, "no checkpoint")
            time.sleep(0.02)

    def test_a_run_of_several_ranks_sees_the_batches_of_one(self):
        more = ("--set", "train.steps=10", "--set", "model.dropout=0", "--set", "precision.compute=fp32")
        self.train(1, "one", *more, "--set", "optimizer.schedule=constant")
        expected = losses_of(self.folder / "one")
        self.assertEqual(len(expected), 10)
        # The last goes on where eight have ended after five steps.
        for ranks, run, *instead in ((2, "two"), (3, "three"), (8, "eight", "--set", "train.steps=5"), (3, "eight")):
            self.train(ranks, run, *more, *instead, "--set", "optimizer.schedule=constant")
            if instead:
                continue
            found = losses_of(self.folder / run)
            # Loss of the same 24 rows, added up in another order: FP32's last digits. Another row would be percents.
            for (step, loss), (_, other) in zip(expected, found, strict=True):
                self.assertAlmostEqual(loss, other, delta=2e-5 * loss, msg=f"{run}, step {step}")

    def test_canonical_sums_have_the_bits_of_one_process(self):
        more = ("--set", "train.steps=8", "--set", "train.accumulation=4", "--set", "data.batch_size=6", "--set", "run.reduction=canonical")
        for compute in ("bf16", "fp16"):
            precision = ("--set", f"precision.compute={compute}")
            self.train(1, f"one-{compute}", *more, *precision)
            expected = self.folder / f"one-{compute}"
            for ranks, shard in ((2, "none"), (3, "none"), (2, "weights")):
                run = self.folder / f"{compute}-{ranks}-{shard}"
                self.train(ranks, run.name, *more, *precision, "--set", f"run.shard={shard}")
                self.assertEqual(losses_of(run), losses_of(expected), f"{ranks} ranks, {shard}")
                self.assertEqual((run / "model/model.safetensors").read_bytes(), (expected / "model/model.safetensors").read_bytes())
                if shard == "none":
                    self.assertEqual(tensors_of(run), tensors_of(expected))
        done = self.train(3, "few", "--set", "run.reduction=canonical", "--set", "train.accumulation=2", code=3)
        self.assertIn("train.accumulation is 2 for 3 ranks", done.stderr)
        # Stopped, and gone on with by another number of ranks.
        self.train(2, "moved", *more, "--set", "train.steps=3", "--set", "optimizer.schedule=constant")
        self.train(4, "moved", *more, "--set", "optimizer.schedule=constant")
        self.train(1, "at-once", *more, "--set", "optimizer.schedule=constant")
        self.assertEqual(tensors_of(self.folder / "moved"), tensors_of(self.folder / "at-once"))

    def test_the_log_tells_of_each_rank_and_the_doctor_finds_healthy_ranks_alike(self):
        more = ("--set", "train.steps=12", "--set", "log.every=5", "--set", "watch.every=2", "--set", "data.batch_size=12")
        self.train(3, "watched", *more)
        records = [json.loads(line) for line in (self.folder / "watched/log.jsonl").read_text().splitlines()]
        self.assertEqual(records[0]["ranks"], 3)
        looked_at = {record["step"]: record for record in records if record["kind"] == "step" and "rank_losses" in record}
        self.assertEqual(sorted(looked_at), [1, 2, 4, 6, 8, 10, 12])
        for step, record in looked_at.items():
            self.assertEqual(len(record["rank_losses"]), 3)
            self.assertEqual(len(set(record["rank_losses"])), 3)  # of batches of their own
            self.assertAlmostEqual(sum(record["rank_losses"]) / 3, record["loss"], delta=1e-12 * record["loss"])
        self.assertEqual({record["step"] for record in records if record["kind"] == "probe"}, set(looked_at))
        done = subprocess.run([PROGRAM, "doctor", str(self.folder / "watched")], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout)

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
                "checkpoint.every=4", "--set", "train.sample_every=6", "--json")
        one = self.train(1, "one", *more)
        expected = losses_of(self.folder / "one")
        parameters = lambda done: json.loads(done.stdout.splitlines()[0])["parameters"]
        for shard in ("states", "gradients", "weights"):
            run = self.folder / shard
            done = self.train(2, shard, *more, "--set", f"run.shard={shard}", "--set", "log.trace_steps=1")
            self.assertEqual(parameters(done), parameters(one))
            json.loads((run / "trace.json").read_text())
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
        more = ("--set", "train.steps=60", "--set", "model.dropout=0", "--set", "precision.compute=fp32")
        self.train(1, "one", *more)
        process = self.start(3, "moved", *more)
        self.wait_for_status("moved", 3)
        process.send_signal(signal.SIGTERM)
        told = process.stderr.read()
        self.assertEqual(process.wait(timeout=60), 128 + 15, told)
        self.train(2, "moved", *more)
        found = losses_of(self.folder / "moved")
        self.assertEqual([step for step, _ in found], list(range(1, 61)))
        for (step, loss), (_, other) in zip(losses_of(self.folder / "one"), found, strict=True):
            self.assertAlmostEqual(loss, other, delta=2e-4 * loss, msg=f"step {step}")

    def wait_for_status(self, run: str, step: int) -> None:
        log = self.folder / run / "log.jsonl"
        deadline = time.monotonic() + 120
        while not log.exists() or len(losses_of(self.folder / run)) < step:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)

    def test_a_restart_goes_on_where_its_command_was_and_not_where_it_began(self):
        more = ("--set", "checkpoint.every=2", "--set", "checkpoint.keep_last=0", "--set", "optimizer.schedule=constant",
                "--set", "train.evaluate_every=0")
        self.train(2, "run", *more, "--set", "train.steps=12")
        process = self.start(2, "run", *more, "--set", "train.steps=60", "--from-step", "4", launch=("--restarts", "1"))
        deadline = time.monotonic() + 120
        while not (self.folder / "run/checkpoints/step-000000020").exists():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.01)
        os.kill(self.ranks_of(process)[1], signal.SIGKILL)
        told = process.stderr.read()
        self.assertEqual(process.wait(timeout=200), 0, told)
        self.assertIn("restarted by its launcher", told)
        resumed = [int(step) for step in re.findall(r"resumed after step (\d+)", told)]
        self.assertEqual(resumed[0], 4)
        self.assertGreaterEqual(resumed[-1], 18)
        self.train(1, "new", "--set", "train.steps=4", "--set", "checkpoint.every=2", "--set", "checkpoint.resume=never")
        self.train(1, "new", "--set", "train.steps=8", "--set", "checkpoint.resume=never", code=3)

    def test_a_rank_that_is_lost_while_others_connect_is_named(self):
        train = " ".join(self.command(1, "lost"))
        process = subprocess.Popen([PROGRAM, "launch", "-n", "2", "--", "sh", "-c", f"if [ $RANK = 1 ]; then exec sleep 600; fi; exec {train}"],
                                   stderr=subprocess.PIPE, text=True, env=environment())
        self.addCleanup(process.stderr.close)
        self.wait_until(lambda: len(self.ranks_of(process)) == 2)
        ranks = self.ranks_of(process)
        self.wait_until(lambda: self.is_at_the_meeting_place(ranks[0]))
        time.sleep(0.5)
        killed = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        told = process.stderr.read()
        self.assertEqual(process.wait(timeout=60), 128 + 9, told)
        self.assertLess(time.monotonic() - killed, 2)
        # One that the launcher has to end has no such words.
        self.assertIn("connecting: rank 1 is gone: killed by signal 9 (SIGKILL)", told)

    def test_a_rank_that_is_killed_while_it_connects_is_named(self):
        # As soon as all are started; when the victim is where they meet, and a moment later.
        for number, seconds in enumerate((None, 0, 0.004, 0.02)):
            run, victim = f"connects{number}", number % 3
            logs = self.folder / f"{run}-logs"
            process = self.start(3, run, "--set", "train.steps=2000", launch=("--logs", str(logs)))
            self.wait_until(lambda: len(self.ranks_of(process)) == 3)
            ranks = self.ranks_of(process)
            if seconds is not None:
                self.wait_until(lambda: self.is_at_the_meeting_place(ranks[victim]))
                time.sleep(seconds)
            killed = time.monotonic()
            os.kill(ranks[victim], signal.SIGKILL)
            told = process.stderr.read()
            self.assertEqual(process.wait(timeout=60), 128 + 9, told)
            self.assertLess(time.monotonic() - killed, 2, told)
            self.assertIn(f"rank {victim} of 3: killed by signal 9", told)
            # Each of the others says it itself, or had not come so far.
            words = told + "".join(path.read_text() for path in logs.iterdir())
            unmet = re.search(r"of 3 ranks (\d) had not joined the others yet", told)
            self.assertEqual(words.count(f"rank {victim} is gone: killed by signal 9") + (int(unmet[1]) if unmet else 0), 2, words)
            if seconds is None:
                self.assertEqual(int(unmet[1]), 2)
            for rank in ranks.values():
                self.assertFalse(pathlib.Path(f"/proc/{rank}").exists())

    def test_programs_that_meet_in_their_own_way_have_time_to_end(self):
        done = subprocess.run([PROGRAM, "launch", "-n", "2", "--", "sh", "-c", "if [ $RANK = 1 ]; then kill -9 $$; fi; sleep 1; echo saved"],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 128 + 9, done.stderr)
        self.assertEqual(done.stdout, "saved\n")
        self.assertIn("of 2 ranks 1 had ended without an error", done.stderr)

    def test_threads_of_ranks_spin_briefly_without_a_second_start(self):
        names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
        clean = {name: value for name, value in environment().items() if name not in names}
        for given, expected in (({}, "10000,"), ({"GOMP_SPINCOUNT": "5"}, "5,"), ({"OMP_WAIT_POLICY": "active"}, ",active")):
            done = subprocess.run([PROGRAM, "launch", "-n", "1", "--", "sh", "-c", 'echo "$GOMP_SPINCOUNT,$OMP_WAIT_POLICY"'],
                                  capture_output=True, text=True, env={**clean, **given})
            self.assertEqual(done.stdout, f"{expected}\n", done.stderr)

    def test_ranks_with_different_settings_are_refused(self):
        train = " ".join(self.command(1, "differs", "--set", "train.steps=4"))
        for key, value, says in (("OPTIMIZER__LR", "0.5", "optimizer.lr is 0.5 there"), ("DATA__SEED", "7", "data.seed is 7 there")):
            done = subprocess.run([PROGRAM, "launch", "-n", "2", "--", "sh", "-c",
                                   f"if [ $RANK = 1 ]; then export HALFSTEP_{key}={value}; fi; exec {train}"],
                                  capture_output=True, text=True, env=environment(), timeout=100)
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertIn(f"Rank 1: {says}", done.stderr)

    def test_a_rank_that_crashes_while_all_are_asked_to_stop_is_named(self):
        process = self.start(2, "crashes", "--set", "train.steps=2000", "--set", "run.shard=weights", "--set", "run.rank_timeout_seconds=20")
        deadline = time.monotonic() + 60
        while not (self.folder / "crashes/log.jsonl").exists() or not losses_of(self.folder / "crashes"):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)
        victim = self.ranks_of(process)[1]
        os.kill(victim, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        begun = time.monotonic()
        os.kill(victim, signal.SIGABRT)
        os.kill(victim, signal.SIGCONT)
        told = process.stderr.read()
        self.assertNotEqual(process.wait(timeout=60), 0)
        self.assertLess(time.monotonic() - begun, 15)
        self.assertIn("rank 1 of 2: killed by signal 6 (SIGABRT)", told)

    def test_nothing_is_removed_before_all_ranks_can_go_back(self):
        more = ("--set", "checkpoint.every=4", "--set", "checkpoint.keep_last=0", "--set", "run.shard=weights", "--set",
                "optimizer.schedule=constant", "--set", "train.evaluate_every=0")
        self.train(2, "back", *more, "--set", "train.steps=24")
        damaged = self.folder / "back/checkpoints/step-000000020/rank-00001/tensors.safetensors"
        content = bytearray(damaged.read_bytes())
        content[-6000] ^= 1
        damaged.write_bytes(content)
        done = self.train(2, "back", *more, "--set", "train.steps=200", "--set", "optimizer.lr=3", "--set", "optimizer.clip_norm=1000",
                          "--set", "train.on_divergence=rollback", code=4)
        self.assertIn("Going back to step", done.stderr)
        self.assertIn("Rank 1: ", done.stderr)
        self.assertTrue((self.folder / "back/checkpoints/step-000000024").exists())

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

    def test_a_port_of_another_program_is_named(self):
        # It accepts connections, as the system does for it, and never answers.
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = str(other.getsockname()[1])
            ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            done = subprocess.run(self.command(1, "taken", "--set", "run.rank_timeout_seconds=2"), capture_output=True, text=True,
                                  env={**environment(), **ranks}, timeout=60)
            self.assertEqual(done.returncode, 8, done.stderr)
            self.assertIn(f"at 127.0.0.1:{port}: a program accepts connections there and did not answer within 2 s", done.stderr)
            said, code = self.ended(self.on_hosts("taken", only=(1,), launch=("--host-wait", "1"), port=port))[0]
            self.assertEqual(code, 8, said)
            self.assertIn(f"No ranks' meeting place answers at 127.0.0.1:{port}.", said)

    def test_a_frozen_holder_of_the_meeting_place_is_noticed(self):
        ranks = []
        variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        command = self.command(1, "frozen", "--set", "train.steps=100000", "--set", "checkpoint.every=10", "--set",
                               "run.rank_timeout_seconds=3")
        for rank in ("0", "1"):
            ranks.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                          env={**environment(), **variables, "RANK": rank}))
            self.addCleanup(ranks[-1].stderr.close)
            self.addCleanup(ranks[-1].kill)
        self.wait_for_checkpoint("frozen")
        ranks[0].send_signal(signal.SIGSTOP)
        said = ranks[1].stderr.read()
        self.assertEqual(ranks[1].wait(timeout=60), 8, said)
        self.assertIn("the process that holds the ranks' meeting place is gone or does not answer", said)

    def test_a_signal_reaches_what_a_shell_has_started(self):
        train = " ".join(self.command(1, "shell", "--set", "train.steps=100000"))
        process = subprocess.Popen([PROGRAM, "launch", "-n", "2", "--", "sh", "-c", f"{train}; echo finished"],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        self.wait_for_status("shell", 2)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 128 + 15, said)
        # Nothing holds the folder any more, and what was done is saved.
        self.train(2, "shell", "--set", f"train.steps={losses_of(self.folder / 'shell')[-1][0] + 1}")

    def test_codes_of_other_programs_are_failures(self):
        for code in (4, 7):
            done = subprocess.run([PROGRAM, "launch", "-n", "2", "--", "sh", "-c", f"test $RANK = 0 || exit {code}"],
                                  capture_output=True, text=True)
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertIn(f"rank 1 of 2: ended with code {code}.", done.stderr)

    def test_a_second_command_of_one_launch_is_no_restart(self):
        first = self.command(1, "two", "--set", "train.steps=12", "--set", "checkpoint.every=4", "--set", "checkpoint.keep_last=0")
        script = f"{' '.join(first)} && {' '.join(first)} --from-step 4 --set optimizer.lr=0.01"
        done = subprocess.run([PROGRAM, "launch", "-n", "2", "--", "sh", "-c", script], capture_output=True, text=True,
                              env=environment(), timeout=200)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("resumed after step 4", done.stderr)
        self.assertNotIn("restarted by its launcher", done.stderr)

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
        done = subprocess.run([PROGRAM, "launch", "-n", "2", "--", PROGRAM, "launch", "-n", "2", "env"], capture_output=True, text=True)
        self.assertIn("One launch starts all ranks", done.stderr)
        done = subprocess.run([PROGRAM, "launch", "-n", "2", "tran"], capture_output=True, text=True)
        self.assertIn("cannot start tran: No such file or directory. It is not a halfstep command either", done.stderr)

    def on_hosts(self, run: str, *more: str, ranks: int = 1, hosts: int = 2, only: tuple = (), launch: tuple = (), port=None) -> list:
        """Launchers that take this machine for several hosts, one for each of `only` or for all."""
        port = port or (free_port() if not hasattr(self, "port") else self.port)
        self.port = port
        launchers = []
        for number in only or range(hosts):
            words = ("--hosts", ",".join(["127.0.0.1"] * hosts), "--host-number", str(number), "--port", str(port), *launch)
            command = self.command(2, run, *more, launch=words)
            command[command.index("-n") + 1] = str(ranks)
            launchers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment()))
            self.addCleanup(launchers[-1].stderr.close)
            self.addCleanup(launchers[-1].kill)
        return launchers

    def ended(self, launchers: list) -> list:
        """What each said on stderr, and its code."""
        said = [launcher.communicate(timeout=200)[1] for launcher in launchers]
        return [(text, launcher.returncode) for text, launcher in zip(said, launchers)]

    def assert_same_end(self, run: str, other: str) -> None:
        self.assertEqual(tensors_of(self.folder / run), tensors_of(self.folder / other))
        self.assertEqual(losses_of(self.folder / run), losses_of(self.folder / other))

    def test_two_hosts_train_as_one_with_as_many_ranks(self):
        more = ("--set", "train.steps=10")
        self.train(4, "one_host", *more)
        for said, code in self.ended(self.on_hosts("two_hosts", *more, ranks=2)):
            self.assertEqual(code, 0, said)
        self.assert_same_end("two_hosts", "one_host")

    def test_a_rank_that_another_host_loses_is_named_by_both_and_restarts_end_with_the_same_bits(self):
        more = ("--set", "train.steps=40", "--set", "checkpoint.every=4", "--set", "run.shard=weights")
        self.train(2, "undisturbed", *more)
        launchers = self.on_hosts("killed", *more, launch=("--restarts", "1"))
        self.wait_for_checkpoint("killed")
        os.kill(self.ranks_of(launchers[1])[1], signal.SIGKILL)
        for said, code in self.ended(launchers):
            self.assertEqual(code, 0, said)
            self.assertIn("halfstep: rank 1 of 2 on host 1 (127.0.0.1): killed by signal 9 (SIGKILL).", said)
            self.assertIn("halfstep: restart 1 of 1", said)
        self.assert_same_end("killed", "undisturbed")

    def test_without_restarts_all_hosts_end_when_one_has_lost_a_rank(self):
        launchers = self.on_hosts("lost", "--set", "train.steps=2000", "--set", "checkpoint.every=2")
        self.wait_for_checkpoint("lost")
        os.kill(self.ranks_of(launchers[0])[0], signal.SIGKILL)
        (first, first_code), (second, second_code) = self.ended(launchers)
        for said in (first, second):
            self.assertIn("rank 0 of 2 on host 0 (127.0.0.1): killed by signal 9", said)
        self.assertEqual((first_code, second_code), (128 + 9, 8))

    def test_a_host_that_comes_back_is_waited_for(self):
        more = ("--set", "train.steps=40", "--set", "checkpoint.every=4")
        self.train(2, "undisturbed", *more)
        for lost in (1, 0):
            run = f"host{lost}"
            launchers = self.on_hosts(run, *more, launch=("--restarts", "1"))
            self.wait_for_checkpoint(run)
            launchers[lost].kill()
            launchers[lost].wait()
            launchers[lost] = self.on_hosts(run, *more, only=(lost,), launch=("--restarts", "1"))[0]
            for said, code in self.ended(launchers):
                self.assertEqual(code, 0, said)
            self.assert_same_end(run, "undisturbed")

    def test_a_command_that_is_refused_is_not_restarted(self):
        done = self.train(2, "refused", "--set", "optimizer.lr=minus", launch=("--restarts", "3"), code=2)
        self.assertIn("not restarted: the same command would be refused again", done.stderr)
        self.assertNotIn("restart 1 of 3", done.stderr)
        # On each of several hosts, also where another's rank is the one to name.
        ends = self.ended(self.on_hosts("refused", "--set", "optimizer.lr=minus", launch=("--restarts", "3")))
        self.assertIn(2, [code for _, code in ends], ends)
        for said, code in ends:
            self.assertIn(code, (2, 8), said)
            self.assertIn("not restarted", said)

    def test_a_host_that_does_not_come_back_is_named(self):
        launchers = self.on_hosts("gone", "--set", "train.steps=2000", "--set", "checkpoint.every=2",
                                  launch=("--restarts", "1", "--host-wait", "2"))
        self.wait_for_checkpoint("gone")
        launchers[1].kill()
        said, code = self.ended(launchers[:1])[0]
        self.assertEqual(code, 8, said)
        self.assertIn("rank 1 of 2 on host 1 (127.0.0.1): gone, or does not answer.", said)
        self.assertIn("launch: host 1 (127.0.0.1) is not there after 2 s. Was the same command started there?", said)

    def test_a_host_that_never_comes_is_named(self):
        first, = self.ended(self.on_hosts("never", hosts=3, only=(0,), launch=("--host-wait", "1")))
        self.assertEqual(first[1], 8)
        self.assertIn("launch: host 1 (127.0.0.1), host 2 (127.0.0.1) are not there after 1 s.", first[0])
        second, = self.ended(self.on_hosts("never", only=(1,), launch=("--host-wait", "1")))
        self.assertEqual(second[1], 8)
        self.assertIn(f"launch: host 0 (127.0.0.1) is not there after 1 s. No ranks' meeting place answers at 127.0.0.1:{self.port}.",
                      second[0])
        # The others hear from the first.
        for said, code in self.ended(self.on_hosts("never", hosts=3, only=(0, 1), launch=("--host-wait", "2"))):
            self.assertEqual(code, 8)
            self.assertIn("launch: host 2 (127.0.0.1) is not there after 2 s.", said)

    def test_a_signal_to_one_host_stops_all(self):
        launchers = self.on_hosts("stopped", "--set", "train.steps=5000", launch=("--restarts", "1"))
        self.wait_for_status("stopped", 3)
        launchers[1].send_signal(signal.SIGTERM)
        for said, code in self.ended(launchers):
            self.assertEqual(code, 128 + 15, said)
            self.assertNotIn("restart", said)
        self.assertTrue(list((self.folder / "stopped/checkpoints").glob("step-*")))

    def test_what_ranks_on_hosts_are_told(self):
        said = []
        for number in (0, 1):
            command = [PROGRAM, "launch", "-n", "2", "--hosts", "127.0.0.1,127.0.0.1", "--host-number", str(number), "--port",
                       str(free_port() if number == 0 else self.port), "--logs", str(self.folder / "logs"), "--", "sh", "-c",
                       'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $MASTER_PORT"']
            self.port = command[command.index("--port") + 1]
            said.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        self.assertEqual(said[0].communicate(timeout=60)[0], f"0 0 4 2 0 127.0.0.1 {self.port}\n")
        self.assertEqual(said[1].communicate(timeout=60)[0], "")
        for rank, told in ((1, "1 1 4 2 0"), (2, "2 0 4 2 1"), (3, "3 1 4 2 1")):
            self.assertEqual((self.folder / f"logs/rank-{rank}.log").read_text(), f"{told} 127.0.0.1 {self.port}\n")

    def test_hosts_that_cannot_be_told_apart_or_differ(self):
        for hosts, word in (("127.0.0.1,127.0.0.1", "several are this host's"), ("203.0.113.1,203.0.113.2", "none is this host's")):
            done = subprocess.run([PROGRAM, "launch", "-n", "1", "--hosts", hosts, "--", "true"], capture_output=True, text=True)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(word, done.stderr)
        done = subprocess.run([PROGRAM, "launch", "-n", "1", "--hosts", "127.0.0.1,203.0.113.2", "--", "true"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("127.0.0.1 is a loopback address here, which 203.0.113.2 cannot reach", done.stderr)
        port = str(free_port())
        launchers = [subprocess.Popen([PROGRAM, "launch", "-n", str(number + 1), "--hosts", "127.0.0.1,127.0.0.1", "--host-number",
                                       str(number), "--port", port, "--host-wait", "20", "--", "true"], stderr=subprocess.PIPE, text=True)
                     for number in (0, 1)]
        for said, code in self.ended(launchers):
            self.assertEqual(code, 2, said)
            self.assertIn("Use the same on all hosts", said)

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
