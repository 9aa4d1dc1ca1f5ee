"""`halfstep tokenize` against the package `tokenizers` and numpy."""
import pathlib
import random
import subprocess
import tempfile
import unittest

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from program import PROGRAM, ask, run


def train(texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


class Tokenize(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.temporary.cleanup)
        cls.folder = pathlib.Path(cls.temporary.name)
        draw = random.Random(3)
        words = ["the", "don't", " ", "\n", "  ", "x" * 50, "é", "漢字", "12", "<|endoftext|>", "👍", "\r\n"]
        # Longer than the parts in which the command reads, so that words are cut at their edges.
        cls.text = "".join(draw.choice(words) + draw.choice(["", " "]) for _ in range(500_000))
        assert len(cls.text.encode()) > 3 << 20
        cls.tokenizer = train([cls.text[:100_000]])
        cls.tokenizer.save(str(cls.folder / "tokenizer.json"))
        (cls.folder / "a.txt").write_bytes(cls.text.encode())
        (cls.folder / "b.txt").write_bytes(b"the end")
        cls.ids = cls.tokenizer.encode(cls.text, add_special_tokens=False).ids

    def tokenize(self, *arguments, tokenizer=None):
        return ask("tokenize", "--tokenizer", str(tokenizer or self.folder / "tokenizer.json"),
                   "--out", str(self.folder / "out.bin"), *map(str, arguments))

    def test_ids_in_parts_are_those_of_the_whole_text(self):
        told = self.tokenize(self.folder / "a.txt")
        self.assertEqual(np.fromfile(self.folder / "out.bin", np.uint16).tolist(), self.ids)
        self.assertEqual((told["tokens"], told["bytes"], told["format"]), (len(self.ids), len(self.text.encode()), "raw16"))

    def test_standard_input_and_a_folder_as_tokenizer(self):
        done = subprocess.run([PROGRAM, "tokenize", "--tokenizer", str(self.folder), "--out", str(self.folder / "in.bin"), "-"],
                              input=self.text.encode(), capture_output=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(np.fromfile(self.folder / "in.bin", np.uint16).tolist(), self.ids)

    def test_llmc_has_its_header_and_documents_their_end(self):
        self.tokenize("--format", "llmc", "--end-token", "<|endoftext|>", self.folder / "b.txt", self.folder / "b.txt")
        raw = (self.folder / "out.bin").read_bytes()
        once = self.tokenizer.encode("the end").ids + [self.tokenizer.token_to_id("<|endoftext|>")]
        header = np.frombuffer(raw[:1024], np.int32)
        self.assertEqual(header[:3].tolist(), [20240520, 1, 2 * len(once)])
        self.assertFalse(header[3:].any())
        self.assertEqual(np.frombuffer(raw[1024:], np.uint16).tolist(), 2 * once)

    def test_bytes_are_their_own_ids(self):
        self.tokenize(self.folder / "b.txt", tokenizer="bytes")
        self.assertEqual(np.fromfile(self.folder / "out.bin", np.uint16).tolist(), list(b"the end"))

    def test_what_goes_wrong_is_told_with_the_name_and_leaves_no_file(self):
        out = self.folder / "none.bin"
        base = ("tokenize", "--tokenizer", str(self.folder / "tokenizer.json"), "--out", str(out))
        for arguments, word in [((*base, "/nowhere.txt"), "/nowhere.txt"), ((*base, str(self.folder)), "folder"),
                                ((*base, "--end-token", "<no>", str(self.folder / "b.txt")), "<no>"),
                                (("tokenize", "--tokenizer", "/nowhere.json", "--out", str(out), "-"), "/nowhere.json"),
                                (("tokenize", "--tokenizer", "bytes", "--out", "/nowhere/x.bin", str(self.folder / "b.txt")), "ENOENT")]:
            done = run(*arguments)
            self.assertEqual(done.returncode, 3, arguments)
            self.assertIn(word, done.stderr)
            self.assertFalse(out.exists())
            self.assertFalse((self.folder / "none.bin.aside").exists())


if __name__ == "__main__":
    unittest.main()
