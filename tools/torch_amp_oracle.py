#!/usr/bin/env python3
"""Runs loss-scaling schedules through Python's torch.amp, for scaler_parity to compare with.

Reads one JSON document on stdin and writes one on stdout. Numbers that must survive bit for bit travel as
the integers of their FP32 or FP64 patterns.

{"schedules": [...]}    what torch.amp does with each schedule, step by step
{"differences": true}   what torch.amp does in the situations where Halfstep means to differ
"""
import json
import math
import struct
import sys
import warnings

import torch

warnings.filterwarnings("ignore")
DTYPES = {"float": torch.float32, "double": torch.float64, "bfloat16": torch.bfloat16, "half": torch.float16}


def from_bits(bits):
    """A list of FP64 patterns as numbers; every type that schedules use is exact in FP64."""
    return [struct.unpack("<d", struct.pack("<Q", b))[0] for b in bits]


def to_bits(tensor):
    return [struct.unpack("<Q", struct.pack("<d", v))[0] for v in tensor.detach().double().flatten().tolist()]


def grad_of(description, param):
    if description is None:
        return None
    values = torch.tensor(from_bits(description["values"]), dtype=torch.float64).to(param.dtype)
    if "rows" in description:
        return torch.sparse_coo_tensor([description["rows"]], values, param.shape)
    return values.reshape(param.shape)


class CountingSGD(torch.optim.SGD):
    """torch.amp does not say whether it stepped; this does."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)


def run(schedule):
    options = schedule["options"]
    make_scaler = lambda: torch.amp.GradScaler(
        "cpu",
        init_scale=options["initial"],
        growth_factor=options["growth_factor"],
        backoff_factor=options["backoff_factor"],
        growth_interval=options["growth_interval"],
    )
    scaler = make_scaler()
    optimizers = []
    for o in schedule["optimizers"]:
        params = [
            torch.tensor(from_bits(p["values"]), dtype=torch.float64).to(DTYPES[p["dtype"]]).requires_grad_()
            for p in o["params"]
        ]
        optimizers.append(CountingSGD(params, lr=o["lr"], momentum=o["momentum"], weight_decay=o["weight_decay"]))

    trace = []
    for step in schedule["steps"]:
        if step["restart"]:
            saved = scaler.state_dict()
            scaler = make_scaler()
            scaler.load_state_dict(saved)
        scaler.scale(torch.ones(()))  # torch.amp makes its scale tensor on the first call
        stepped = []
        for optimizer, work in zip(optimizers, step["optimizers"]):
            for param, description in zip(optimizer.param_groups[0]["params"], work["grads"]):
                param.grad = grad_of(description, param)
            before = optimizer.steps
            if work["unscale"]:
                scaler.unscale_(optimizer)
            if work["step"]:
                scaler.step(optimizer)
            stepped.append(optimizer.steps > before)
        scaler.update()
        trace.append({
            "scale": to_bits(torch.tensor(scaler.get_scale(), dtype=torch.float64))[0],
            "tracker": scaler._get_growth_tracker(),
            "stepped": stepped,
            "params": [[to_bits(p) for p in o.param_groups[0]["params"]] for o in optimizers],
        })
    return trace


# ---- the situations where torch.amp is wrong; each returns what it did, as plain JSON ----


def parameter(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).requires_grad_()


def one_step(scaler, optimizer, param, grad):
    scaler.scale(torch.ones(()))
    param.grad = torch.tensor(grad, dtype=param.dtype)
    scaler.step(optimizer)
    scaler.update()


def collapse_after_overflows():
    p = parameter([1.0])
    sgd, scaler = torch.optim.SGD([p], lr=1.0), torch.amp.GradScaler("cpu")
    for _ in range(200):
        one_step(scaler, sgd, p, [math.inf])
    collapsed = scaler.get_scale()
    one_step(scaler, sgd, p, [0.0])  # a clean gradient
    return {"scale": collapsed, "param": repr(p.item())}


def wedged_after_no_gradients():
    p = parameter([1.0])
    sgd, scaler = torch.optim.SGD([p], lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    errors = []
    for grad in (None, torch.ones(1)):
        p.grad = grad
        try:
            scaler.step(sgd)
            scaler.update()
        except Exception as error:
            errors.append(str(error))
    return {"errors": errors}


def fp16_norm_overflow():
    p = parameter([0.0] * 4, torch.float16)
    p.grad = torch.full((4,), 64000.0, dtype=torch.float16)
    norm = torch.nn.utils.clip_grad_norm_([p], 1.0)
    return {"norm": repr(norm.item()), "grad": p.grad.tolist()}


def senseless_options():
    accepted = []
    for name, options in {
        "init_scale nan": {"init_scale": math.nan},
        "init_scale 0": {"init_scale": 0.0},
        "init_scale -1": {"init_scale": -1.0},
        "growth_interval 0": {"growth_interval": 0},
        "growth_factor inf": {"growth_factor": math.inf},
    }.items():
        try:
            torch.amp.GradScaler("cpu", **options)
            accepted.append(name)
        except Exception:
            pass
    return {"accepted": accepted}


def nan_scale_loaded():
    scaler = torch.amp.GradScaler("cpu")
    saved = scaler.state_dict()
    saved["scale"] = math.nan
    scaler.load_state_dict(saved)
    return {"scale": repr(scaler.get_scale())}


def fp16_unscaling():
    scaled = torch.tensor([2.0 ** (16 - e) for e in range(18, 31)], dtype=torch.float16)
    p = parameter([0.0] * 13, torch.float16)
    p.grad = scaled.clone()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    try:
        scaler.unscale_(torch.optim.SGD([p], lr=1.0))
        refused = ""
    except ValueError as error:
        refused = str(error)
    torch._amp_foreach_non_finite_check_and_unscale_([scaled], torch.zeros(()), torch.tensor(2.0**-16))
    return {"refused": refused, "flushed_by_the_primitive": int((scaled == 0).sum())}


def spoiled_after_unscale():
    p = parameter([1.0])
    sgd, scaler = torch.optim.SGD([p], lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    p.grad = torch.ones(1)
    scaler.unscale_(sgd)
    p.grad.div_(0)
    scaler.step(sgd)
    return {"param": repr(p.item())}


def overflow_while_unscaling():
    p = parameter([1.0])
    sgd, scaler = torch.optim.SGD([p], lr=1.0), torch.amp.GradScaler("cpu", init_scale=2.0**-20)
    one_step(scaler, sgd, p, [2.0**120])
    return {"param": repr(p.item())}


def sparse_rows_overflow_when_summed():
    p = parameter([0.0])
    sgd, scaler = torch.optim.SGD([p], lr=1.0), torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    p.grad = torch.sparse_coo_tensor([[0, 0]], [3e38, 3e38], (1,))
    scaler.step(sgd)
    return {"param": repr(p.item())}


def parameter_of_two_optimizers():
    p = parameter([1.0])
    first, second = torch.optim.SGD([p], lr=1.0), torch.optim.SGD([p], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    p.grad = torch.tensor([2.0**14])
    scaler.step(first)
    scaler.step(second)
    return {"param": p.item()}


def growth_beyond_the_cap():
    p = parameter([1.0])
    sgd, scaler = torch.optim.SGD([p], lr=1.0), torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=1)
    for _ in range(20):
        one_step(scaler, sgd, p, [0.0])
    scale = scaler.get_scale()
    torch.set_flush_denormal(True)
    one_step(scaler, sgd, p, [2.0**126])  # a true gradient of 0.5
    torch.set_flush_denormal(False)
    return {"scale_exponent": math.log2(scale), "param_with_flushed_subnormals": p.item()}


DIFFERENCES = [
    collapse_after_overflows,
    wedged_after_no_gradients,
    fp16_norm_overflow,
    senseless_options,
    nan_scale_loaded,
    fp16_unscaling,
    spoiled_after_unscale,
    overflow_while_unscaling,
    sparse_rows_overflow_when_summed,
    parameter_of_two_optimizers,
    growth_beyond_the_cap,
]


def main():
    torch.set_num_threads(1)
    request = json.load(sys.stdin)
    answer = {"torch": torch.__version__}
    if "schedules" in request:
        answer["traces"] = [run(schedule) for schedule in request["schedules"]]
    if "differences" in request:
        answer["differences"] = {f.__name__: f() for f in DIFFERENCES}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
