"""`halfstep evaluate`, beside transformers on the same tokens."""
import json
import math
import pathlib
import shutil
import tempfile
import unittest

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from program import ask, run, tiny_run

LENGTH = 16


def losses_of(model, ids):
    """Sum and count over stretches of LENGTH tokens, predicted within their stretch."""
    total, count = 0.0, 0
    with torch.no_grad():
        for at in range(0, len(ids) - 1, LENGTH):
            inputs, targets = ids[at:at + LENGTH], ids[at + 1:at + LENGTH + 1]
            logits = model(torch.tensor([inputs[:len(targets)]])).logits[0].double()
            total += torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="sum").item()
            count += len(targets)
    return total, count


class Evaluate(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = pathlib.Path(scratch.name)
        cls.corpus, config = tiny_run(cls.folder, "steps = 30\n")
        done = run("train", str(config), "--folder", str(cls.folder / "run"))
        assert done.returncode == 0, done.stderr
        (cls.folder / "other.txt").write_text("Something else: 3.14159, and a few words of English.\n")

    def test_the_loss_is_that_of_transformers(self):
        torch.manual_seed(3)
        llama = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64))
        llama.save_pretrained(self.folder / "llama")
        for folder in (self.folder / "run", self.folder / "llama"):
            model = AutoModelForCausalLM.from_pretrained(folder / "model" if folder.name == "run" else folder,
                                                         dtype=torch.float32).eval()
            found = ask("evaluate", str(folder), str(self.corpus), str(self.folder / "other.txt"), "--sequence-length",
                        str(LENGTH))
            total, count = 0.0, 0
            for path in (self.corpus, self.folder / "other.txt"):
                nats, tokens = losses_of(model, list(path.read_bytes()))
                file = found["files"][str(path)]
                self.assertEqual(file["tokens"], tokens)
                self.assertAlmostEqual(file["loss"], nats / tokens, delta=1e-4)
                self.assertAlmostEqual(file["bits_per_byte"], nats / math.log(2) / (path.stat().st_size - 1), delta=2e-4)
                total, count = total + nats, count + tokens
            self.assertAlmostEqual(found["loss"], total / count, delta=1e-4)
            self.assertAlmostEqual(found["perplexity"], math.exp(total / count), delta=1e-3 * found["perplexity"])

    def test_bits_per_byte_are_of_the_bytes_that_are_predicted(self):
        texts = ["ab", "cde", "f", "", "ghijklm"]  # bytes are tokens here: the first of each is not predicted
        path = self.folder / "short.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        model = AutoModelForCausalLM.from_pretrained(self.folder / "run/model", dtype=torch.float32).eval()
        nats, bytes_ = 0.0, 0
        for text in texts:
            if len(text) > 1:
                more, count = losses_of(model, list(text.encode()))
                nats, bytes_ = nats + more, bytes_ + count
        found = ask("evaluate", str(self.folder / "run"), str(path))
        self.assertEqual((found["bytes"], found["tokens"]), (bytes_, bytes_))
        self.assertAlmostEqual(found["bits_per_byte"], nats / math.log(2) / bytes_, delta=2e-4)

    def test_precisions_differ_a_little(self):
        exact = ask("evaluate", str(self.folder / "run"), str(self.corpus))["loss"]
        for precision in ("bf16", "mxfp8"):
            low = ask("evaluate", str(self.folder / "run"), str(self.corpus), "--precision", precision)["loss"]
            self.assertNotEqual(low, exact)
            self.assertAlmostEqual(low, exact, delta=0.02 * exact)

    def test_what_cannot_be_evaluated_is_named(self):
        binary = self.folder / "photo.png"
        binary.write_bytes(b"\x89PNG\0")
        examples, other = self.folder / "examples.jsonl", self.folder / "other.jsonl"
        examples.write_text('{"prompt": "a", "completion": "b"}\n')
        other.write_text('{"body": "a"}\n')
        stopped = self.folder / "stopped"
        shutil.copytree(self.folder / "run", stopped, ignore=shutil.ignore_patterns("model"))
        for arguments, code, words in [
                ([str(self.folder / "run"), str(binary)], 3, "is not text: its byte 4 is 0"),
                ([str(self.folder / "run"), "no-such-file"], 3, "no-such-file"),
                ([str(self.folder), str(self.corpus)], 3, "config.json"),
                ([str(stopped), str(self.corpus)], 3, "this run has no model yet"),
                ([str(self.folder / "run"), str(examples)], 3, "jq -c '{text: (.prompt + .completion)}'"),
                ([str(self.folder / "run"), str(other)], 3, "jq -c '{text: .NAME}'"),
                ([str(self.folder / "run"), str(self.corpus), "--sequence-length", "0"], 2,
                 "0 is not a whole number of 1 or more."),
                ([str(self.folder / "run"), str(self.corpus), "--precision", "bf17"], 2, "mxfp8"),
                ([str(self.folder / "run"), str(self.corpus), "--sequence-length", "9999"], 2, "was made for")]:
            with self.subTest(arguments):
                done = run("evaluate", *arguments)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(words, done.stderr)

    def test_people_read_a_table(self):
        done = run("evaluate", str(self.folder / "run"), str(self.folder))
        self.assertEqual(done.returncode, 3)  # the folder has a run's files in it, which are no text
        done = run("evaluate", str(self.folder / "run"), str(self.corpus), str(self.folder / "other.txt"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([line.split()[-1] for line in done.stdout.splitlines()],
                         ["tokens", str(self.corpus), str(self.folder / "other.txt"), "all"])


if __name__ == "__main__":
    unittest.main()
