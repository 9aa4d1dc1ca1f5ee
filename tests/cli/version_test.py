"""`halfstep --version` against the sources, git, the binary's own notes, and Python's torch."""
import pathlib
import re
import subprocess
import unittest

import torch

from program import PROGRAM, ask, run

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Version(unittest.TestCase):
    def setUp(self):
        self.told = ask("--version")

    def test_is_that_of_the_changelog(self):
        newest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
        self.assertEqual(self.told["version"], newest)

    def test_names_a_commit_of_this_repository(self):
        in_git = subprocess.run(["git", "-C", ROOT, "rev-parse"], capture_output=True).returncode == 0
        if not in_git:
            self.assertEqual(self.told["commit"], "unknown")
            return
        subprocess.run(["git", "-C", ROOT, "cat-file", "-e", self.told["commit"] + "^{commit}"], check=True)

    def test_names_the_compiler_that_signed_the_program(self):
        signature = subprocess.run(["readelf", "-p", ".comment", PROGRAM], capture_output=True, text=True, check=True)
        number = re.search(r"\d+\.\d+\.\d+", self.told["compiler"])[0]
        self.assertIn(number, signature.stdout)

    def test_names_the_libtorch_that_is_loaded(self):
        self.assertEqual(self.told["torch"]["loaded"], torch.__version__.split("+")[0])

    def test_plain_says_the_same(self):
        plain = run("--version").stdout
        for fact in (self.told["version"], self.told["commit"], self.told["compiler"], *self.told["torch"].values()):
            self.assertIn(fact, plain)


if __name__ == "__main__":
    unittest.main()
