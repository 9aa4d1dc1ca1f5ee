"""`halfstep report` as a person calls it."""
import json
import statistics
import unittest

from program import ask, run
from written_runs import WrittenRuns


class ReportCommand(WrittenRuns):
    def test_writes_the_page_into_the_run_and_says_where_and_what(self):
        done = run("report", str(self.runs / "fp16"))
        self.assertEqual(done.returncode, 0, done.stderr)
        page = self.runs / "fp16" / "report.html"
        self.assertEqual(done.stdout.splitlines()[0], str(page))
        self.assertIn("Done: 1,000 steps in 7 min 0 s.", " ".join(done.stdout.split()))
        self.assertTrue(page.read_text().startswith("<!DOCTYPE html>"))
        self.assertLessEqual(max(map(len, done.stdout.splitlines()[1:])), 80)

    def test_json_has_the_figures_of_the_log(self):
        out = self.runs / "elsewhere.html"
        answer = ask("report", str(self.runs / "fp16"), "--out", str(out))
        self.assertEqual(answer["page"], str(out))
        self.assertEqual(answer["bytes"], out.stat().st_size)
        steps = [record for record in map(json.loads, (self.runs / "fp16" / "log.jsonl").read_text().splitlines())
                 if record["kind"] == "step"]
        self.assertEqual(answer["skipped"], sum(step["skipped"] for step in steps))
        self.assertEqual(answer["first_loss"], steps[0]["loss"])
        self.assertEqual(answer["final_steps"], 100)
        self.assertAlmostEqual(answer["final_loss"], statistics.fmean(step["loss"] for step in steps[-100:]), places=12)
        self.assertAlmostEqual(answer["items_per_second"], statistics.median_high(s["items_per_second"] for s in steps))
        self.assertEqual(answer["peak_bytes"], max(step["memory"]["peak_bytes"] for step in steps))

    def test_a_killed_run_has_a_report_too(self):
        answer = ask("report", str(self.runs / "killed"))
        self.assertIn("the run was killed, or is still running", answer["verdict"])
        self.assertEqual((answer["last_step"], answer["planned_steps"]), (40, 1000))

    def test_a_second_report_replaces_the_first(self):
        first = ask("report", str(self.runs / "bf16"))
        self.assertEqual(ask("report", str(self.runs / "bf16")), first)

    def test_what_cannot_be_read_is_said(self):
        for where, words in [(self.runs / "none", "log.jsonl"), (self.runs, "log.jsonl: cannot open")]:
            done = run("report", str(where))
            self.assertEqual(done.returncode, 3)
            self.assertIn(words, done.stderr)
        self.assertEqual(run("report").returncode, 2)


if __name__ == "__main__":
    unittest.main()
