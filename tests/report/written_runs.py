"""A folder of runs for tests of the commands that read them."""
import os
import pathlib
import subprocess
import tempfile
import unittest


class WrittenRuns(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.runs = pathlib.Path(folder.name)
        subprocess.run([os.environ["HALFSTEP_WRITE_RUNS"], cls.runs], check=True)
