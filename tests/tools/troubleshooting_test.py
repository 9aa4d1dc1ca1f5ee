"""docs/troubleshooting.md speaks of messages that there are."""
import pathlib
import re
import sysconfig
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
# LibTorch's own: looked up in its library.
OF_LIBTORCH = {"mat1 and mat2 must have the same dtype"}


def joined(text):
    """Source with the seams of string literals closed, and what is put in between left out."""
    return re.sub(r'"\s*\n?\s*"', "", re.sub(r"[ \t\n]+", " ", text))


class Troubleshooting(unittest.TestCase):
    def test_every_message_is_one_of_ours_or_of_libtorchs(self):
        files = [*ROOT.glob("src/**/*.cpp"), *ROOT.glob("src/**/*.h"), *ROOT.glob("cmake/*.cmake"),
                 *ROOT.glob("python/halfstep/*.py")]
        sources = "\n".join(joined(path.read_text()) for path in files)
        messages = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
        self.assertGreater(len(messages), 10)
        for message in messages:
            if message in OF_LIBTORCH:
                library = pathlib.Path(sysconfig.get_path("purelib")) / "torch/lib/libtorch_cpu.so"
                self.assertTrue(message.encode() in library.read_bytes(), message)
            else:
                self.assertTrue(message in sources, message)

    def test_links_lead_somewhere(self):
        for link in re.findall(r"\]\(([^)#:]+)\)", PAGE):
            self.assertTrue((ROOT / "docs" / link).exists(), link)


if __name__ == "__main__":
    unittest.main()
