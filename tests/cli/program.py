"""Runs the built `halfstep` as a person would."""
import json
import os
import subprocess

PROGRAM = os.environ["HALFSTEP_PROGRAM"]

CORPUS = "".join(f"line {i * i} of the corpus\n" for i in range(400))

CONFIG = """
[model]
kind = "gpt2"
layers = 1
width = 16
heads = 2
[data]
train = ["{corpus}"]
validation_fraction = 0.1
sequence_length = 16
batch_size = 2
[train]
"""


def tiny_run(folder, train):
    """A text, and a configuration that trains on it: their paths. `train` is the rest of its last section."""
    corpus, config = folder / "corpus.txt", folder / "run.toml"
    corpus.write_text(CORPUS)
    config.write_text(CONFIG.format(corpus=corpus) + train)
    return corpus, config


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
