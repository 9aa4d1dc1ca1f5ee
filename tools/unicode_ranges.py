#!/usr/bin/env python3
"""Writes src/text/unicode_ranges.h: which code points the package `tokenizers` takes for letters, numbers, marks,
spaces and digits, asked one by one, as what PCRE2 10.42 (Unicode 14) lacks; and which ones its NFC changes, moves or
joins to what stands before them.

    tools/unicode_ranges.py > src/text/unicode_ranges.h

needs: pip install tokenizers   (and Python 3.11, whose unicodedata is Unicode 14 as PCRE2 10.42's is)
"""
import sys
import unicodedata

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

POINTS = [p for p in range(0x110000) if not 0xD800 <= p <= 0xDFFF]
PER_LINE = 5


def matched_by(pre_tokenizer) -> set[int]:
    """The code points that are pieces of their own when each stands behind two letters."""
    text = "".join("aa" + chr(p) for p in POINTS)
    return {ord(piece) for piece, _ in pre_tokenizer.pre_tokenize_str(text) if len(piece) == 1}


def removed_by(pattern: str) -> set[int]:
    text = "".join(map(chr, POINTS))
    left = set()
    for _, (begin, end) in pre_tokenizers.Split(Regex(pattern), "removed").pre_tokenize_str(text):
        left.update(range(begin, end))
    return {p for i, p in enumerate(POINTS) if i not in left}


def each_by(normalizer, before: str) -> dict[int, str]:
    """What the normalizer makes of `before` and each code point, a line each."""
    points = [p for p in POINTS if chr(p) != "\n"]
    found = {}
    for at in range(0, len(points), 0x400):
        some = points[at:at + 0x400]
        lines = normalizer.normalize_str("\n".join(before + chr(p) for p in some)).split("\n")
        found.update(zip(some, lines, strict=True))
    return found


def not_settled_in_nfc() -> set[int]:
    """Code points that NFC replaces, sorts before another mark, or joins to a code point before them. All others begin a
    part of the text that NFC treats by itself."""
    highest_class = "\u0345"  # 240: every other mark is sorted before it
    nfc = normalizers.NFC()
    moved = {p for p, text in each_by(nfc, highest_class).items() if text != highest_class + chr(p)}
    decomposed = {p: text for p, text in each_by(normalizers.NFD(), "").items() if text != chr(p)}
    joined = {ord(text[-1]) for p, text in decomposed.items() if nfc.normalize_str(text) == chr(p)}
    return moved | joined | {ord(highest_class)}


def ranges_of(points: set[int]) -> list[tuple[int, int]]:
    ranges = []
    for p in sorted(points):
        if ranges and ranges[-1][1] == p - 1:
            ranges[-1] = (ranges[-1][0], p)
        else:
            ranges.append((p, p))
    return ranges


def print_ranges(comment: str, name: str, points: set[int]) -> None:
    ranges = ranges_of(points)
    print(f"\n/// {comment}\ninline constexpr CodeRange {name}[] = {{")
    for at in range(0, len(ranges), PER_LINE):
        print("    " + " ".join(f"{{0x{a:X}, 0x{b:X}}}," for a, b in ranges[at:at + PER_LINE]))
    print("};")


def main() -> None:
    if unicodedata.unidata_version != "14.0.0":
        sys.exit(f"this Python knows Unicode {unicodedata.unidata_version}, not 14.0.0 as PCRE2 10.42 does")
    print(f"// Made by tools/unicode_ranges.py from tokenizers {tokenizers.__version__}: do not edit.\n"
          "// clang-format off\n#pragma once\n\n#include <cstdint>\n\n"
          "namespace halfstep::text {\n\nstruct CodeRange {\n  uint32_t first;\n  uint32_t last;\n};")
    for name in ("L", "N", "Lu", "Ll", "Lm", "Lo", "M"):
        known = {p for p in POINTS if unicodedata.category(chr(p)).startswith(name)}
        theirs = removed_by(rf"\p{{{name}}}")
        if known - theirs:
            sys.exit(f"\\p{{{name}}}: {len(known - theirs)} code points would have to be taken away, not added")
        print_ranges(f"\\p{{{name}}}: {len(theirs - known)} code points that Unicode 14 had not.", f"kNew{name}", theirs - known)
    print_ranges("\\s, all of it.", "kSpaces", removed_by(r"\s"))
    print_ranges("What the pre-tokenizer Digits takes for a digit, all of it.", "kDigits",
                 matched_by(pre_tokenizers.Digits(individual_digits=True)))
    print_ranges("What NFC replaces, sorts among marks, or joins to what stands before; all of it.", "kNotSettledInNfc",
                 not_settled_in_nfc())
    print("\n}  // namespace halfstep::text")


if __name__ == "__main__":
    main()
