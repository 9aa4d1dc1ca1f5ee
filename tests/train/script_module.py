#!/usr/bin/env python3
"""Makes a TorchScript module and trains it by torch.amp, for script_module_test.cpp to compare with.

{"file": where the module is written, "type": "bfloat16" or "half", "steps": n, "samples": k}
-> {"losses": of each step,
    "spread": largest change of each loss when every weight is rounded once more before each forward: multiplied by
              1 + e, e uniform within the type's rounding unit; over k samples}
"""
import json
import sys

import torch

BATCH, WIDTH, CLASSES = 32, 20, 10
UNIT = {"bfloat16": 2.0**-8, "half": 2.0**-11}


def module():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 64), torch.nn.BatchNorm1d(64), torch.nn.GELU(), torch.nn.Linear(64, 64),
        torch.nn.LayerNorm(64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES))


class Remembers(torch.nn.Module):
    """Assigns new tensors to its buffers, as TorchScript modules may."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, CLASSES)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.mean()
        self.calls = self.calls + 1
        return self.linear(x)


def batch(step):
    torch.manual_seed(100 + step % 4)
    return torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))


def train(name, steps, sample):
    model, low = module(), getattr(torch, name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=name == "half")
    random = torch.Generator().manual_seed(sample)
    losses = []
    for step in range(steps):
        x, target = batch(step)
        kept = [p.detach().clone() for p in model.parameters()]
        if sample:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 + (2 * torch.rand(p.shape, generator=random) - 1) * UNIT[name])
        with torch.autocast("cpu", dtype=low):
            loss = torch.nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        with torch.no_grad():
            for p, values in zip(model.parameters(), kept):
                p.copy_(values)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


request = json.load(sys.stdin)
torch.set_num_threads(1)
torch.jit.script(Remembers() if request.get("remembers") else module()).save(request["file"])
losses = train(request["type"], request["steps"], 0)
spread = [0.0] * len(losses)
for sample in range(1, request["samples"] + 1):
    for i, loss in enumerate(train(request["type"], request["steps"], sample)):
        spread[i] = max(spread[i], abs(loss - losses[i]))
json.dump({"losses": losses, "spread": spread}, sys.stdout)
