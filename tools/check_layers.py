#!/usr/bin/env python3
"""Fails when an #include leads to a room that its own room may not know, or brings Torch in below `memory`.

    tools/check_layers.py             checks
    tools/check_layers.py --write     writes the table of docs/architecture.md anew, which the check compares

ROOMS is the architecture (docs/architecture.md says why): a room knows only rooms above it, and of those only the ones
that it names. One more is a decision, made here.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Room, what lives there, which rooms it may know. None: planned.
ROOMS = [
    ("base", "errors, hashes, CPU features", ""),
    ("formats", "FP32, TF32, BF16, FP16, the FP8s, E8M0, E2M1: traits and exact reference casts; recipes", "base"),
    ("words", "text for people: printable names, numbers, UTF-8; the program has it too", "base"),
    ("io", "bytes in and out of files: mapped, written durably, hashed; JSON within limits", "base words"),
    ("safetensors", "safetensors files and folders of them", "base words io"),
    ("checkpoint_format", "the folders and manifests of checkpoints", "base words io safetensors"),
    ("data_files", "token files and IDX", "base io"),
    ("kernels", "loops over raw elements, one file per instruction set, chosen at run time", "base formats"),
    ("jinja", "the template language of published models: parsed, run within limits", "base words"),
    ("text", "tokenizers: byte-level BPE, NFC; chat templates; text as files hold it", "base words io jinja"),
    ("config", "the configuration of a run as a value, with the origin of each key", "base words io"),
    ("log", "what a run logs: log.jsonl, log.csv, TensorBoard's event files; observers of a run",
     "base formats words io"),
    ("memory", "the first room that uses LibTorch: the CPU allocator, which counts and caches", "base"),
    ("tensor", "`Param`, `GradSummary`, saved state, tensors in safetensors files, what autograd saves, what works on "
     "this machine", "base words formats safetensors kernels memory"),
    ("scaling", "the loss scale and `GradScaler`", "base tensor"),
    ("optim", "fused AdamW and SGD, schedules", "base kernels memory tensor"),
    ("data", "batches of tokens and images, their order and cursor", "base formats data_files tensor"),
    ("checkpoint", "the whole state of a run, saved and loaded", "base words io safetensors checkpoint_format kernels tensor"),
    ("quant", "matrices as codes, their products, and a recipe's state per layer",
     "base formats kernels tensor"),
    ("precision", "`Precision`, the op policy table, the plan of layers, and their reasons", "base formats words kernels scaling"),
    ("ops", "operations that Halfstep computes itself, one file each, and their table", "base kernels tensor quant precision"),
    ("autocast", "`AutocastScope` and the kernels that apply the policy", "base memory tensor precision ops"),
    ("diagnose", "findings in a run's records; the tracer of the first number that is not finite",
     "base formats words config log tensor"),
    ("distributed", "ranks, their exchanges, sums of gradients over ranks, and sharding", "base kernels memory tensor"),
    ("nn", "functions for models, activation checkpointing and compression", "base formats kernels memory tensor autocast"),
    ("models", "GPT-2, Llama and its relatives, ResNet-18; Hugging Face folders in and out", "base words io safetensors tensor nn"),
    ("train", "`MixedPrecision`, `TrainStep`, `Trainer`, which combine the rooms above",
     "base formats words io data_files checkpoint_format kernels text config log memory tensor scaling optim data checkpoint quant precision autocast diagnose distributed models"),
    ("forecast", "a model of memory and time per rank; shapes, devices and their sources: the program's",
     "base words io kernels memory"),
    ("report", "a run's log read back; reports and comparisons of runs: the program's",
     "base formats words io config log diagnose"),
    ("cli", "the program `halfstep`: it uses public headers, words, forecast and report only",
     "base formats words io data_files text config log forecast report memory tensor checkpoint precision autocast diagnose distributed models train"),
    ("capi", "a C ABI", None),
]
PLACE = {room: place for place, (room, _, _) in enumerate(ROOMS)}
KNOWS = {room: set(known.split()) for room, _, known in ROOMS if known is not None}
PROGRAM = {"forecast", "report", "cli"}  # the side of the program, which the library's own headers are hidden from
OF_BOTH = {"words", "io"}  # compiled into the library and into the program
TORCH_STARTS_AT = PLACE["memory"]

# The room that owns each public header.
HEADER_ROOM = {
    "config.h": "base",
    "error.h": "base",
    "printable.h": "words",
    "safetensors.h": "safetensors",
    "tokenizer.h": "text",
    "text_files.h": "text",
    "chat_template.h": "text",
    "token_file.h": "data_files",
    "findings.h": "diagnose",
    "run_log.h": "log",
    "run_watch.h": "log",
    "event_file.h": "log",
    "data.h": "data",
    "formats.h": "formats",
    "recipe.h": "formats",
    "tensor_stats.h": "formats",
    "run_config.h": "config",
    "storage.h": "kernels",
    "memory.h": "memory",
    "machine.h": "tensor",
    "params.h": "tensor",
    "grads.h": "tensor",
    "ranks.h": "distributed",
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
    "op_tracer.h": "diagnose",
    "activations.h": "nn",
    "functions.h": "nn",
    "models.h": "models",
    "mixed_precision.h": "train",
    "probe.h": "train",
    "shadow.h": "train",
    "task.h": "train",
    "train_step.h": "train",
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
    return first if rest and first in PLACE else None  # without a folder it is std's: <memory>


def faults_of(path: pathlib.Path) -> list[str]:
    room = room_of(path)
    if room not in KNOWS:
        return [f"{path.relative_to(ROOT)}: {room}: give it a place in tools/check_layers.py"]
    faults = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        included, where = match.group(2), f"{path.relative_to(ROOT)}:{number}"
        if TORCH_HEADER.match(included) and PLACE[room] < TORCH_STARTS_AT:
            faults.append(f"{where}: {room} knows no Torch, yet includes {included}")
        target = target_room(included)
        if target is None or target == room or path.name == "halfstep.h":
            continue
        if target not in KNOWS:
            faults.append(f"{where}: {included}: {target}: give it a place in tools/check_layers.py")
        elif room in PROGRAM and target not in PROGRAM | OF_BOTH and not included.startswith("halfstep/"):
            faults.append(f"{where}: {room} is our own first user: public headers only, not {included}")
        elif target not in KNOWS[room]:
            known = ", ".join(sorted(KNOWS[room], key=PLACE.get)) or "no other room"
            faults.append(f"{where}: {room} may not know {target}; it knows {known}")
    return faults


def table() -> str:
    """As docs/architecture.md shows it."""
    rows = ["| room | what lives there | knows |", "|---|---|---|"]
    for room, what, known in ROOMS:
        if known is None:
            rows.append(f"| *planned:* `{room}` | {what} | |")
        else:
            rows.append(f"| `{room}` | {what} | {', '.join(f'`{name}`' for name in known.split())} |")
    return "\n".join(rows)


def unused_edges(files: list[pathlib.Path]) -> list[str]:
    """Of the whole repository: a part of it, as the test of this check makes, uses few."""
    if not (ROOT / "docs" / "architecture.md").exists():
        return []
    used = {(room_of(path), target_room(match.group(2)))
            for path in files if path.name != "halfstep.h"
            for match in map(INCLUDE.match, path.read_text().splitlines()) if match}
    return [f"tools/check_layers.py: {room} may know {known}, and includes nothing of it: take the edge out"
            for room in KNOWS for known in sorted(KNOWS[room]) if (room, known) not in used]


def faults_of_rooms() -> list[str]:
    faults = [f"tools/check_layers.py: {room} may not know {known}, which is not above it"
              for room in KNOWS for known in KNOWS[room] if PLACE.get(known, len(ROOMS)) >= PLACE[room]]
    page = ROOT / "docs" / "architecture.md"
    if page.exists() and table() not in page.read_text():
        faults.append("docs/architecture.md: its table of rooms is not that of tools/check_layers.py; run it with --write")
    return faults


def write_table() -> None:
    page = ROOT / "docs" / "architecture.md"
    page.write_text(re.sub(r"\| room \|.*?\n(?=\n)", lambda _: table() + "\n", page.read_text(), count=1,
                           flags=re.DOTALL))


def main() -> int:
    if sys.argv[1:] == ["--write"]:
        write_table()
    files = [p for folder in ("include", "src") for p in (ROOT / folder).rglob("*") if p.suffix in (".h", ".cpp")]
    faults = faults_of_rooms() + unused_edges(files) + [fault for path in sorted(files) for fault in faults_of(path)]
    print("\n".join(faults) if faults else f"layers: {len(files)} files, every include is allowed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
