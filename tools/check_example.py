#!/usr/bin/env python3
"""check_example.py SOURCE PROGRAM: runs an example and holds it to the promise in its first comment.

The first line of SOURCE ends in "Promise: <name> >= <number>"; the last number that PROGRAM prints after
<name> must keep it.
"""
import pathlib
import re
import subprocess
import sys

SKIPPED = 77  # as ctest is told: this machine has no BF16 of its own

source, program = sys.argv[1:]
first_line = pathlib.Path(source).read_text().splitlines()[0]
promise = re.search(r"Promise: (.+) >= ([0-9.]+)$", first_line)
if not promise:
    sys.exit(f"{source}: the first line promises nothing: {first_line}")
name, least = promise.group(1), float(promise.group(2))

ran = subprocess.run([program], capture_output=True, text=True)
output = ran.stdout
print(output + ran.stderr, end="")
if ran.returncode != 0:
    # Refused by design: a program that wants speed must not get less than FP32's.
    sys.exit(SKIPPED if "BF16 is emulated" in ran.stderr else f"{source}: exited with {ran.returncode}")
found = re.findall(re.escape(name) + r" ([0-9.]+)", output)
if not found:
    sys.exit(f"{source}: promised '{name}' and printed none")
if float(found[-1]) < least:
    sys.exit(f"{source}: promised {name} >= {least}, got {found[-1]}")
print(f"kept: {name} {found[-1]} >= {least}")
