#!/usr/bin/env python3
"""own_model_test.py PROGRAM HALFSTEP: the example with a model of its own is stopped at ten random steps and resumed.

Every tensor of the last checkpoint and of the model must be that of the run which nobody stopped, and its report
opens.
"""
import hashlib
import json
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

PROGRAM, HALFSTEP = sys.argv[1:]
STEPS, STOPS = 120, 10
SETTINGS = [f"train.steps={STEPS}", "train.evaluate_every=60", "train.threads=1"]


def start(folder):
    return subprocess.Popen([PROGRAM, folder, *SETTINGS], stdout=subprocess.PIPE, text=True)


def run(folder):
    process = start(folder)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return output


def steps_done(folder):
    log = folder / "log.jsonl"
    return sum('"kind":"step"' in line for line in log.read_text().splitlines()) if log.exists() else 0


def bits(folder):
    answer = json.loads(subprocess.run([HALFSTEP, "checkpoint", "inspect", folder, "--json"], check=True,
                                       capture_output=True, text=True).stdout)
    found = {f"{name}/{key}": tensor["sha256"] for name, part in answer["parts"].items()
             for key, tensor in part["tensors"].items()}
    found["step"] = answer["step"]
    found["model"] = hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()
    return found


with tempfile.TemporaryDirectory() as work:
    whole = pathlib.Path(work) / "whole"
    output = run(whole)
    accuracy = float(re.findall(r"test accuracy ([0-9.]+)", output)[-1])
    assert accuracy > 0.6, output
    expected = bits(whole)
    seed = int(time.time())
    chance = random.Random(seed)
    stopped_at = []
    for stop in range(STOPS):
        folder = pathlib.Path(work) / f"stopped{stop}"
        at = chance.randint(1, STEPS // 2)  # the signal must arrive before the end, on a fast machine too
        process = start(folder)
        while process.poll() is None and steps_done(folder) < at:
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        assert "stopped after step" in process.communicate()[0], f"seed {seed}: nothing to resume at {at}"
        stopped_at.append(json.loads(subprocess.run([HALFSTEP, "checkpoint", "inspect", folder, "--json"], check=True,
                                                    capture_output=True, text=True).stdout)["step"])
        run(folder)
        assert bits(folder) == expected, f"seed {seed}: stopped after step {stopped_at[-1]}, the bits differ"
    page = pathlib.Path(work) / "report.html"
    subprocess.run([HALFSTEP, "report", folder, "-o", page], check=True, capture_output=True)
    assert "</html>" in page.read_text()
    print(f"stopped after steps {stopped_at}: {len(expected)} tensors and numbers equal; the report opens")
