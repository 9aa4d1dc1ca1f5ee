"""Runs a command with HALFSTEP_ISA, and exits with 77 where this processor lacks it: with_isa.py avx2 COMMAND..."""
import os
import pathlib
import re
import sys

NEEDS = {"avx2": {"avx2", "fma", "f16c"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}

isa, *command = sys.argv[1:]
flags = re.search(r"^flags\s*:(.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
missing = NEEDS[isa] - set(flags[1].split() if flags else [])
if missing:
    print(f"this processor has no {', '.join(sorted(missing))}")
    sys.exit(77)
os.execve(command[0], command, {**os.environ, "HALFSTEP_ISA": isa})
