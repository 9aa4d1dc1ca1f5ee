#!/usr/bin/env python3
"""Trains a GPT-2 by Python's torch with DDP or FSDP2 on Gloo: the other side of tools/ddp_bench.

    python -m torch.distributed.run --standalone --nproc-per-node N torch_ddp_gpt.py JOB.json

JOB names a Hugging Face folder of a GPT-2, a file of batches (batch_dump), the settings, the kind of parallelism and where
rank 0 writes its results. Written as in torch's tutorials, and not slower than necessary: SDPA, nn.Linear instead of GPT-2's
transposed layers, fused AdamW, gradients set to None, all batches in memory. Losses are averaged over the ranks after the last
step, outside of the clock.

ddp    FP32 weights under torch.autocast, gradients reduced in FP32 in views of DDP's own buckets
fsdp2  fully_shard of each block and of the whole, FP32 shards, BF16 weights gathered, gradients reduced in FP32

With the precision fp32 nothing is rounded to BF16. fp64 computes all in FP64, for ddp only.
"""
import contextlib
import json
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        width, eps = config["n_embd"], config["layer_norm_epsilon"]
        self.heads = config["n_head"]
        self.ln_1, self.ln_2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.c_attn, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_proj(functional.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        self.wte = nn.Embedding(config["vocab_size"], config["n_embd"])
        self.wpe = nn.Embedding(config["n_positions"], config["n_embd"])
        self.h = nn.ModuleList(Block(config) for _ in range(config["n_layer"]))
        self.ln_f = nn.LayerNorm(config["n_embd"], config["layer_norm_epsilon"])

    def forward(self, inputs, targets):
        x = self.wte(inputs) + self.wpe.weight[:inputs.shape[1]]
        for block in self.h:
            x = block(x)
        logits = functional.linear(self.ln_f(x), self.wte.weight)
        # Autocast widens them by itself; a BF16 model under FSDP2 would have a BF16 loss.
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def open_model(folder: pathlib.Path) -> Gpt2:
    model = Gpt2(json.loads((folder / "config.json").read_text()))
    values = {}
    for name, value in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("transformer.").replace("attn.c_proj", "attn_proj").replace("mlp.c_proj", "mlp_proj")
        name = name.replace("attn.c_attn", "c_attn").replace("mlp.c_fc", "c_fc")
        # The files of GPT-2 have the matrices of its linear layers as [in, out].
        is_linear = name.startswith("h.") and value.dim() == 2
        values[name] = value.t().contiguous() if is_linear else value
    model.load_state_dict(values)
    return model


def parallel(model: Gpt2, job: dict) -> nn.Module:
    if job["parallel"] == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    low = torch.bfloat16 if job["precision"] == "bf16" else None
    options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
               "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)}
    for block in model.h:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def make_optimizer(parameters: list, job: dict) -> torch.optim.Optimizer:
    """Matrices decay, norms and biases do not."""
    groups = [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": job["weight_decay"]},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=job["lr"], betas=(job["beta1"], job["beta2"]), eps=job["eps"], fused=True)


def train(model: nn.Module, job: dict, batches: dict) -> dict:
    rank, size = dist.get_rank(), dist.get_world_size()
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters, job)
    rows = job["batch_size"] // size
    autocasts = job["parallel"] == "ddp" and job["precision"] == "bf16"
    losses, norms, ends = [], [], []
    dist.barrier()
    began = time.perf_counter()
    for step in range(job["steps"]):
        mine = slice(step * job["batch_size"] + rank * rows, step * job["batch_size"] + (rank + 1) * rows)
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocasts else contextlib.nullcontext():
            loss = model(batches["inputs"][mine], batches["targets"][mine])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, job["clip_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        ends.append(time.perf_counter() - began)
        norms.append(norm)
    means = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(means)
    # FSDP2's norms are DTensors, whole on every rank.
    norms = [(norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item() for norm in norms]
    return {"losses": (means / size).tolist(), "grad_norms": norms, "ends_seconds": ends}


def main(job: dict) -> None:
    torch.set_num_threads(job["threads"])
    dist.init_process_group("gloo")
    model = open_model(pathlib.Path(job["model"])).to(torch.float64 if job["precision"] == "fp64" else torch.float32)
    result = {"torch": torch.__version__, "parameters": sum(p.numel() for p in model.parameters()),
              "ranks": dist.get_world_size(), "threads": torch.get_num_threads()}
    result |= train(parallel(model, job), job, load_file(job["batches"]))
    if dist.get_rank() == 0:
        pathlib.Path(job["result"]).write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(json.loads(pathlib.Path(sys.argv[1]).read_text()))
