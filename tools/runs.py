"""What the commands that measure `halfstep train` share: the program, its runs and their logs, statistics."""
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
OPTIMIZER = {"lr": 3e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "clip_norm": 1.0}
FP32_SPACING = 2.0 ** -23  # relative, of neighbouring numbers: losses and Python's norms are such
JEMALLOC = pathlib.Path("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2")  # Debian's libjemalloc2


def need_environment(*modules: str) -> None:
    """Starts the script again in the environment that tools/setup makes, if a module is missing in this one."""
    try:
        for module in modules:
            __import__(module)
    except ImportError:
        python = ROOT / ".venv/bin/python"
        if not python.exists() or sys.executable == str(python):
            raise
        os.execv(python, [str(python), *sys.argv])


def add_program_option(parser) -> None:
    parser.add_argument("--build", default="release", help="the preset whose programs are run (%(default)s)")
    parser.add_argument("--program", type=pathlib.Path, help="the halfstep to run instead; others lie beside it")


def program_of(given, name: str = "halfstep") -> pathlib.Path:
    """A built program: `given` are the parsed options."""
    halfstep = given.program or ROOT / "build" / given.build / "bin/halfstep"
    path = halfstep.resolve().with_name(name)
    if not path.exists():
        target = "halfstep_cli" if name == "halfstep" else name
        sys.exit(f"{path} is not built: cmake --build --preset {given.build} --target {target}")
    return path


def say(*words) -> None:
    """Progress; stdout is for the answer."""
    print(*words, file=sys.stderr, flush=True)


def train_command(program: pathlib.Path, folder: pathlib.Path, *arguments: str, **settings) -> list[str]:
    """`halfstep train` into a folder. Settings are keys with two underscores for the dot: train__steps=50."""
    sets = [word for key, value in settings.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
    return [str(program), "train", *arguments, "--folder", str(folder), *sets]


def run(command: list, environment: dict | None = None, expect: int | None = 0) -> subprocess.CompletedProcess:
    """The finished process, with its output; ends this one when the exit code is not the expected."""
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, **(environment or {})})
    if expect is not None and done.returncode != expect:
        sys.exit(f"{' '.join(map(str, command))}\nexited with {done.returncode}, expected {expect}:\n"
                 f"{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done


def records(folder: pathlib.Path) -> list[dict]:
    """The log of a run. A line that is still being written is left out."""
    path = folder / "log.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def of_kind(log: list[dict], kind: str) -> list[dict]:
    return [record for record in log if record["kind"] == kind]


def is_done(folder: pathlib.Path) -> bool:
    """Whether a run came to its own end."""
    log = records(folder)
    return bool(log) and log[-1]["kind"] == "end" and log[-1]["outcome"] == "done"


def seconds_per_step(ends: list[float], warmup_steps: int) -> float:
    """From the moments at which steps ended: the mean without the first ones, which fill caches and allocators."""
    counted = ends[warmup_steps - 1:] if warmup_steps else [0.0, *ends]
    return (counted[-1] - counted[0]) / (len(counted) - 1)


def spread(values: list[float]) -> dict:
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "rounds": values}


def smollm2_folder(given: str | None) -> pathlib.Path:
    """SmolLM2-135M: the folder given, or the one in the cache, which is made if it is not there."""
    if given:
        return pathlib.Path(given).resolve()
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "halfstep"
    folder = pathlib.Path(os.environ.get("HALFSTEP_DATA") or cache) / "smollm2"
    if not (folder / "model.safetensors").exists():
        say(f"making {folder}")
        run([sys.executable, ROOT / "tools/get_smollm2.py", folder])
    return folder


def jemalloc_without_decay() -> dict:
    """Environment variables: an allocator that gives nothing back."""
    return {"LD_PRELOAD": str(JEMALLOC), "MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"}


def write_gpt2(folder: pathlib.Path, layers: int, width: int, heads: int, vocabulary: int, context: int) -> None:
    """A new GPT-2 with FP32 weights, as its paper draws them."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(0)
    deviation = 0.02
    of_residual = deviation / math.sqrt(2 * layers)
    draw = lambda *sizes, by=deviation: torch.randn(*sizes, generator=random) * by
    weights = {"wte.weight": draw(vocabulary, width), "wpe.weight": draw(context, width)}
    norms = ["ln_f"]
    for block in (f"h.{i}" for i in range(layers)):
        norms += [f"{block}.ln_1", f"{block}.ln_2"]
        for name, inputs, outputs, by in (("attn.c_attn", width, 3 * width, deviation), ("attn.c_proj", width, width, of_residual),
                                          ("mlp.c_fc", width, 4 * width, deviation), ("mlp.c_proj", 4 * width, width, of_residual)):
            weights |= {f"{block}.{name}.weight": draw(inputs, outputs, by=by), f"{block}.{name}.bias": torch.zeros(outputs)}
    for name in norms:
        weights |= {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}
    folder.mkdir()
    save_file({f"transformer.{name}": value for name, value in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": vocabulary, "n_positions": context,
        "n_embd": width, "n_layer": layers, "n_head": heads, "activation_function": "gelu_new",
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "layer_norm_epsilon": 1e-5, "initializer_range": deviation,
        "tie_word_embeddings": True}))


def write_tokens(path: pathlib.Path, vocabulary: int, count: int) -> None:
    """Some ids are more frequent than others, so that the loss falls."""
    import torch

    random = torch.Generator().manual_seed(1)
    ids = torch.rand(count, generator=random) ** 3 * vocabulary
    path.write_bytes(ids.to(torch.uint16).numpy().tobytes())
