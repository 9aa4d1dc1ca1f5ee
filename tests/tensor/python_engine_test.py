"""Halfstep loaded into a Python process leaves Python's autograd engine where it is, its hooks working."""
import ctypes
import sys

import torch

ctypes.CDLL(sys.argv[1])

packed = []


def pack(tensor):
    packed.append(tensor)
    return tensor


x = torch.ones(3, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
    y = (x * x).sum()
y.backward()
assert len(packed) == 2, f"{len(packed)} tensors reached Python's hooks, expected the 2 that x * x saves"
assert torch.equal(x.grad, torch.full((3,), 2.0)), x.grad
