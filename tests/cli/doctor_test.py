"""`halfstep doctor` on short runs of the program itself."""
import json
import pathlib
import tempfile
import unittest

from program import run, tiny_run


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
        self.assertTrue(text.startswith("Nothing found in 40 steps. Looked at: loss of 40 logged steps, 0 of them skipped;"))
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
        self.assertEqual((done.returncode, done.stdout), (0, "No step is logged yet: there is nothing to look at.\n"))

    def test_what_cannot_be_read_is_said(self):
        done = run("doctor", str(self.folder / "none"))
        self.assertEqual(done.returncode, 3)
        self.assertIn("log.jsonl", done.stderr)
        self.assertEqual(run("doctor").returncode, 2)


if __name__ == "__main__":
    unittest.main()
