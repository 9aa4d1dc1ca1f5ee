"""Statistics of FP32 values as NumPy and ml_dtypes have them. JSON in, JSON out.

{"bits": [FP32 words]} -> count, zeros, nans, infinities, amax (bits), sum (exact, rounded once), exponents; in and
in_scaled by format: how many values become zero, become subnormal, saturate, are not finite.
"""
import json
import math
import sys

import ml_dtypes
import numpy as np

np.seterr(all="ignore")
FORMATS = {
    "BF16": ml_dtypes.bfloat16,
    "FP16": np.float16,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E2M1": ml_dtypes.float4_e2m1fn,
}

bits = np.array(json.load(sys.stdin)["bits"], np.uint32)
values = bits.view(np.float32)
finite = values[np.isfinite(values)].astype(np.float64)
amax = float(np.abs(finite).max()) if finite.size else 0.0


def counts(name, power):
    scaled = finite * 2.0**power
    cast = np.abs(scaled.astype(FORMATS[name]).astype(np.float64))
    # ml_dtypes holds E2M1 at 6, its largest; halfway to the next number, 8, the even code is the one above.
    saturated = np.abs(scaled) >= 7 if name == "E2M1" else ~np.isfinite(cast)
    tiny = float(ml_dtypes.finfo(FORMATS[name]).smallest_normal)
    return {"zero": int(((cast == 0) & (scaled != 0)).sum()), "subnormal": int(((cast > 0) & (cast < tiny)).sum()),
            "saturated": int(saturated.sum()), "non_finite": int(values.size - finite.size)}


def fitting_power(name):
    largest = float(ml_dtypes.finfo(FORMATS[name]).max)
    power = 400
    while amax > 0 and amax * 2.0**power > largest:
        power -= 1
    return power if amax > 0 else 0


print(json.dumps({
    "count": values.size, "zeros": int((values == 0).sum()), "nans": int(np.isnan(values).sum()),
    "infinities": int(np.isinf(values).sum()), "amax": int(np.float32(amax).view(np.uint32)), "sum": math.fsum(finite),
    "exponents": np.bincount((bits >> 23) & 255, minlength=256).tolist(),
    "in": {name: counts(name, 0) for name in FORMATS},
    "in_scaled": {name: counts(name, fitting_power(name)) for name in FORMATS},
}))
