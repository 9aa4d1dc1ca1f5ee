"""Trains a small GPT-2 by Python's torch.amp with fused AdamW, for tools/check_device. JSON in, JSON out."""

import json
import pathlib
import sys
import time

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, asked):
        super().__init__()
        width = asked["width"]
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(asked["length"], width)
        self.blocks = nn.ModuleList(Block(width, asked["heads"]) for _ in range(asked["layers"]))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.view(-1, 256), targets.view(-1))


def main():
    asked = json.load(sys.stdin)
    device = torch.device(asked["device"])
    low = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[asked["precision"]]
    text = torch.frombuffer(bytearray(pathlib.Path(asked["corpus"]).read_bytes()), dtype=torch.uint8).long()
    torch.manual_seed(0)
    model = Gpt(asked).to(device)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=low is torch.float16)
    losses, seconds, begin = [], 0.0, 0.0
    for step in range(asked["steps"]):
        if step == asked["warm_up"]:
            losses.clear()
            begin = time.perf_counter()
        first = torch.randint(len(text) - asked["length"] - 1, (asked["batch"],))
        rows = torch.stack([text[i : i + asked["length"] + 1] for i in first]).to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=low, enabled=low is not None):
            loss = model(rows[:, :-1], rows[:, 1:].contiguous())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % 10 == 9:
            losses[-1].item()
    last = losses[-1].item()
    seconds = time.perf_counter() - begin
    tokens = (asked["steps"] - asked["warm_up"]) * asked["batch"] * asked["length"]
    print(json.dumps({"tokens_per_second": tokens / seconds, "loss": last}))


main()
