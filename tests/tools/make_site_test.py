"""tools/make_site makes pages that lead to each other, and notices what has no comment and what leads nowhere."""
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"

HEADER = """// Things to count.
#pragma once
namespace halfstep {
/// Counts. See docs/more.md.
struct Counter {
  int count = 0;  ///< so far
  /// Counts on, or back.
  void up();
  void down();
};
%s
}  // namespace halfstep
"""


def make(scratch, header=HEADER % "", readme="", page="# More\n\n## To `count`\n\nIt is a `Counter`.\n"):
    """The finished process, and the site's folder, for a repository of one header and two pages."""
    root = pathlib.Path(scratch)
    for folder in ("tools", "include/halfstep", "docs/decisions"):
        (root / folder).mkdir(parents=True)
    for name in ("make_site", "runs.py"):
        shutil.copy(TOOLS / name, root / "tools")
    (root / "include/halfstep/counter.h").write_text(header)
    (root / "README.md").write_text("# It\n\n[More](docs/more.md#to-count), [code](include/halfstep/counter.h).\n" + readme)
    (root / "docs/more.md").write_text(page)
    (root / "docs/decisions/README.md").write_text("# Decisions\n")
    done = subprocess.run([sys.executable, root / "tools/make_site", root / "site"], capture_output=True, text=True)
    return done, root / "site"


@unittest.skipUnless(shutil.which("doxygen"), "needs doxygen: tools/setup installs it")
class MakeSite(unittest.TestCase):
    def assert_fault(self, words, **repository):
        with tempfile.TemporaryDirectory() as scratch:
            done, _ = make(scratch, **repository)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(words, done.stderr)

    def test_pages_and_headers_lead_to_each_other(self):
        with tempfile.TemporaryDirectory() as scratch:
            done, site = make(scratch)
            self.assertEqual(done.returncode, 0, done.stderr)
            start, page, header = [(site / name).read_text() for name in ("index.html", "docs/more.html", "api/counter.html")]
            self.assertIn('href="docs/more.html#to-count"', start)
            self.assertIn('href="api/counter.html"', start)
            self.assertIn('id="to-count"', page)
            self.assertIn('<a href="../api/counter.html#Counter"><code>Counter</code></a>', page)
            self.assertIn('href="../docs/more.html"', header)
            self.assertIn("// so far", header)

    def test_declarations_below_one_comment_share_it(self):
        with tempfile.TemporaryDirectory() as scratch:
            header = (make(scratch)[1] / "api/counter.html").read_text()
        [group] = [part for part in header.split('<div class="member">') if "<b>up</b>" in part]
        self.assertIn("<b>down</b>", group)
        self.assertIn("Counts on, or back.", group)

    def test_what_has_no_comment_is_noticed(self):
        self.assert_fault("Bare has no comment", header=HEADER % "struct Bare {};")
        self.assert_fault("add has no comment", header=HEADER % "int add(int a, int b);")

    def test_what_doxygen_warns_of_is_noticed(self):
        self.assert_fault("unknown command", header=HEADER % "/// A \\strange one.\nstruct Odd {};")

    def test_links_that_lead_nowhere_are_noticed(self):
        self.assert_fault("no such page", readme="[gone](docs/gone.md)\n")
        self.assert_fault("no such heading", readme="[gone](docs/more.md#gone)\n")


if __name__ == "__main__":
    unittest.main()
