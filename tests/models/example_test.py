"""example_test.py PROGRAM: the example prints the loss that transformers computes, on a tiny folder made here."""
import pathlib
import re
import subprocess
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(1)
config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=64)
model = LlamaForCausalLM(config).eval()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    ids = torch.randint(61, (1, 40))
    right = model(input_ids=ids, labels=ids).loss.item()

with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    model.save_pretrained(folder)
    (folder / "ids.txt").write_text(" ".join(map(str, ids[0].tolist())))
    run = lambda *arguments: subprocess.run([sys.argv[1], *map(str, arguments)], text=True, capture_output=True)
    given, drawn, missing = run(folder, folder / "ids.txt"), run(folder), run(folder / "nowhere")

print(given.stdout, given.stderr, f"transformers: {right:.4f}")
losses = {name: float(value) for name, value in re.findall(r"(FP32|BF16): ([0-9.]+)", given.stdout)}
assert given.returncode == 0 and abs(losses["FP32"] - right) <= 1e-4, losses  # four decimals are printed
assert abs(losses["BF16"] - right) <= 2**-7 * right, losses  # a mean of 39 terms, each good to about eps
assert drawn.returncode == 0 and "BF16" in drawn.stdout, drawn.stderr
assert missing.returncode == 2 and "nowhere" in missing.stderr, missing.stderr
