"""`halfstep` where the shell or other processes are not as usual: closed descriptors, two runs that begin at once."""
import json
import pathlib
import subprocess
import tempfile
import unittest

from program import PROGRAM

CONFIG = """
[model]
kind = "gpt2"
layers = 1
width = 16
heads = 2
[data]
train = ["{corpus}"]
validation_fraction = 0.1
sequence_length = 16
batch_size = 2
[train]
steps = 4
[log]
every = 1
"""


class Surroundings(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        self.text = self.folder / "text.txt"
        self.text.write_text("".join(f"line {i * i} of the corpus\n" for i in range(400)))
        self.config = self.folder / "run.toml"
        self.config.write_text(CONFIG.format(corpus=self.text))

    def shell(self, command):
        return subprocess.run(["bash", "-c", command], cwd=self.folder, capture_output=True)

    def test_closed_descriptors_do_not_become_the_log(self):
        for closed in (">&- 2>&-", "<&- >&- 2>&-", "2>&-", "<&-"):
            with self.subTest(closed):
                done = self.shell(f"rm -rf a && {PROGRAM} train run.toml --folder a {closed}")
                self.assertEqual(done.returncode, 0, done.stderr)
                lines = (self.folder / "a" / "log.jsonl").read_text().splitlines()
                self.assertEqual([json.loads(line)["kind"] for line in lines].count("step"), 4)

    def test_runs_that_begin_in_the_same_second_have_a_folder_each(self):
        # One of eight is late if the machine is busy; in every second there are still several.
        started = [subprocess.Popen([PROGRAM, "train", str(self.config)], cwd=self.folder,
                                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(8)]
        for process in started:
            errors = process.communicate()[1]
            self.assertEqual(process.returncode, 0, errors)
        folders = list((self.folder / "runs").iterdir())
        self.assertEqual(len(folders), len(started))
        for folder in folders:
            records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
            self.assertEqual([record["kind"] for record in records].count("step"), 4)

    def test_run_that_cannot_begin_leaves_no_folder(self):
        done = subprocess.run([PROGRAM, "train", str(self.config), "--set", f"data.tokenizer={self.text}"],
                              cwd=self.folder, capture_output=True)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertEqual(list((self.folder / "runs").iterdir()), [])


if __name__ == "__main__":
    unittest.main()
