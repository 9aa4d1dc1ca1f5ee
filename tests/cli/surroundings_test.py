"""`halfstep` where the shell is not as usual: closed descriptors."""
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


if __name__ == "__main__":
    unittest.main()
