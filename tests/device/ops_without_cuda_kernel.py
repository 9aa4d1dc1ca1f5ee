"""The operations of this LibTorch that have a CPU kernel, none for CUDA, and none composed of others."""
import json
import pathlib
import sys

import torchgen
import yaml

json.load(sys.stdin)
path = pathlib.Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
names = []
for function in yaml.safe_load(path.read_text()):
    keys = {key.strip() for keys in function.get("dispatch") or {} for key in keys.split(",")}
    composite = any(key.startswith("Composite") for key in keys)
    if "CPU" in keys and "CUDA" not in keys and not composite and not function.get("structured_delegate"):
        names.append("aten::" + function["func"].split("(")[0])
json.dump(names, sys.stdout)
