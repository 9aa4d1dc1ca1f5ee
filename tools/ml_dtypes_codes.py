#!/usr/bin/env python3
"""Casts FP32 with ml_dtypes (FP16: numpy) for benchmarks/cast_sweep: ranges in on stdin, codes out on stdout.

Says its versions in one line. Then for each line "first stride count" of FP32 bit patterns it answers, for each
format in turn: the codes without saturation; a byte that is 0 when clamping to the format's max changes no input,
else 1 followed by the codes of the clamped inputs.
"""
import sys

import ml_dtypes
import numpy as np

# In the order of kSweptFormats in benchmarks/cast_sweep/sweep.h.
FORMATS = [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
           ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz]


def main() -> None:
    # Overflow and NaN are what is being looked at, and no cause for a warning.
    np.seterr(all="ignore")
    out = sys.stdout.buffer
    out.write(f"ml_dtypes {ml_dtypes.__version__}, numpy {np.__version__}\n".encode())
    out.flush()
    limits = [np.float32(ml_dtypes.finfo(dtype).max) for dtype in FORMATS]
    for line in sys.stdin:
        first, stride, count = map(int, line.split())
        bits = np.arange(count, dtype=np.uint32) * np.uint32(stride) + np.uint32(first)
        values = bits.view(np.float32)
        magnitudes = np.abs(values)
        for dtype, limit in zip(FORMATS, limits):
            out.write(values.astype(dtype).view(np.uint8))
            beyond = magnitudes > limit  # false for NaN, which clamping must leave alone
            if not beyond.any():
                out.write(b"\0")
                continue
            clamped = np.where(beyond, np.copysign(limit, values), values)
            out.write(b"\1")
            out.write(clamped.astype(dtype).view(np.uint8))
        out.flush()


if __name__ == "__main__":
    main()
