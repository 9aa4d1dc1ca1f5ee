"""README.md shows what is so."""
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


class Readme(unittest.TestCase):
    def test_its_diff_is_the_one_between_the_examples_and_has_at_most_six_lines(self):
        shown = re.search(r"```diff\n(.*?)\n```", README, re.DOTALL).group(1)
        printed = subprocess.run([sys.executable, ROOT / "tools/example_diff.py"], check=True, text=True,
                                 stdout=subprocess.PIPE).stdout
        self.assertEqual(shown, printed.rstrip("\n"))

    def test_every_file_that_it_links_to_exists(self):
        for link in re.findall(r"\]\((?!http)([^)#]+)", README):
            self.assertTrue((ROOT / link).exists(), link)


if __name__ == "__main__":
    unittest.main()
