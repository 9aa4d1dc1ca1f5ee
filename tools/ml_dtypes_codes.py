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


# numpy raises a flag, in 100 ns, for each input that overflows or underflows FP16. Where a whole range does, and
# the answer can only be one, numpy is asked for every 16th input and its answer is taken for the 15 after it.
FLAT_STRIDE = 16


def to_float16(values: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    low, high = magnitudes.min(), magnitudes.max()  # NaN when there is one, and then neither holds
    flat = high < 2.0**-26 or low > 2.0**17
    if not flat:
        return values.astype(np.float16)
    return np.repeat(values[::FLAT_STRIDE].astype(np.float16), FLAT_STRIDE)[: len(values)]


def cast(values: np.ndarray, magnitudes: np.ndarray, dtype: type) -> np.ndarray:
    codes = to_float16(values, magnitudes) if dtype is np.float16 else values.astype(dtype)
    return codes.view(np.uint8)


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
            out.write(cast(values, magnitudes, dtype))
            if not (magnitudes > limit).any():
                out.write(b"\0")
                continue
            clamped = np.clip(values, -limit, limit)  # NaN passes through
            out.write(b"\1")
            out.write(cast(clamped, np.abs(clamped), dtype))
        out.flush()


if __name__ == "__main__":
    main()
