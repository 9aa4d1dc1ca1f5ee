#!/usr/bin/env python3
"""Trains a model with torch.amp, as its users write it: the other side of tools/finetune_compare and tools/peer_bench.

    torch_amp_finetune.py JOB.json

JOB names the model's folder, files of batches (batch_dump) to train on or to evaluate, the settings and where the
results go. Nothing here is slower than it need be: the attention is SDPA, no cache of keys and values is built, AdamW is
the fused one, gradients are set to None, and the loss is the model's own, which widens the logits to FP32 and takes
targets that are already shifted (`shift_labels`). One step's clock runs from the batch to the update.

Its precisions: `bf16`, FP32 weights under torch.autocast; `fp32`; `fp64`; and `bf16_weights`, a model that is BF16 itself, with
FP32 masters in the optimizer and FP32 sums of micro-batches: what Halfstep's BF16 keeps, for the rounding, not for speed.

The model is one of transformers, or with `own_gpt2` the GPT-2 of torch_ddp_gpt.py, which is quicker than that of transformers.
`compile` gives it to torch.compile.
"""
import contextlib
import json
import pathlib
import sys
import time

import torch
import transformers
from safetensors.torch import load_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import torch_ddp_gpt


def lr_factor(step: int, warmup_steps: int, steps: int, final_fraction: float) -> float:
    """The linear schedule of halfstep/schedule.h at a step counted from 0."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return 1 - (1 - final_fraction) * (step - warmup_steps) / (steps - warmup_steps)


def precision_scope(name: str):
    return torch.autocast("cpu", dtype=torch.bfloat16) if name == "bf16" else contextlib.nullcontext()


def loss_of(model, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if isinstance(model, torch_ddp_gpt.Gpt2):
        return model(inputs, targets)
    return model(input_ids=inputs, labels=targets, shift_labels=targets).loss


@torch.no_grad()
def held_out_loss(model, batches: dict, batch_size: int) -> float:
    """In FP32, the mean over the tokens of all batches."""
    model.eval()
    total, tokens = 0.0, 0
    for inputs, targets in zip(batches["inputs"].split(batch_size), batches["targets"].split(batch_size)):
        total += loss_of(model, inputs, targets).item() * targets.numel()
        tokens += targets.numel()
    model.train()
    return total / tokens


class Masters:
    """What the optimizer steps: the model's own parameters, or FP32 copies of a BF16 model's."""

    def __init__(self, model, precision: str):
        self.working = list(model.parameters())
        self.params = self.working
        if precision == "bf16_weights":
            self.params = [p.detach().clone().requires_grad_() for p in self.working]
            model.to(torch.bfloat16)

    def add_grads(self) -> None:
        """After each micro-batch."""
        if self.params is self.working:
            return
        for master, working in zip(self.params, self.working):
            grad = working.grad.float()
            master.grad = grad if master.grad is None else master.grad + grad
            working.grad = None

    def round(self) -> None:
        """After each step."""
        if self.params is self.working:
            return
        with torch.no_grad():
            torch._foreach_copy_(self.working, self.params)


def make_optimizer(parameters: list, job: dict) -> torch.optim.Optimizer:
    """Matrices decay, norms and biases do not."""
    groups = [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": job["weight_decay"]},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=job["lr"],
                             betas=(job["beta1"], job["beta2"]), eps=job["eps"], fused=True)


def train(model, job: dict, batches: dict) -> dict:
    masters = Masters(model, job["precision"])
    optimizer = make_optimizer(masters.params, job)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, job["warmup_steps"], job["schedule_steps"], job["final_fraction"]))
    micro_batches = zip(batches["inputs"].split(job["batch_size"]), batches["targets"].split(job["batch_size"]))
    losses, rates, norms, ends = [], [], [], []
    began = time.perf_counter()
    for _ in range(job["steps"]):
        rates.append(schedule.get_last_lr()[0])
        step_loss = 0.0
        for _ in range(job["accumulation"]):
            inputs, targets = next(micro_batches)
            with precision_scope(job["precision"]):
                loss = loss_of(model, inputs, targets) / job["accumulation"]
            loss.backward()
            masters.add_grads()
            step_loss += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(masters.params, job["clip_norm"]).item())
        optimizer.step()
        masters.round()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(step_loss)
        ends.append(time.perf_counter() - began)
    return {"losses": losses, "rates": rates, "grad_norms": norms, "ends_seconds": ends}


def open_model(job: dict) -> torch.nn.Module:
    if job.get("own_gpt2"):
        model = torch_ddp_gpt.open_model(pathlib.Path(job["model"]))
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
        model.config.use_cache = False
    model.train()
    model.to(torch.float64 if job.get("precision") == "fp64" else torch.float32)
    if job.get("compile"):
        model.compile()
    return model


def main(job: dict) -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(job["threads"])
    model = open_model(job)
    result = {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads(),
              "attention": "sdpa" if job.get("own_gpt2") else model.config._attn_implementation}
    if "held_out" in job:
        result["held_out_loss"] = held_out_loss(model, load_file(job["held_out"]), job["batch_size"])
    if "batches" in job:
        result |= train(model, job, load_file(job["batches"]))
    if "save" in job:
        model.save_pretrained(job["save"])
    pathlib.Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(json.loads(pathlib.Path(sys.argv[1]).read_text()))
