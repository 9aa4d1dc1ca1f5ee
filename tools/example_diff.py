#!/usr/bin/env python3
"""Prints what changes from one example to another, as README.md shows it; fails beyond --most lines.

The first line of each file, a comment about the file itself, is left out. Lines that are changed or added count; those
that go do not.
"""
import argparse
import difflib
import pathlib
import sys

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"


def code_of(name):
    return (EXAMPLES / f"{name}.cpp").read_text().splitlines()[1:]


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("before", help="an example without its ending: 00_libtorch")
parser.add_argument("after")
parser.add_argument("--most", type=int, help="how many lines may change")
given = parser.parse_args()

diff = list(difflib.unified_diff(code_of(given.before), code_of(given.after), lineterm="", n=1))[2:]
print("\n".join(" ..." if line.startswith("@@") else line for line in diff[1:]))
changed = sum(line.startswith("+") for line in diff)
if given.most is not None and changed > given.most:
    sys.exit(f"{changed} lines changed or added, more than {given.most}")
