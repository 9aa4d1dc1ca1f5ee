"""Training on prompts and completions and on conversations, beside transformers' own reading of the same files."""
import json
import os
import pathlib
import random
import tempfile
import unittest

import numpy
import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from program import CORPUS, ask, run

LENGTH = 96
HEADER_BYTES = 1024
BEGINS, GIVEN = 1 << 31, 1 << 30
CHAT = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
FIRST = "<|im_start|>assistant\n"  # what CHAT writes before an answer that nothing precedes
WORDS = "the a line of corpus 4 36 é \u4e2d <tag> half-step don't \"quoted\" \\n \t".split(" ")


def text(rng, most):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))


def make_model(folder):
    """A small Llama with a byte-level tokenizer that knows ChatML's marks, as save_pretrained writes them."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe.train_from_iterator([CORPUS], tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", bos_token="<|im_start|>")
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(LlamaConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=1, eos_token_id=2,
        initializer_range=0.2)).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def conversation(rng):
    turns = [{"role": "system", "content": text(rng, 6)}] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 3)):
        turns += [{"role": "user", "content": text(rng, 8)}, {"role": "assistant", "content": text(rng, 8)}]
    if rng.random() < 0.2:
        turns.append({"role": "user", "content": text(rng, 8)})
    return turns


def expected_example(tokenizer, record):
    """Ids, and which of them are learned: independent of Halfstep."""
    encode = lambda piece: tokenizer.encode(piece, add_special_tokens=False)
    if "prompt" in record:
        prompt, answer = encode(record["prompt"]), encode(record["completion"]) + [tokenizer.eos_token_id]
        return prompt + answer, [False] * len(prompt) + [True] * len(answer)
    ids, learned, written = [], [], ""
    turns = record["messages"]
    for place, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        for upto, prompt, learn in [(place, True, False), (place + 1, False, True)]:
            whole = (tokenizer.apply_chat_template(turns[:upto], tokenize=False, add_generation_prompt=prompt)
                     if upto else FIRST)
            assert whole.startswith(written)
            part = encode(whole[len(written):])
            ids, learned, written = ids + part, learned + [learn] * len(part), whole
    return ids, learned


def cut(example):
    ids, learned = example
    return tuple(ids[:LENGTH]), tuple(learned[:LENGTH])


def examples_in(path):
    """Those that a token file holds, without what fills sequences up."""
    words = numpy.fromfile(path, dtype="<u4", offset=HEADER_BYTES)
    found = []
    for word in words:
        if word & BEGINS:
            found.append(([], []))
        found[-1][0].append(int(word & (GIVEN - 1)))
        found[-1][1].append(not word & GIVEN)
    return [(tuple(ids), tuple(learned)) for ids, learned in found if any(learned)], words


def held_out_losses(run_folder):
    lines = [json.loads(line) for line in (run_folder / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line.get("kind") == "evaluation"]


class Instructions(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = pathlib.Path(scratch.name)
        cls.model = cls.folder / "model"
        cls.tokenizer = make_model(cls.model)

    def train(self, records, name, *more):
        data = self.folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        done = run("train", "--set", f"model.from={self.model}", "--set", f"data.train={data}",
                   "--set", f"data.sequence_length={LENGTH}", "--set", "data.batch_size=4", "--set", "train.steps=1",
                   "--folder", str(self.folder / name), *more)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        return self.folder / name, done.stderr

    def check_examples(self, records, name):
        folder, _ = self.train(records, name)
        expected = [cut(expected_example(self.tokenizer, record)) for record in records]
        expected = [example for example in expected if any(example[1][1:])]
        found, words = examples_in(folder / "tokens" / "train.tokens")
        self.assertEqual(sorted(found) == sorted(expected), True, (len(found), len(expected)))
        self.assertEqual((len(words) - 1) % LENGTH, 0)
        self.assertTrue((words[::LENGTH] & BEGINS).all(), "an example stands across the end of a sequence")
        return folder, expected

    def test_conversations_have_the_masks_of_an_independent_reading(self):
        rng = random.Random(1)
        self.check_examples([{"messages": conversation(rng)} for _ in range(600)], "messages")

    def test_conversations_may_begin_with_the_assistant(self):
        rng = random.Random(5)
        self.check_examples([{"messages": [{"role": "assistant", "content": text(rng, 6)}, *conversation(rng)]}
                             for _ in range(20)], "greetings")

    def test_completions_have_them_too(self):
        rng = random.Random(2)
        self.check_examples([{"prompt": text(rng, 20), "completion": text(rng, 20)} for _ in range(400)], "prompts")

    def test_a_packed_batch_has_the_loss_of_its_texts_alone(self):
        rng = random.Random(3)
        records = [{"messages": conversation(rng)} for _ in range(12)]
        held = self.folder / "held.jsonl"
        held.write_text("".join(json.dumps(record) + "\n" for record in records))
        folder, _ = self.train(records, "packed", "--set", f"data.validation={held}", "--set", "train.evaluate_every=1")
        before = held_out_losses(folder)[0]
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float64).eval()
        nats, count = 0.0, 0
        for record in records:
            ids, learned = cut(expected_example(self.tokenizer, record))
            labels = [token if learn else -100 for token, learn in zip(ids, learned)]
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, :-1]
            nats += torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum").item()
            count += sum(label != -100 for label in labels[1:])
        # FP32 against FP64: logits below 16 with some hundred roundings of 2^-24 each.
        self.assertAlmostEqual(before, nats / count, delta=16 * 300 * 2**-24)

    def test_what_is_said_of_them(self):
        _, screen = self.train([{"prompt": "a", "completion": "b"}] * 7, "told")
        self.assertIn("7 examples in 1 sequence", screen)

    def test_what_is_cut_and_left_out_is_said_of_held_out_examples_too(self):
        held = self.folder / "held_long.jsonl"
        held.write_text("".join(json.dumps({"prompt": "q " * prompt, "completion": "a " * answer}) + "\n"
                                for prompt, answer in [(1, 1), (1, 200), (200, 1)]))
        _, screen = self.train([{"prompt": "a", "completion": "b"}], "told_held", "--set", f"data.validation={held}")
        self.assertIn("held out (2 examples in 2 sequences", screen)
        self.assertIn("1 cut, 1 left out: too long a prompt)", screen)

    def test_bits_per_byte_leave_out_the_first_token_of_each_text(self):
        texts = [" the line", "corpus of <tag>", "\u4e2d"]
        data = self.folder / "texts.jsonl"
        data.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
        ids = [self.tokenizer.encode(one, add_special_tokens=False) for one in texts]
        first = [len(self.tokenizer.convert_ids_to_tokens(one[0])) for one in ids]  # one character stands for a byte
        found = ask("evaluate", str(self.model), str(data))
        self.assertEqual(found["bytes"], sum(len(one.encode()) for one in texts) - sum(first))
        self.assertEqual(found["tokens"], sum(len(one) - 1 for one in ids))

    def test_the_first_bad_line_is_named_before_training(self):
        data = self.folder / "bad.jsonl"
        data.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
        done = run("train", "--set", f"model.from={self.model}", "--set", f"data.train={data}", "--set",
                   f"data.sequence_length={LENGTH}", "--folder", str(self.folder / "bad"))
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("bad.jsonl, line 2", done.stderr)

    def test_a_question_is_put_as_transformers_puts_it(self):
        rng = random.Random(4)
        for _ in range(3):
            said = text(rng, 12)
            turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": said}]
            whole = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            found = ask("generate", str(self.model), "--chat", "--system", "Be brief.", "--prompt", said, "--tokens", "4",
                        "--temperature", "0")
            self.assertEqual(found["prompt"], whole)
            self.assertEqual(found["prompt_ids"], self.tokenizer.encode(whole, add_special_tokens=False))


@unittest.skipUnless(os.environ.get("HALFSTEP_SMOLLM2"), "HALFSTEP_SMOLLM2 names no folder that tools/get_smollm2.py made")
class SmolLM2(unittest.TestCase):
    """Minutes: by hand, HALFSTEP_SMOLLM2=SmolLM2-135M ctest -R cli_instruction_test."""

    def test_it_learns_to_answer_from_a_few_examples(self):
        rng = random.Random(7)
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch)
            records = []
            for _ in range(200):
                a, b = rng.randint(2, 99), rng.randint(2, 99)
                records.append({"messages": [
                    {"role": "user", "content": f"What is half of {2 * a} plus {b}?"},
                    {"role": "assistant", "content": f"Half of {2 * a} is {a}. Plus {b}, that makes {a + b}."}]})
            (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
            done = run("train", "--set", f"model.from={os.environ['HALFSTEP_SMOLLM2']}", "--set",
                       f"data.train={folder / 'data.jsonl'}", "--set", "data.validation_fraction=0.1", "--set",
                       "data.sequence_length=128", "--set", "data.batch_size=2", "--set", "precision.compute=bf16", "--set",
                       "optimizer.lr=1e-4", "--set", "train.steps=30", "--set", "train.evaluate_every=30", "--folder",
                       str(folder / "run"))
            self.assertEqual(done.returncode, 0, done.stderr[-2000:])
            held = held_out_losses(folder / "run")
            print("held-out loss of the answers:", held)
            self.assertLess(held[-1], held[0] / 2)


if __name__ == "__main__":
    unittest.main()
