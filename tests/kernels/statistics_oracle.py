"""Statistics of values as NumPy and ml_dtypes have them. JSON in, JSON out.

{"format": "FP32", "BF16" or "FP16", "bits": [words]}; in place of "bits" may stand {"file": path}, of raw words, and
{"minus": path} of others that are subtracted in FP32. Or {"many": [such questions]}, for a list of answers.

-> count, zeros, nans, infinities, amax (bits of FP32), sum (exact, rounded once), exponents (FP32's exponent fields);
in and in_scaled by format: how many values become zero, become subnormal, saturate, are not finite.
"""
import json
import math
import sys

import ml_dtypes
import numpy as np

np.seterr(all="ignore")
SOURCES = {"FP32": np.float32, "BF16": ml_dtypes.bfloat16, "FP16": np.float16}
FORMATS = {
    "FP32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "FP16": np.float16,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E2M1": ml_dtypes.float4_e2m1fn,
}
FP32_TINY = float(np.finfo(np.float32).smallest_normal)


def rounded(magnitudes, name):
    """To the format's nearest number, ties to even, without an end: FP64 holds every step of it exactly.

    ml_dtypes casts FP64 by way of FP32, which rounds FP32's subnormals twice; where that is not so, it has to agree.
    """
    info = ml_dtypes.finfo(FORMATS[name])
    _, exponents = np.frexp(magnitudes)  # a number is at least half of 2 to this
    step = np.ldexp(1.0, np.maximum(exponents - 1, info.minexp) - info.nmant)
    mine = np.rint(magnitudes / step) * step
    cast = magnitudes.astype(FORMATS[name]).astype(np.float64)
    once = ((magnitudes >= FP32_TINY) | (magnitudes == magnitudes.astype(np.float32))) & (mine <= float(info.max))
    assert np.array_equal(mine[once], cast[once]), name
    if name != "E2M1":  # which ml_dtypes holds at 6, its largest
        assert not np.isfinite(cast[mine > float(info.max)]).any(), name
    return mine


def counts(finite, others, name, power):
    info = ml_dtypes.finfo(FORMATS[name])
    scaled = np.abs(finite) * 2.0**power
    cast = rounded(scaled, name)
    return {"zero": int(((cast == 0) & (scaled != 0)).sum()),
            "subnormal": int(((cast > 0) & (cast < float(info.smallest_normal))).sum()),
            "saturated": int((cast > float(info.max)).sum()), "non_finite": others}


def fitting_power(amax, name):
    largest = float(ml_dtypes.finfo(FORMATS[name]).max)
    power = 400
    while amax > 0 and amax * 2.0**power > largest:
        power -= 1
    return power if amax > 0 else 0


def words(question, source):
    size = np.dtype(source).itemsize
    unsigned = {2: np.uint16, 4: np.uint32}[size]
    if "bits" in question:
        return np.array(question["bits"], unsigned).view(source)
    return np.fromfile(question["file"], unsigned).view(source)


def statistics(question):
    source = SOURCES[question["format"]]
    values = words(question, source).astype(np.float32)  # which holds all of them
    if "minus" in question:
        values = values - np.fromfile(question["minus"], np.float32)
    finite = values[np.isfinite(values)].astype(np.float64)
    others = int(values.size - finite.size)
    amax = float(np.abs(finite).max()) if finite.size else 0.0
    return {
        "count": values.size, "zeros": int((values == 0).sum()), "nans": int(np.isnan(values).sum()),
        "infinities": int(np.isinf(values).sum()), "amax": int(np.float32(amax).view(np.uint32)),
        "sum": math.fsum(finite), "magnitudes": math.fsum(np.abs(finite)),
        "exponents": np.bincount((values.view(np.uint32) >> 23) & 255, minlength=256).tolist(),
        "in": {name: counts(finite, others, name, 0) for name in FORMATS},
        "in_scaled": {name: counts(finite, others, name, fitting_power(amax, name)) for name in FORMATS},
    }


asked = json.load(sys.stdin)
print(json.dumps([statistics(each) for each in asked["many"]] if "many" in asked else statistics(asked)))
