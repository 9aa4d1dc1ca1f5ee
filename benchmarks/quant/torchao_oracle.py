"""Codes and scales as torchao makes them on a CPU. JSON in, JSON out.

{"values": FILE, "rows": R, "columns": C, "out": FOLDER} -> {"torchao": VERSION, "recipes": [NAME, ...]}; for each NAME
FOLDER has NAME.codes (a byte each, E2M1 unpacked) and NAME.scales (FP32, or bytes for MX and NVFP4).
"""

import json
import logging
import pathlib
import sys
import warnings

import torch

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
import torchao  # noqa: E402
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated  # noqa: E402
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx  # noqa: E402
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale  # noqa: E402


def tensorwise(x, dtype):
    scale = amax_to_scale(x.abs().max(), dtype)
    return to_fp8_saturated(x * scale, dtype).view(torch.uint8), (1 / scale).reshape(1)


def rowwise(x, dtype):
    scale = amax_to_scale(x.abs().amax(1, keepdim=True), dtype, round_scales_to_power_of_2=True)
    return to_fp8_saturated(x * scale, dtype).view(torch.uint8), (1 / scale).reshape(-1)


def mx(x, mode):
    scales, codes = to_mx(x, torch.float8_e4m3fn, 32, mode)
    return codes.view(torch.uint8), scales.view(torch.uint8)


def nvfp4(x):
    scales, packed = nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().max()))
    codes = torch.stack((packed & 15, packed >> 4), -1).reshape(x.shape)
    return codes, scales.view(torch.uint8)


def main():
    asked = json.load(sys.stdin)
    x = torch.from_file(asked["values"], size=asked["rows"] * asked["columns"]).reshape(asked["rows"], -1)
    made = {"tensor_e4m3": tensorwise(x, torch.float8_e4m3fn), "tensor_e5m2": tensorwise(x, torch.float8_e5m2),
            "rowwise": rowwise(x, torch.float8_e4m3fn), "mx_floor": mx(x, ScaleCalculationMode.FLOOR),
            "mx_ceil": mx(x, ScaleCalculationMode.RCEIL), "nvfp4": nvfp4(x)}
    folder = pathlib.Path(asked["out"])
    for name, (codes, scales) in made.items():
        (folder / f"{name}.codes").write_bytes(codes.contiguous().numpy().tobytes())
        (folder / f"{name}.scales").write_bytes(scales.contiguous().numpy().tobytes())
    json.dump({"torchao": torchao.__version__, "recipes": list(made)}, sys.stdout)


main()
