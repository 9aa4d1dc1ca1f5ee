"""What ml_dtypes and gfloat say, one line a fact, for python_oracles_test.cpp. Numbers are hexadecimal floats.

traits FORMAT bits mantissa_bits max min_normal min_subnormal epsilon
decode FORMAT code value
encode FORMAT fp32_bits code                          (E2M1: nearest, ml_dtypes)
round  FORMAT rounding fp32_bits random_word value    (gfloat)
"""
import random

import gfloat
import ml_dtypes
import numpy as np
from gfloat import formats as g

np.seterr(all="ignore")

ML_DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "FP16": np.float16,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "E8M0": ml_dtypes.float8_e8m0fnu,
    "E2M1": ml_dtypes.float4_e2m1fn,
}


def fnuz(name: str, precision: int, bias: int) -> gfloat.FormatInfo:
    """gfloat has no FNUZ formats of its own, but can be told of them: no Inf, no -0, one NaN."""
    return gfloat.FormatInfo(name, 8, precision, bias=bias, is_signed=True, domain=gfloat.Domain.Finite, has_nz=False,
                             num_high_nans=0, has_subnormals=True, is_twos_complement=False)


GFLOAT = {
    "BF16": g.format_info_bfloat16,
    "FP16": g.format_info_binary16,
    "E4M3": g.format_info_ocp_e4m3,
    "E5M2": g.format_info_ocp_e5m2,
    "E4M3FNUZ": fnuz("e4m3fnuz", 4, 8),
    "E5M2FNUZ": fnuz("e5m2fnuz", 3, 16),
}


def traits() -> None:
    for name, dtype in ML_DTYPES.items():
        info = ml_dtypes.finfo(dtype)
        numbers = [float(x).hex() for x in (info.max, info.tiny, info.smallest_subnormal, info.eps)]
        print("traits", name, info.bits, info.nmant, *numbers)


def decode() -> None:
    for name, dtype in ML_DTYPES.items():
        bits = ml_dtypes.finfo(dtype).bits
        codes = np.arange(2**bits, dtype=np.uint16 if bits == 16 else np.uint8)
        for code, value in zip(codes, codes.view(dtype).astype(np.float32)):
            print("decode", name, code, float(value).hex())


def encode_e2m1() -> None:
    centres = np.arange(0, 9, 0.25, dtype=np.float32)  # values, midpoints, and beyond the largest
    edges = np.concatenate([centres, np.nextafter(centres, np.float32(100)), np.nextafter(centres, np.float32(-1)),
                            np.array([1e30, 1e-30, np.inf], np.float32)])
    edges = np.concatenate([edges, -edges])
    codes = edges.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    for bits, code in zip(edges.view(np.uint32), codes):
        print("encode", "E2M1", bits, code)


def round_with_gfloat() -> None:
    draw = random.Random(11)
    patterns = [draw.getrandbits(32) for _ in range(300)]
    patterns += [e << 23 | m for e in range(1, 255) for m in (0, 1, 0x400000, 0x7fffff)]
    patterns += [p | 1 << 31 for p in patterns[300:]]
    # Nearer to the middle of the narrow formats than random bits are.
    patterns += [(draw.randrange(105, 145) << 23 | draw.getrandbits(23) | draw.getrandbits(1) << 31) for _ in range(1000)]
    for name, info in GFLOAT.items():
        for bits in patterns:
            value = float(np.array(bits, np.uint32).view(np.float32))
            if not np.isfinite(value):
                continue
            rounded = gfloat.round_float(info, value, gfloat.RoundMode.TowardZero)
            print("round", name, "toward_zero", bits, 0, float(rounded).hex())
            # gfloat adds fraction and random word in double, which is exact while the fraction has 52 bits or less.
            if abs(value) >= 2.0**-28 or name == "BF16":
                word = draw.getrandbits(32)
                rounded = gfloat.round_float(info, value, gfloat.RoundMode.StochasticFastest, srbits=word, srnumbits=32)
                print("round", name, "stochastic", bits, word, float(rounded).hex())


traits()
decode()
encode_e2m1()
round_with_gfloat()
