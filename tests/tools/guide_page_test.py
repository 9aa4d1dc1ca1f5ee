"""Every C++ block of docs/guide.md is text of a file that CI compiles and runs, line by line."""
import pathlib
import re
import textwrap
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/guide.md").read_text()
SOURCES = {path.name: path.read_text().splitlines() for path in sorted((ROOT / "tests/guide").glob("*.*"))
           if path.suffix in (".cpp", ".h")}


def source_of(block):
    """The file that has these lines one after another, further in or not."""
    count = len(block.splitlines())
    for name, lines in SOURCES.items():
        for first in range(len(lines) - count + 1):
            if textwrap.dedent("\n".join(lines[first:first + count])) == block:
                return name
    return None


class GuidePage(unittest.TestCase):
    def test_every_block_is_compiled(self):
        blocks = re.findall(r"```(\w*)\n(.*?)\n```", PAGE, re.DOTALL)
        self.assertGreater(len(blocks), 15)
        for language, block in blocks:
            self.assertEqual(language, "cpp")
            self.assertIsNotNone(source_of(block), "\n" + block)

    def test_a_changed_line_is_noticed(self):
        block = re.search(r"```cpp\n(.*?)\n```", PAGE, re.DOTALL).group(1)
        self.assertEqual(source_of(block), "classifier.h")
        self.assertIsNone(source_of(block.replace("64", "65")))
        self.assertIsNone(source_of(block + "\n// more"))

    def test_every_section_shows_code_and_what_goes_wrong(self):
        sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
        self.assertEqual(len(sections), 14)
        for section in sections:
            self.assertIn("```cpp", section)
            self.assertTrue(section.startswith("An ordinary program") or "**Easy to get wrong**" in section,
                            section.splitlines()[0])

    def test_every_section_is_linked_at_the_top(self):
        for title in re.findall(r"^## (.+)$", PAGE, re.MULTILINE):
            self.assertIn(f"(#{title.lower().replace(' ', '-')})", PAGE)


if __name__ == "__main__":
    unittest.main()
