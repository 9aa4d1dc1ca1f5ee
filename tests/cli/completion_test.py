"""`halfstep completion` and `halfstep manual`: asked in the shells themselves, and compared with --help."""
import functools
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

from program import run

# What bash does when a person presses Tab: it sets these variables and calls what `complete` registered.
ASK_BASH = r"""
source "$1"
complete -p halfstep >/dev/null || exit 9
compopt() { :; }   # only a running completion may call it
COMP_LINE=$2 COMP_POINT=${#2} COMP_WORDS=($2) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_halfstep halfstep
printf '%s\n' "${COMPREPLY[@]}"
"""


@functools.cache
def help_of(*path):
    return run(*path, "--help").stdout


def commands_of(*path):
    """The commands that --help lists."""
    listed = help_of(*path).partition("Subcommands:\n")[2]
    return re.findall(r"^  (\w+)", listed, re.M)


def options_of(*path):
    return set(re.findall(r"(?:^  |,)(--[\w-]+)", help_of(*path), re.M))


def all_paths(*path):
    yield path
    for name in commands_of(*path):
        yield from all_paths(*path, name)


class Bash(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.temporary.cleanup)
        cls.folder = pathlib.Path(cls.temporary.name)
        cls.script = cls.folder / "halfstep"
        done = run("completion", "bash")
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        cls.script.write_text(done.stdout)
        for name in ("run one.toml", "runs"):
            (cls.folder / name).mkdir() if name == "runs" else (cls.folder / name).touch()

    def tab(self, line):
        done = subprocess.run(["bash", "--norc", "-c", ASK_BASH, "bash", self.script, line], cwd=self.folder,
                              capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""), line)
        return [word for word in done.stdout.splitlines() if word]

    def test_offers_every_command_and_option_that_help_lists(self):
        paths = list(all_paths())
        self.assertGreater(len(paths), 8)
        for path in paths:
            line = " ".join(("halfstep", *path, ""))
            if commands_of(*path):
                self.assertEqual(self.tab(line), commands_of(*path), line)
            self.assertEqual({word for word in self.tab(line + "--")}, options_of(*path), line)

    def test_offers_the_words_that_an_option_takes(self):
        self.assertEqual(self.tab("halfstep tokenize --format "), ["nanogpt", "llmc"])
        self.assertEqual(self.tab("halfstep tokenize --format l"), ["llmc"])
        self.assertEqual(self.tab("halfstep tokenize --format=l"), ["llmc"])  # bash sees a word behind '='
        self.assertEqual(self.tab("halfstep completion "), ["bash", "zsh", "fish"])
        self.assertEqual(self.tab("halfstep tokenize --end-token "), [])

    def test_an_options_value_is_not_taken_for_a_command(self):
        self.assertEqual(self.tab("halfstep tokenize --end-token env --form"), ["--format"])

    def test_offers_files(self):
        self.assertEqual(sorted(self.tab("halfstep tokenize r")), ["run one.toml", "runs"])
        self.assertEqual(sorted(self.tab("halfstep tokenize --out r")), ["run one.toml", "runs"])

    @unittest.skipUnless("train" in commands_of(), "this program cannot train")
    def test_offers_keys_their_words_and_presets(self):
        keys = self.tab("halfstep train --set optimizer.")
        self.assertIn("optimizer.lr=", keys)
        self.assertTrue(all(key.startswith("optimizer.") for key in keys))
        self.assertEqual(self.tab("halfstep train --set optimizer.kind="), ["adamw", "sgd"])
        self.assertEqual(self.tab("halfstep train --set x=y --set=optimizer.kind=s"), ["sgd"])
        self.assertEqual(self.tab("halfstep train --set log.tensorboard=t"), ["true"])
        self.assertIn("fp32", self.tab("halfstep train --set precision.ops.softmax="))
        self.assertEqual(self.tab("halfstep train --set model.from=runs"), ["runs"])
        presets = self.tab("halfstep train --preset ")
        self.assertIn("tiny", presets)
        self.assertEqual(presets, self.tab("halfstep preset show "))


class OtherShells(unittest.TestCase):
    def ask(self, shell, script):
        if shutil.which(shell) is None:
            self.skipTest(f"{shell} is not installed")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / ("_halfstep" if shell == "zsh" else "halfstep.fish")
            path.write_text(run("completion", shell).stdout)
            done = subprocess.run([shell, *script(path)], capture_output=True, text=True,
                                  env={**os.environ, "HOME": folder})
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def test_zsh_reads_it(self):
        self.ask("zsh", lambda path: ["-n", path])
        loaded = self.ask("zsh", lambda path: [
            "-f", "-c", f"fpath=({path.parent} $fpath); autoload -Uz compinit; compinit -u -D; echo $_comps[halfstep]"])
        self.assertEqual(loaded, "_halfstep\n")

    def test_fish_offers_commands_and_words(self):
        def tab(line):
            told = self.ask("fish", lambda path: ["--no-config", "-c", f"source {path}; complete -C '{line}'"])
            return {row.partition("\t")[0] for row in told.splitlines()}
        self.assertEqual(tab("halfstep "), set(commands_of()))
        self.assertEqual(tab("halfstep checkpoint "), set(commands_of("checkpoint")))
        self.assertEqual(tab("halfstep tokenize --format "), {"nanogpt", "llmc"})
        self.assertLessEqual(options_of("tokenize"), tab("halfstep tokenize --"))


class Manual(unittest.TestCase):
    def test_groff_has_nothing_to_warn_of_and_shows_every_command_and_option(self):
        if shutil.which("groff") is None:
            self.skipTest("groff is not installed")
        page = run("manual").stdout
        done = subprocess.run(["groff", "-man", "-Tascii", "-ww", "-P-cbou"], input=page, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for path in all_paths():
            if not commands_of(*path):
                self.assertIn(" ".join(("halfstep", *path)), done.stdout)
            for option in options_of(*path) - {"--help"}:
                self.assertRegex(done.stdout, rf"(?m)^ .*{option}\b")
        for words in ("optimizer.lr", "HALFSTEP_TORCH", "EXIT STATUS"):
            self.assertIn(words, done.stdout)


if __name__ == "__main__":
    unittest.main()
