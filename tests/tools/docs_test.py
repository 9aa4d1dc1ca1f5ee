"""What the pages link to and name exists, and the commands they show are run, or say why not."""
import importlib.machinery
import importlib.util
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/**/*.md"))
HEADERS = "\n".join(path.read_text() for path in sorted(ROOT.glob("include/halfstep/*.h")))
WORDS_OF_HEADERS = set(re.findall(r"\w+", re.sub(r"//.*", "", HEADERS)))

# Pages whose commands a reader types; README.md and CONTRIBUTING.md are carried out by tools/first_minutes.
TYPED = [ROOT / "docs" / name for name in ("training.md", "guide.md", "from-torch-amp.md", "install.md")]
# What the examples of our pages call their objects.
OBJECTS = "mp|step|trainer|scaler|optimizer|report|grads|precision|recipe|summary|folder|tokenizer|batches"
# Named by the pages that say that they are no more.
REMOVED_HEADERS = {"halfstep/report.h"}
FOLDERS = "benchmarks|cmake|docs|examples|include|src|tests|tools"

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def first_minutes():
    loader = importlib.machinery.SourceFileLoader("first_minutes", str(ROOT / "tools/first_minutes"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("first_minutes", loader))
    loader.exec_module(module)
    return module


def without_code(text):
    return INLINE.sub("`code`", FENCED.sub("", text))


def code_of(text):
    """Fenced and inline code; indented lines are fenced code of an older style."""
    fenced = [block for _, block in FENCED.findall(text)]
    return "\n".join(fenced + INLINE.findall(FENCED.sub("", text)) + re.findall(r"^    .+$", text, re.MULTILINE))


def anchors_of(text):
    """As GitHub makes them of headings: small letters, without punctuation, and a number behind the second of a kind."""
    seen, anchors = {}, set()
    for heading in re.findall(r"^#{1,6} +(.+)$", FENCED.sub("", text), re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        count = seen.get(anchor, 0)
        seen[anchor] = count + 1
        anchors.add(anchor if count == 0 else f"{anchor}-{count}")
    return anchors


def link_fault(page, link):
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return "no such file"
    if anchor and (target.suffix != ".md" or anchor not in anchors_of(target.read_text())):
        return "no such heading"
    return None


class Docs(unittest.TestCase):
    def assert_none(self, faults):
        self.assertFalse(faults, "\n" + "\n".join(faults))

    def test_anchors_are_those_of_github(self):
        self.assertEqual(anchors_of("# What `a_b()` does, and not\n## One\n```sh\n# none\n```\n## One\n"),
                         {"what-a_b-does-and-not", "one", "one-1"})

    def test_links_lead_somewhere(self):
        faults = []
        for page in PAGES:
            for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
                if not re.match(r"[a-z]+:", link) and (fault := link_fault(page, link)):
                    faults.append(f"{page.relative_to(ROOT)}: {link}: {fault}")
        self.assert_none(faults)

    def test_a_link_that_leads_nowhere_is_noticed(self):
        self.assertEqual(link_fault(ROOT / "README.md", "docs/nothing.md"), "no such file")
        self.assertEqual(link_fault(ROOT / "README.md", "docs/memory.md#nothing"), "no such heading")

    def test_files_that_are_named_exist(self):
        faults = []
        for page in PAGES:
            for name in re.findall(rf"(?<![\w/.~-])(?:{FOLDERS})/[\w./-]*\w", page.read_text()):
                if not (ROOT / name).exists():
                    faults.append(f"{page.relative_to(ROOT)}: {name}")
        self.assert_none(faults)

    def test_headers_that_are_named_exist(self):
        faults = [f"{page.relative_to(ROOT)}: {name}" for page in PAGES
                  for name in re.findall(r"(?<![\w/])halfstep/\w+\.h\b", page.read_text())
                  if name not in REMOVED_HEADERS and not (ROOT / "include" / name).exists()]
        self.assert_none(faults)

    def test_names_of_the_library_are_in_its_headers(self):
        faults = []
        for page in PAGES:
            code = code_of(page.read_text())
            names = re.findall(r"\bhalfstep((?:::\w+)+)", code)
            words = {word for name in names for word in name.split("::") if word}
            words |= set(re.findall(rf"(?<![\w.>])(?:{OBJECTS})(?:\.|->)(\w+)\(", code))
            faults += [f"{page.relative_to(ROOT)}: {word}" for word in sorted(words - WORDS_OF_HEADERS)]
        self.assert_none(faults)

    def test_commands_are_run_or_say_why_not(self):
        tool = first_minutes()
        run = {command.text for page, title in tool.SECTIONS.items()
               for command in tool.commands_of((ROOT / page).read_text(), title)}
        self.assertGreater(len(run), 15)
        faults = []
        for page in TYPED:
            if not page.exists():
                continue
            for command in tool.commands_of("## All\n" + re.sub(r"^## ", "### ", page.read_text(), flags=re.MULTILINE), "All"):
                if command.text not in run and not command.not_run:
                    faults.append(f"{page.relative_to(ROOT)}: {command.text}: neither carried out by tools/first_minutes nor "
                                  "marked '# not in CI: why'")
        self.assert_none(faults)


if __name__ == "__main__":
    unittest.main()
