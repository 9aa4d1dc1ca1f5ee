"""Text from elsewhere in every name and field that a command prints: none of it reaches the terminal as it is.

Every command with every argument; every text of a log, a manifest, a configuration, a tokenizer and a model's folder, one
after another, without and with --json. What is printed has to be UTF-8 without controls, without the marks that turn the
direction of writing, and without a line that a name has begun.

A start of the program takes half a second, so that one text in six is tried; HALFSTEP_EVERY_TEXT=1 tries all."""
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

from program import PROGRAM, run, tiny_run

FAKE_LINE = "FAKE-LINE"
# C0 with whole escape sequences, DEL, C1, marks of direction, separators of lines, a byte order mark.
CONTROLS = ("a\x1b[31mb\x1b]0;title\x07c\rd\be\x7ff\u009b31mg\u0085h\u061ci\u200ej\u200fk\u2028l\u2029m\u202an\u202eo"
            "\u2066p\u2069q\ufeffr\n" + FAKE_LINE)
HOSTILE = CONTROLS.encode() + b"\xff\xfes\xc3\xed\xa0\x80t\xf5\x80\x80\x80u\xc0\xaf"  # and no UTF-8
FORBIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def faults_of(output: bytes) -> str:
    """What is wrong with what a command has printed, or nothing."""
    try:
        text = output.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error}: {output[max(0, error.start - 60):error.end + 20]!r}"
    if found := FORBIDDEN.search(text):
        return f"{found.group()!r} in {text[max(0, found.start() - 80):found.end() + 20]!r}"
    lines = text.splitlines()
    for before, line in zip(["", *lines], lines):
        # A paragraph is broken into lines of 80 columns, before a word that does not fit.
        if line.startswith(FAKE_LINE) and len(before) + 1 + len(line.split(" ")[0]) <= 80:
            return f"a line that a name began: {before!r}, {line!r}"
    return ""


def texts_of(value, way=()):
    """The way to each text and each key of a JSON value. Of a list, the first element stands for all."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield way + (key,), "key"
            yield from texts_of(inner, way + (key,))
    elif isinstance(value, list) and value:
        yield from texts_of(value[0], way + (0,))
    elif isinstance(value, str):
        yield way, "text"


def with_hostile(value, way, kind):
    """The value with one text or key replaced."""
    copy = json.loads(json.dumps(value))
    place = copy
    for part in way[:-1]:
        place = place[part]
    if kind == "key":
        place[CONTROLS] = place.pop(way[-1])
    else:
        place[way[-1]] = CONTROLS
    return copy


def commands(path=()):
    """Every command with its options that take a value, as its help has them."""
    told = run(*path, "--help").stdout
    options = re.findall(r"^  (?:-\w,)?(--[\w-]+) (?:[A-Z]|\{)", told, re.MULTILINE)
    yield path, options
    if "Subcommands:" in told:
        for name in re.findall(r"^  ([a-z]+) ", told.split("Subcommands:")[1], re.MULTILINE):
            yield from commands((*path, name))


def thinned(texts):
    """One in six, spread over all; all of them when asked for."""
    return list(texts)[::1 if os.environ.get("HALFSTEP_EVERY_TEXT") else 6]


class UntrustedText(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.scratch.cleanup)
        cls.folder = pathlib.Path(cls.scratch.name)
        corpus, config = tiny_run(cls.folder, 'steps = 4\n[checkpoint]\nevery = 2\n')
        cls.good = cls.folder / "good"
        done = run("train", str(config), "--folder", str(cls.good))
        assert done.returncode == 0, done.stderr

    def tell(self, *arguments, **environment):
        """Runs a command and looks at what it prints. Returns its exit code."""
        done = subprocess.run([PROGRAM, *arguments], capture_output=True, stdin=subprocess.DEVNULL, cwd=self.folder,
                              env={**os.environ, **environment}, timeout=120)
        for name, output in (("stdout", done.stdout), ("stderr", done.stderr)):
            self.assertEqual(faults_of(output), "", f"{name} of {arguments}")
        return done.returncode

    def copy_of_run(self, name="copy"):
        copy = self.folder / name if isinstance(name, str) else pathlib.Path(os.fsdecode(os.fsencode(self.folder) + b"/" + name))
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.good, copy)
        return copy

    def test_itself_notices_each_kind(self):
        for text in (HOSTILE, *(c.encode() for c in CONTROLS if FORBIDDEN.match(c)), f"a\n{FAKE_LINE}".encode(), b"\xff"):
            self.assertNotEqual(faults_of(text), "")

    def test_arguments_of_every_command(self):
        found = list(commands())
        self.assertGreater(len(found), 15)
        self.assertGreater(sum(len(options) for _, options in found), 15)
        for path, options in found:
            with self.subTest(path):
                self.tell(*path, HOSTILE)
                self.tell(*path, b"--" + HOSTILE)
                for option in thinned(options):
                    self.tell(*path, option, HOSTILE)

    def test_arguments_where_the_rest_is_right(self):
        good = str(self.good)
        corpus = str(self.folder / "corpus.txt")
        for arguments in (["train", "--preset", "tiny", "--print-config", "--folder", HOSTILE],
                          ["train", "--preset", "tiny", "--dry-run", "--folder", HOSTILE],
                          ["train", "--preset", "tiny", "--print-config", "--set", b"data.train=[\"" + HOSTILE + b"\"]"],
                          ["train", "--preset", "tiny", "--print-config", "--set", b"precision.compute=" + HOSTILE],
                          ["train", "--preset", "tiny", "--print-config", "--set", HOSTILE + b"=1"],
                          ["report", good, "-o", HOSTILE + b".html"], ["report", good, "-o", b"none/" + HOSTILE],
                          ["compare", good, HOSTILE], ["compare", good, good, "--html", HOSTILE + b".html"],
                          ["checkpoint", "export", good, "--part", HOSTILE, "-o", "out.safetensors"],
                          ["checkpoint", "export", good, "-o", HOSTILE],
                          ["tokenize", "--tokenizer", "bytes", "--out", HOSTILE + b".bin", corpus],
                          ["tokenize", "--tokenizer", "bytes", "--out", "ids.bin", HOSTILE],
                          ["tokenize", "--tokenizer", "bytes", "--end-token", HOSTILE, "--out", "ids.bin", corpus],
                          ["preset", "show", HOSTILE], ["explain", "policy", HOSTILE]):
            with self.subTest(arguments[:2]):
                self.tell(*arguments)
                self.tell(*arguments, "--json")

    def test_environment(self):
        for name in ("HALFSTEP_TRAIN_STEPS", "HALFSTEP_PRECISION_COMPUTE", "HALFSTEP_DATA_TRAIN", "HALFSTEP_NO_SUCH_KEY",
                     "HALFSTEP_ISA", "OMP_NUM_THREADS", "COLUMNS", "TERM"):
            with self.subTest(name):
                self.tell("train", "--preset", "tiny", "--print-config", **{name: os.fsdecode(HOSTILE)})
                self.tell("env", **{name: os.fsdecode(HOSTILE)})

    def test_a_folder_of_that_name(self):
        copy = self.copy_of_run(HOSTILE)
        for arguments in (["report", copy], ["compare", self.good, copy], ["train", self.folder / "run.toml", "--folder", copy],
                          *(["checkpoint", name, copy] for name in ("ls", "inspect", "verify")),
                          *(["checkpoint", name, copy, "--step", "2"] for name in ("pin", "unpin", "rm"))):
            with self.subTest(arguments[:2]):
                self.tell(*map(os.fsencode, arguments))
                self.tell(*map(os.fsencode, arguments), "--json")

    def test_every_field_of_a_log(self):
        copy = self.copy_of_run()
        lines = (self.good / "log.jsonl").read_text().splitlines()
        kinds = {}
        for number, line in enumerate(lines):
            kinds.setdefault(json.loads(line)["kind"], number)
        for kind, number in kinds.items():
            record = json.loads(lines[number])
            for way, what in thinned(texts_of(record)):
                if what == "key" and kind != "end":
                    continue  # names that nobody asks for are passed over
                with self.subTest((kind, way, what)):
                    changed = [*lines[:number], json.dumps(with_hostile(record, way, what)), *lines[number + 1:]]
                    (copy / "log.jsonl").write_text("\n".join(changed) + "\n")
                    self.tell("report", copy)
                    if kind == "run":
                        self.tell("compare", self.good, copy, "--json")
        (copy / "log.jsonl").write_bytes(b"\n".join([HOSTILE.replace(b"\n", b" "), *(line.encode() for line in lines)]))
        self.tell("report", copy)

    def test_every_field_of_a_manifest(self):
        copy = self.copy_of_run()
        manifest = next(copy.glob("**/step-000000004/manifest.json"))
        value = json.loads(manifest.read_text())
        del value["sha256"]
        seen = set()
        for way, what in texts_of(value):
            names = tuple(part for part in way if isinstance(part, str))
            if len(names) > 2 and names[:1] == ("parts",) and (key := (names[0], len(names), what)) in seen:
                continue  # one tensor is like the other
            seen.add((names[0], len(names), what))
            with self.subTest((way, what)):
                body = json.dumps(with_hostile(value, way, what))[:-1]
                manifest.write_text(f'{body},\n"sha256":"{hashlib.sha256(body.encode()).hexdigest()}"}}\n')
                self.tell("checkpoint", "inspect", copy)
                if len(way) == 1:
                    self.tell("checkpoint", "verify", copy, "--json")
                    self.tell("checkpoint", "ls", copy)

    def test_every_text_of_a_configuration(self):
        text = (self.folder / "run.toml").read_text()
        quoted = json.dumps(CONTROLS)
        for hostile in (re.sub(r'"[^"]*"', lambda _: quoted, text), text + f"\n{quoted} = 1\n", text + f"\n[{quoted}]\na = 1\n",
                        text.replace("kind", quoted), text + "\n" + CONTROLS):
            path = self.folder / "hostile.toml"
            path.write_text(hostile)
            self.tell("train", path, "--print-config")
        (self.folder / "hostile.toml").write_bytes(text.encode() + b"\n# " + HOSTILE)
        self.tell("train", self.folder / "hostile.toml", "--print-config")
        copy = self.copy_of_run()
        (copy / "config.toml").write_text(re.sub(r'"[^"]*"', lambda _: quoted, (copy / "config.toml").read_text()))
        self.tell("train", self.folder / "run.toml", "--folder", copy)

    def test_every_text_of_a_tokenizer(self):
        value = {"version": "1.0", "truncation": None, "padding": None,
                 "added_tokens": [{"id": 4, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False,
                                   "normalized": False, "special": True}],
                 "normalizer": None, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                                                       "use_regex": True},
                 "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                                                     "use_regex": True},
                 "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                           "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                           "vocab": {"a": 0, "b": 1, "ab": 2, "c": 3}, "merges": ["a b"]}}
        path = self.folder / "tokenizer.json"
        for way, what in texts_of(value):
            with self.subTest((way, what)):
                path.write_text(json.dumps(with_hostile(value, way, what)))
                self.tell("tokenize", "--tokenizer", path, "--out", "ids.bin", self.folder / "corpus.txt")
        path.write_bytes(HOSTILE)
        self.tell("tokenize", "--tokenizer", path, "--out", "ids.bin", self.folder / "corpus.txt")

    def test_every_text_of_a_models_folder(self):
        model, copy = self.good / "model", self.folder / "model"
        arguments = ["train", self.folder / "run.toml", "--folder", self.folder / "never", "--dry-run",
                     "--set", f"model.from={json.dumps(str(copy))}"]
        config = json.loads((model / "config.json").read_text())
        for way, what in texts_of(config):
            with self.subTest((way, what)):
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(model, copy)
                (copy / "config.json").write_text(json.dumps(with_hostile(config, way, what)))
                self.tell(*arguments)
        raw = (model / "model.safetensors").read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:8 + length])
        first = next(name for name in header if name != "__metadata__")
        for way, what in [((first,), "key"), ((first, "dtype"), "text"), ((first, "dtype"), "key")]:
            with self.subTest((way, what)):
                text = json.dumps(with_hostile(header, way, what)).encode()
                (copy / "config.json").write_text(json.dumps(config))
                (copy / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length:])
                self.tell(*[argument for argument in arguments if argument != "--dry-run"])


if __name__ == "__main__":
    unittest.main()
