"""`halfstep doctor` on short runs of the program itself, and on those that docs/findings.md shows.

All of the page: HALFSTEP_EVERY_REPRODUCTION=1 ctest --test-dir build/release -R cli_doctor_test
"""
import json
import os
import pathlib
import re
import subprocess
import tempfile
import time
import unittest

from program import PROGRAM, run, tiny_run

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/findings.md"
SLOW = "# not in CI"


class Doctor(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.scratch.name)
        cls.config = tiny_run(cls.folder, "steps = 40\n")[1]
        cls.healthy = cls.train("healthy", "--set", "watch.every=0")
        # The loss scale is doubled after every step that was taken, so that it is too high for every second one.
        cls.ill = cls.train("ill", "--precision", "fp16", "--set", "precision.loss_scale.initial=1e9", "--set",
                            "precision.loss_scale.growth_interval=1")

    @classmethod
    def tearDownClass(cls):
        cls.scratch.cleanup()

    @classmethod
    def train(cls, name, *arguments):
        folder = cls.folder / name
        done = run("train", str(cls.config), "--folder", str(folder), *arguments)
        if done.returncode != 0:
            raise AssertionError(done.stderr)
        return folder

    def test_a_healthy_run_has_no_finding_and_is_told_what_was_not_looked_at(self):
        done = run("doctor", str(self.healthy))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        text = " ".join(done.stdout.split())
        self.assertTrue(text.startswith("Nothing found in 40 steps. Examined: loss of 40 logged steps, 0 of them skipped;"))
        self.assertIn("train with --set watch.every=50", text)

    def test_an_ill_run_has_its_finding_first_and_an_exit_code(self):
        done = run("doctor", str(self.ill))
        self.assertEqual(done.returncode, 9, done.stdout + done.stderr)
        self.assertEqual(done.stderr, "")
        first = done.stdout.splitlines()[0]
        self.assertTrue(first.startswith("serious  skip-spiral, since step"), done.stdout)
        text = " ".join(done.stdout.split())
        for words in ("Evidence:", "Remedy:", "precision.loss_scale.growth_interval", "docs/findings.md#skip-spiral"):
            self.assertIn(words, text)
        self.assertLessEqual(max(map(len, done.stdout.splitlines())), 80)

    def test_json_has_the_same_and_counts_as_the_log_does(self):
        done = run("doctor", str(self.ill), "--json")
        self.assertEqual(done.returncode, 9)
        answer = json.loads(done.stdout)
        finding = answer["findings"][0]
        self.assertEqual((finding["code"], finding["severity"]), ("skip-spiral", "serious"))
        records = [json.loads(line) for line in (self.ill / "log.jsonl").read_text().splitlines()]
        steps = [record for record in records if record["kind"] == "step"]
        self.assertEqual(answer["last_step"], steps[-1]["step"])
        skips = sum(step["skipped"] for step in steps)
        self.assertIn(f"loss of 40 logged steps, {skips} of them skipped", answer["looked_at"])
        self.assertIn((finding["layer"], finding["op"]),
                      {(record["layer"], name) for record in records if record["kind"] == "culprit"
                       for name in (record["op"], record["inside"])})

    def test_a_run_that_goes_on_or_was_killed_is_examined_too(self):
        cut = self.folder / "cut"
        cut.mkdir()
        lines = (self.ill / "log.jsonl").read_text().splitlines(keepends=True)
        steps = [number for number, line in enumerate(lines) if line.startswith('{"kind":"step"')]
        (cut / "log.jsonl").write_text("".join(lines[:steps[-1]]) + lines[steps[-1]][:50])
        done = run("doctor", str(cut), "--json")
        self.assertEqual(done.returncode, 9, done.stderr)
        self.assertEqual(json.loads(done.stdout)["last_step"], 39)

    def test_a_log_without_a_step_is_not_called_healthy(self):
        begun = self.folder / "begun"
        begun.mkdir()
        (begun / "log.jsonl").write_text((self.healthy / "log.jsonl").read_text().splitlines(keepends=True)[0])
        done = run("doctor", str(begun))
        self.assertEqual((done.returncode, done.stdout), (0, "No step is logged yet: there is nothing to examine.\n"))

    def test_what_cannot_be_read_is_said(self):
        done = run("doctor", str(self.folder / "none"))
        self.assertEqual(done.returncode, 3)
        self.assertIn("log.jsonl", done.stderr)
        self.assertEqual(run("doctor").returncode, 2)


SETUP = re.compile(r"^(?:small=\"[^\"]*\"|ill=\S+)", re.MULTILINE)
EXPECTED = re.compile(r" +# (serious|warning|note)  ([\w-]+), since step [\d,]+$")


def reproductions():
    """The blocks of docs/findings.md that ask the doctor, by section, each as its commands."""
    sections = re.split(r"^## `([\w-]+)`$", PAGE.read_text(), flags=re.MULTILINE)
    blocks = lambda text: re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return {code: [re.sub(r"\\\n\s*", "", block).splitlines() for block in blocks(text) if "halfstep doctor" in block]
            for code, text in zip(sections[1::2], sections[2::2])}


class Page(unittest.TestCase):
    """What docs/findings.md tells a reader to type, carried out in the order of the page."""

    # Its reproduction needs ranks: tests/distributed has them.
    WITHOUT = {"rank-differs"}

    def test_every_finding_has_a_reproduction_in_which_it_is_first(self):
        for code, blocks in reproductions().items():
            firsts = {found.group(2) for block in blocks for line in block if (found := EXPECTED.search(line))}
            self.assertTrue(code in firsts or code in self.WITHOUT, f"{code}: {firsts}")
            for line in sum(blocks, []):
                self.assertTrue(EXPECTED.search(line) or not line.startswith("halfstep doctor"), line)

    def test_each_reproduction_has_the_first_finding_that_the_page_says(self):
        setup = SETUP.findall(PAGE.read_text())
        self.assertEqual(len(setup), 2)
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch)
            example = folder / setup[1].removeprefix("ill=")
            for link, program in ((folder / "bin/halfstep", PROGRAM), (example, os.environ["HALFSTEP_ILLNESSES"])):
                link.parent.mkdir(parents=True)
                link.symlink_to(program)
            environment = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
            for block in sum(reproductions().values(), []):
                if any(SLOW in line for line in block) and not os.environ.get("HALFSTEP_EVERY_REPRODUCTION"):
                    continue
                with self.subTest(block="\n".join(block)):
                    self.carry_out(block, setup, folder, environment)

    def carry_out(self, block, setup, folder, environment):
        for line in block:
            began = time.monotonic()
            done = subprocess.run(["bash", "-c", "\n".join([*setup, line])], cwd=folder, text=True, capture_output=True,
                                  env=environment)
            print(f"{time.monotonic() - began:5.1f} s  {line}", flush=True)
            if expected := EXPECTED.search(line):
                said = re.match(r"(\w+)  ([\w-]+), since step [\d,]+$", done.stdout, re.MULTILINE)
                self.assertTrue(said, done.stdout + done.stderr)
                self.assertEqual(said.groups(), expected.groups(), done.stdout)
                print(f"         {said.group()}", flush=True)
            else:
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
