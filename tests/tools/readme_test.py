"""README.md shows what is so."""
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()

# The diffs of README.md in their order, and how many lines may change in each.
DIFFS = [("00_libtorch", "02_bf16", 5), ("02_bf16", "03_fp16", 1)]


def example_diff(before, after, most):
    return subprocess.run([sys.executable, ROOT / "tools/example_diff.py", before, after, "--most", str(most)],
                          check=True, text=True, stdout=subprocess.PIPE).stdout.rstrip("\n")


class Readme(unittest.TestCase):
    def test_its_diffs_are_those_between_the_examples(self):
        shown = re.findall(r"```diff\n(.*?)\n```", README, re.DOTALL)
        self.assertEqual(shown, [example_diff(*diff) for diff in DIFFS])

    def test_examples_in_three_precisions_differ_by_one_line(self):
        for before, after in [("01_fp32", "02_bf16"), ("01_fp32", "03_fp16"), ("02_bf16", "03_fp16")]:
            changed = [line for line in example_diff(before, after, 1).splitlines() if line[0] in "+-"]
            print("\n".join(changed))
            self.assertEqual(len(changed), 2)
            self.assertTrue(all("halfstep::Precision::" in line for line in changed))

    def test_every_file_that_it_links_to_exists(self):
        for link in re.findall(r"\]\((?!http)([^)#]+)", README):
            self.assertTrue((ROOT / link).exists(), link)


if __name__ == "__main__":
    unittest.main()
