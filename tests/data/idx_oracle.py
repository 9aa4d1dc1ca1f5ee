"""Shape and weighted sum of each IDX file in a folder, by Python's gzip and numpy."""
import gzip
import json
import pathlib
import sys

import numpy as np

answer = {}
for path in sorted(pathlib.Path(json.load(sys.stdin)["folder"]).glob("*-idx*-ubyte.gz")):
    raw = gzip.decompress(path.read_bytes())
    shape = [int.from_bytes(raw[4 + 4 * i:8 + 4 * i], "big") for i in range(raw[3])]
    elements = np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).astype(np.int64)
    weights = np.arange(elements.size) % 10_007 + 1
    answer[path.name] = {"shape": shape, "weighted_sum": int((elements * weights).sum())}
json.dump(answer, sys.stdout)
