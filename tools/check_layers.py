#!/usr/bin/env python3
"""Fails when an #include points up the table of rooms, sideways, or brings Torch in below `memory`.

The table is the architecture (docs/architecture.md says why). Each row may include only rows above it.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

ROWS = [
    ["base"],
    ["formats", "files"],
    ["kernels", "text", "config", "log"],
    ["report"],
    ["memory"],
    ["tensor"],
    ["scaling", "quant", "optim", "data", "checkpoint"],
    ["precision"],
    ["autocast", "diagnose", "distributed", "forecast"],
    ["nn"],
    ["models"],
    ["train"],
    ["cli", "capi"],
]
ROW_OF = {room: row for row, rooms in enumerate(ROWS) for room in rooms}
TORCH_STARTS_AT = ROW_OF["memory"]
PUBLIC_HEADERS_ONLY = ROW_OF["cli"]

# The room that owns each public header.
HEADER_ROOM = {
    "config.h": "base",
    "error.h": "base",
    "printable.h": "base",
    "safetensors.h": "files",
    "tokenizer.h": "text",
    "token_file.h": "files",
    "run_log.h": "log",
    "run_watch.h": "log",
    "event_file.h": "log",
    "report.h": "report",
    "data.h": "data",
    "formats.h": "formats",
    "run_config.h": "config",
    "storage.h": "kernels",
    "memory.h": "memory",
    "machine.h": "tensor",
    "params.h": "tensor",
    "grads.h": "tensor",
    "state_dict.h": "tensor",
    "step_report.h": "tensor",
    "tensor_file.h": "tensor",
    "scaling.h": "scaling",
    "schedule.h": "optim",
    "optim.h": "optim",
    "checkpoint.h": "checkpoint",
    "op_policy.h": "precision",
    "precision.h": "precision",
    "autocast.h": "autocast",
    "activations.h": "nn",
    "models.h": "models",
    "mixed_precision.h": "train",
    "trainer.h": "train",
    "halfstep.h": "cli",  # the umbrella: includes all the others, declares nothing
}

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^">]+)[">]')
TORCH_HEADER = re.compile(r"^(torch|ATen|c10)/")


def room_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).parts
    return HEADER_ROOM.get(path.name, f"unlisted header {path.name}") if parts[0] == "include" else parts[1]


def target_room(included: str) -> str | None:
    """The room that an include leads to, or None for the outside world."""
    first, _, rest = included.partition("/")
    if first == "halfstep":
        return HEADER_ROOM.get(rest, f"unlisted header {rest}")
    return first if rest and first in ROW_OF else None  # without a folder it is std's: <memory>


def faults_of(path: pathlib.Path) -> list[str]:
    room = room_of(path)
    if room not in ROW_OF:
        return [f"{path.relative_to(ROOT)}: {room}: give it a row in tools/check_layers.py"]
    faults = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        included, where = match.group(2), f"{path.relative_to(ROOT)}:{number}"
        if TORCH_HEADER.match(included) and ROW_OF[room] < TORCH_STARTS_AT:
            faults.append(f"{where}: {room} knows no Torch, yet includes {included}")
        target = target_room(included)
        if target is None or target == room:
            continue
        if target not in ROW_OF:
            faults.append(f"{where}: {included}: {target}: give it a row in tools/check_layers.py")
        elif ROW_OF[room] == PUBLIC_HEADERS_ONLY and not included.startswith("halfstep/"):
            faults.append(f"{where}: {room} is our own first user: public headers only, not {included}")
        elif ROW_OF[target] >= ROW_OF[room] and path.name != "halfstep.h":
            faults.append(f"{where}: {room} (row {ROW_OF[room]}) may not know {target} (row {ROW_OF[target]})")
    return faults


def main() -> int:
    files = [p for folder in ("include", "src") for p in (ROOT / folder).rglob("*") if p.suffix in (".h", ".cpp")]
    faults = [fault for path in sorted(files) for fault in faults_of(path)]
    print("\n".join(faults) if faults else f"layers: {len(files)} files, no include points up")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
