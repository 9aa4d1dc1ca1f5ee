"""Runs the built `halfstep` as a person would."""
import json
import os
import subprocess

PROGRAM = os.environ["HALFSTEP_PROGRAM"]


def run(*arguments, prefix=(), **environment):
    """The finished process. `prefix` goes before the program: ("taskset", "-c", "0")."""
    return subprocess.run([*prefix, PROGRAM, *arguments], capture_output=True, text=True,
                          env={**os.environ, **environment})


def ask(*arguments, **options):
    """The JSON answer of a command that must succeed."""
    done = run(*arguments, "--json", **options)
    if done.returncode != 0:
        raise AssertionError(f"{arguments} exited {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)
