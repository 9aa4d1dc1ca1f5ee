"""The safetensors package as witness: reads files, and writes them.

Question: {"write": [{"path", "metadata", "tensors": [{"name", "type", "shape", "hex"}]}], "read": [path]}.
Answer: for each file read, {"name": {"type", "shape", "sha256", "torch": whether torch has it too}}.
Types go by the format's names.
"""
import ctypes
import hashlib
import json
import sys

import torch
from safetensors import TensorSpec, deserialize, safe_open, serialize_file

# What the package calls each type when it writes one. It reads F6_E2M3 and F6_E3M2, and does not write them.
PACKAGE_NAME = {
    "BOOL": "bool", "F4": "float4_e2m1fn_x2", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64", "F64": "float64", "I64": "int64",
    "U64": "uint64",
}
NOT_IN_TORCH = {"F4", "F6_E2M3", "F6_E3M2"}


def write(file: dict) -> None:
    specs, buffers = {}, []
    for tensor in file["tensors"]:
        data = bytes.fromhex(tensor["hex"])
        buffer = (ctypes.c_char * max(1, len(data))).from_buffer_copy(data or b"\0")
        buffers.append(buffer)  # a spec holds an address only
        shape = list(tensor["shape"])
        if tensor["type"] == "F4":
            shape[-1] //= 2  # the package counts bytes there, and doubles the dimension for the header
        specs[tensor["name"]] = TensorSpec(dtype=PACKAGE_NAME[tensor["type"]], shape=shape,
                                           data_ptr=ctypes.addressof(buffer), data_len=len(data))
    serialize_file(specs, file["path"], file["metadata"] or None)


def read(path: str) -> dict:
    with open(path, "rb") as file:
        tensors = dict(deserialize(file.read()))
    answer = {name: {"type": tensor["dtype"], "shape": tensor["shape"],
                     "sha256": hashlib.sha256(tensor["data"]).hexdigest()} for name, tensor in tensors.items()}
    with safe_open(path, framework="pt") as file:  # as transformers reads
        for name in file.keys():
            in_torch = answer[name]["type"] not in NOT_IN_TORCH
            answer[name]["torch"] = in_torch
            if in_torch:
                tensor = file.get_tensor(name)
                assert list(tensor.shape) == answer[name]["shape"], name
                data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                assert hashlib.sha256(data).hexdigest() == answer[name]["sha256"], name
    return answer


question = json.load(sys.stdin)
for one in question["write"]:
    write(one)
json.dump([read(path) for path in question["read"]], sys.stdout)
