"""`halfstep compare` as a person calls it."""
import unittest

from program import ask, run
from written_runs import WrittenRuns


class CompareCommand(WrittenRuns):
    def paths(self, *names):
        return [str(self.runs / name) for name in names]

    def test_says_first_which_runs_are_the_same(self):
        done = run("compare", *self.paths("fp32", "bf16", "fp16"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stdout.startswith("fp32 and bf16 are the same within noise"), done.stdout)
        table = [line for line in done.stdout.splitlines() if line.startswith(("run ", "fp32 ", "bf16 ", "fp16 "))][-4:]
        self.assertEqual([line.split()[0] for line in table], ["run", "fp32", "bf16", "fp16"])
        self.assertIn("same", table[2])
        self.assertIn("different", table[3])
        self.assertEqual(len({len(line) for line in table}), 1, "columns are not aligned")

    def test_json_has_every_pair(self):
        answer = ask("compare", *self.paths("fp32", "bf16", "fp16", "other-batches"))
        self.assertEqual([pair["likeness"] for pair in answer["pairs"][:3]], ["same", "different", "unclear"])
        self.assertEqual(len(answer["pairs"]), 6)
        self.assertEqual(answer["pairs"][2]["why_unpaired"], "data.seed differs")
        # fp16's losses are 1.02 times those of fp32.
        self.assertAlmostEqual(answer["pairs"][1]["mean"] / answer["runs"][0]["final_loss"], 0.02, delta=0.002)

    def test_html_holds_all_curves(self):
        page = self.runs / "compare.html"
        answer = ask("compare", *self.paths("fp32", "diverged"), "--html", str(page))
        self.assertEqual(answer["page"], str(page))
        self.assertEqual(answer["pairs"][0]["likeness"], "not finite")
        self.assertIsNone(answer["pairs"][0]["mean"])
        self.assertIn("Difference from fp32", page.read_text())

    def test_runs_of_one_name_are_told_apart_by_their_paths(self):
        answer = ask("compare", *self.paths("fp32", "fp32"))
        self.assertEqual([row["run"] for row in answer["runs"]], self.paths("fp32", "fp32"))
        self.assertTrue(answer["pairs"][0]["identical"])

    def test_what_cannot_be_compared_is_said(self):
        self.assertEqual(run("compare", *self.paths("fp32")).returncode, 2)
        done = run("compare", *self.paths("fp32", "none"))
        self.assertEqual(done.returncode, 3)
        self.assertIn("none/log.jsonl", done.stderr)


if __name__ == "__main__":
    unittest.main()
