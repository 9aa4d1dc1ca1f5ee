"""finetune_compare_test.py PROGRAM: a tiny Llama is fine-tuned by `halfstep train` and by torch.amp with the same curve,
and a curve that differs is noticed. Nothing is timed."""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "finetune_compare"
PROGRAM = sys.argv.pop()


def make_model(folder):
    """A token for each byte, and random weights that are worth fine-tuning."""
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                         tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def compare(folder):
    settings = {"train.steps": 12, "optimizer.lr": 1e-3, "data.sequence_length": 64, "train.evaluate_batches": 8,
                "train.evaluate_every": 12, "train.sample_every": 0,
                "data.train": "/usr/share/doc/python3.11/html/_sources/tutorial"}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run([sys.executable, TOOL, "--json", "--program", PROGRAM, "--model", folder / "model",
                           "--folder", folder / "runs", "--rounds", "0", *sets], capture_output=True, text=True)
    if not done.stdout:
        raise AssertionError(done.stderr)
    return done.returncode, json.loads(done.stdout)


class FinetuneCompare(unittest.TestCase):
    def test_the_same_run_passes_and_another_one_does_not(self):
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch)
            make_model(folder / "model")
            code, right = compare(folder)
            print({name: value for name, value in right["curves"].items() if isinstance(value, float)})
            self.assertEqual(code, 0, right)
            self.assertLess(right["held_out"]["halfstep"], right["held_out"]["before"])

            # As if Halfstep had seen other batches, at other rates.
            log = folder / "runs/halfstep/log.jsonl"
            records = [json.loads(line) for line in log.read_text().splitlines()]
            steps = [record for record in records if record["kind"] == "step"]
            steps[2]["loss"], steps[7]["loss"] = steps[7]["loss"], steps[2]["loss"]
            steps[4]["lr"] *= 1.001
            log.write_text("".join(json.dumps(record) + "\n" for record in records))
            code, wrong = compare(folder)
            self.assertEqual(code, 1)
            self.assertGreater(wrong["curves"]["largest_difference"], 10 * wrong["curves"]["bound"])
            self.assertFalse(wrong["curves"]["rates_equal"])


if __name__ == "__main__":
    unittest.main()
