"""What Python's torch.amp launches on the test accelerator in one training step of a small GPT-2.

{"library": the accelerator's} on standard input gives {"forward": N, "backward": N, "step": N, "waits": N} of a
step that is not the first: FP16, loss scaling, clipping, fused AdamW, decay for matrices only.
"""

import ctypes
import json
import os
import sys
import types

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 96, 4, 12, 512, 32


def open_device(library_path):
    library = ctypes.CDLL(library_path)
    torch.ops.load_library(library_path)
    module = types.ModuleType("torch.counting")
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    torch._register_device_module("counting", module)
    return library


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


def main():
    library = open_device(json.load(sys.stdin)["library"])
    torch.manual_seed(0)
    model = Gpt().to("counting")
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("counting", init_scale=64.0)
    ids = torch.randint(VOCABULARY, (2, LENGTH)).to("counting")
    counts = {}

    def count(part):
        counts[part] = library.counting_launches()
        counts["waits"] = counts.get("waits", 0) + library.counting_waits()
        library.counting_reset()

    for _ in range(3):
        optimizer.zero_grad()
        counts.clear()
        library.counting_reset()
        with torch.autocast("counting", dtype=torch.float16):
            loss = model(ids, ids)
        count("forward")
        scaler.scale(loss).backward()
        count("backward")
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        count("step")
    print(json.dumps(counts), flush=True)
    os._exit(0)  # LibTorch's own tables outlive the device's library


main()
