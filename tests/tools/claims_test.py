"""claims_test.py PROGRAM: the figures of docs/claims.md that take no training are still measured, a figure that differs is noticed,
and the page has a section and a verdict for every claim. PROGRAM is the halfstep that was built."""
import contextlib
import importlib.machinery
import importlib.util
import io
import json
import pathlib
import re
import sys
import tempfile
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/claims"
PAGE = (ROOT / "docs/claims.md").read_text()
VERDICTS = {"Holds", "Holds with a condition", "Does not hold", "Not measurable here"}
PROGRAM = sys.argv.pop()


def claims_tool():
    loader = importlib.machinery.SourceFileLoader("claims", str(TOOL))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("claims", loader))
    sys.modules["claims"] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


claims = claims_tool()


def run(*arguments):
    """The exit code of the command and its answer; in this process, because torch takes seconds to load."""
    output = io.StringIO()
    command = ["claims", "--json", "--program", PROGRAM, *map(str, arguments)]
    with unittest.mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(output):
        code = claims.main()
    return code, json.loads(output.getvalue())


class Claims(unittest.TestCase):
    def test_figures_without_training_are_as_documented(self):
        code, answer = run("--thinned")
        wrong = [f"{name}: {row}" for name, one in answer["claims"].items() for row in one["figures"] if not row["agrees"]]
        self.assertFalse(wrong, "\n" + "\n".join(wrong))
        self.assertEqual(code, 0)
        self.assertGreater(len(answer["claims"]), 15)

    def test_a_figure_that_differs_is_noticed(self):
        with tempfile.TemporaryDirectory() as scratch:
            page = pathlib.Path(scratch) / "claims.md"
            page.write_text(PAGE.replace("| E4M3FNUZ | 240 | exact |", "| E4M3FNUZ | 448 | exact |"))
            code, answer = run("--only", "e4m3-largest", "--page", page)
        rows = answer["claims"]["e4m3-largest"]["figures"]
        self.assertEqual([row["figure"] for row in rows if not row["agrees"]], ["E4M3FNUZ"])
        self.assertEqual(code, 1)

    def test_a_figure_that_only_one_side_has_is_noticed(self):
        section = claims.Section("Holds", {"on the page": ("1", "exact"), "on both": ("2", "exact")})
        rows = claims.compared({"on both": 2.0, "measured": 3.0}, section)
        self.assertEqual({row["figure"]: row["agrees"] for row in rows}, {"on the page": False, "on both": True, "measured": False})

    def test_tolerances(self):
        for measured, documented, tolerance, expected in [
                (2.0**-24, "2^-24", "exact", True), (65504.0, "65,504", "exact", True), (0.1234499, "0.1234", "exact", True),
                (0.1236, "0.1234", "exact", False), (float("nan"), "NaN", "exact", True), (0.0, "NaN", "exact", False),
                (10.4, "10", "± 5 %", True), (10.6, "10", "± 5 %", False), (-10.4, "-10", "± 5 %", True),
                (3.1, "3", "± 0.2", True), (3.3, "3", "± 0.2", False), (float("nan"), "3", "± 0.2", False),
                (float("inf"), "3", "± 5 %", False), (1.9, "1.44", "1.2 to 2.8", True), (1.1, "1.44", "1.2 to 2.8", False),
                (-0.3, "-0.1", "-0.25 to 0.25", False)]:
            self.assertEqual(claims.within(measured, documented, tolerance), expected, (measured, documented, tolerance))

    def test_every_claim_has_a_section_with_a_verdict_and_figures(self):
        sections = claims.sections_of(PAGE)
        self.assertEqual(set(sections), set(claims.CLAIMS))
        for name, section in sections.items():
            self.assertIn(section.verdict, VERDICTS, name)
            self.assertTrue(section.figures, name)

    def test_every_stated_figure_is_within_its_own_tolerance(self):
        for name, section in claims.sections_of(PAGE).items():
            for label, (value, tolerance) in section.figures.items():
                self.assertTrue(claims.within(claims.value_of(value), value, tolerance), f"{name}: {label}")

    def test_the_first_table_has_the_verdicts_of_the_sections(self):
        rows = dict(re.findall(r"^\| \[([^\]]+)\]\(#[^)]+\) \| ([^|]+) \|$", PAGE, re.MULTILINE))
        sections = dict(re.findall(r"^### (.+?)\n.*?^\*\*([^*]+)\.\*\*", PAGE, re.MULTILINE | re.DOTALL))
        self.assertEqual(rows, {title: verdict.lower() for title, verdict in sections.items()})


if __name__ == "__main__":
    unittest.main()
