#!/usr/bin/env python3
"""Prints what changes in examples/01_fp32.cpp to train it in FP16, as README.md shows it; fails beyond six lines.

The first line of each file, a comment about the file itself, is left out. A line that is replaced counts once.
"""
import difflib
import pathlib
import sys

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"
MOST_LINES = 6


def code_of(name):
    return (EXAMPLES / name).read_text().splitlines()[1:]


diff = list(difflib.unified_diff(code_of("01_fp32.cpp"), code_of("03_fp16.cpp"), lineterm="", n=1))[2:]
print("\n".join(" ..." if line.startswith("@@") else line for line in diff[1:]))
added = sum(line.startswith("+") for line in diff)
removed = sum(line.startswith("-") for line in diff)
if max(added, removed) > MOST_LINES:
    sys.exit(f"{max(added, removed)} lines changed, more than {MOST_LINES}")
