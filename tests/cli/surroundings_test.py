"""`halfstep` where the shell, the disk or other processes are not as usual: closed descriptors, pipes and devices
where a file was expected, two runs that begin at once, names that a terminal would obey."""
import json
import os
import pathlib
import re
import stat
import subprocess
import tempfile
import threading
import unittest

from program import PROGRAM, run, tiny_run

# Sets the title of a terminal's window, then the colour, the latter by a C1 control (U+009B).
ATTACK = "\033]0;owned\007\u009b31m"
CONTROLS = re.compile(rb"[\x00-\x09\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")


class Surroundings(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        self.text, self.config = tiny_run(self.folder, "steps = 4\n")

    def shell(self, command):
        return subprocess.run(["bash", "-c", command], cwd=self.folder, capture_output=True)

    def ids(self):
        """What `tokenize --tokenizer bytes` writes."""
        return b"".join(byte.to_bytes(2, "little") for byte in self.text.read_bytes())

    def tokenize(self, out, *more):
        return run("tokenize", "--tokenizer", "bytes", "--out", str(out), *more, str(self.text))

    def test_closed_descriptors_do_not_become_the_log(self):
        for closed in (">&- 2>&-", "<&- >&- 2>&-", "2>&-", "<&-"):
            with self.subTest(closed):
                done = self.shell(f"rm -rf a && {PROGRAM} train run.toml --folder a {closed}")
                self.assertEqual(done.returncode, 0, done.stderr)
                lines = (self.folder / "a" / "log.jsonl").read_text().splitlines()
                self.assertEqual([json.loads(line)["kind"] for line in lines].count("step"), 4)

    def test_runs_that_begin_in_the_same_second_have_a_folder_each(self):
        # One of eight is late if the machine is busy; in every second there are still several.
        started = [subprocess.Popen([PROGRAM, "train", str(self.config)], cwd=self.folder,
                                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(8)]
        for process in started:
            errors = process.communicate()[1]
            self.assertEqual(process.returncode, 0, errors)
        folders = list((self.folder / "runs").iterdir())
        self.assertEqual(len(folders), len(started))
        for folder in folders:
            records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
            self.assertEqual([record["kind"] for record in records].count("step"), 4)

    def test_run_that_cannot_begin_leaves_no_folder(self):
        done = subprocess.run([PROGRAM, "train", str(self.config), "--set", f"data.tokenizer={self.text}"],
                              cwd=self.folder, capture_output=True)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertEqual(list((self.folder / "runs").iterdir()), [])

    def assert_harmless(self, done, *words):
        self.assertNotEqual(done.returncode, 0)
        self.assertIsNone(CONTROLS.search(done.stdout + done.stderr), done.stderr[:2000])
        for word in words:
            self.assertIn(word, done.stderr.decode())

    def test_names_of_files_and_tokenizers_send_nothing_to_the_terminal(self):
        name = f"{ATTACK}.txt"
        missing = subprocess.run([PROGRAM, "tokenize", "--tokenizer", "bytes", "--out", "ids.bin", name],
                                 cwd=self.folder, capture_output=True)
        self.assert_harmless(missing, "\\x1b]0;owned\\x07\\u009b31m.txt")
        (self.folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": ATTACK}}))
        refused = self.shell(f"{PROGRAM} tokenize --tokenizer tokenizer.json --out ids.bin corpus.txt")
        self.assert_harmless(refused, "the type '\\x1b]0;owned\\x07\\u009b31m'")

    def pretrained(self, tensors, **config):
        """What a run says that starts from a Hugging Face folder with these names of tensors."""
        folder = self.folder / "pretrained"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({
            "model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, **config}))
        header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in tensors},
                            ensure_ascii=False, separators=(",", ":")).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        return self.shell(f"{PROGRAM} train --set model.from=pretrained --set data.tokenizer=bytes "
                          "--set data.train=corpus.txt --set data.sequence_length=16 --folder a")

    def test_names_in_a_model_send_nothing_to_the_terminal(self):
        self.assert_harmless(self.pretrained([], rope_scaling={"rope_type": ATTACK}), "\\x1b]0;owned")
        self.assert_harmless(self.pretrained([], hidden_act=ATTACK), "\\x1b]0;owned")
        self.assert_harmless(self.pretrained([], model_type=ATTACK), "\\u009b")
        self.assert_harmless(self.pretrained([ATTACK]), "\\x1b]0;owned")

    def test_two_hundred_thousand_wrong_names_do_not_fill_the_screen(self):
        done = self.pretrained([f"{i:06}{ATTACK}" for i in range(200_000)])
        self.assert_harmless(done, "'000009", " more")
        self.assertLess(len(done.stderr), 4_000)

    def through_pipe(self, *command):
        """What a command wrote into a pipe, whose path is added to it."""
        pipe = self.folder / "pipe"
        if not pipe.exists():
            os.mkfifo(pipe)
        received = []
        reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
        reader.start()
        done = run(*command, str(pipe))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(stat.S_ISFIFO(os.lstat(pipe).st_mode))
        reader.join(10)
        return received[0]

    def test_pipe_is_written_and_stays_a_pipe(self):
        ids = self.through_pipe("tokenize", "--tokenizer", "bytes", str(self.text), "--out")
        self.assertEqual(ids, self.ids())
        self.shell(f"{PROGRAM} train run.toml --folder a")
        page = self.through_pipe("report", str(self.folder / "a"), "-o")
        self.assertTrue(page.startswith(b"<!DOCTYPE html>") and page.rstrip().endswith(b"</html>"), page[:100])
        for option in ((), ("--full-precision",)):
            file = self.through_pipe("checkpoint", "export", str(self.folder / "a/checkpoints"),
                                     "--part", "precision", *option, "-o")
            header = json.loads(file[8:8 + int.from_bytes(file[:8], "little")])
            self.assertIn("transformer.wte.weight", " ".join(header))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
            self.assertEqual(len(file), 8 + int.from_bytes(file[:8], "little") + max(ends))

    def test_device_is_written_and_stays_a_device(self):
        node, link = self.folder / "node", self.folder / "link"
        try:
            os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null, in a folder of our own
            node.write_bytes(b"")
        except PermissionError as refusal:
            self.skipTest(f"no device can be made here: {refusal}")
        link.symlink_to(node)
        for out in (node, link):
            done = self.tokenize(out)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertTrue(stat.S_ISCHR(os.lstat(node).st_mode))
            self.assertTrue(link.is_symlink())
        self.assertEqual({path.name for path in self.folder.iterdir()}, {"node", "link", "corpus.txt", "run.toml"})

    def test_standard_output_holds_the_file_alone_and_its_link_stays(self):
        link = self.folder / "stdout"
        link.symlink_to("/proc/self/fd/1")  # as /dev/stdout, in a folder of our own
        piped = self.shell(f"{PROGRAM} tokenize --tokenizer bytes --out stdout corpus.txt")
        self.assertEqual((piped.returncode, piped.stdout), (0, self.ids()), piped.stderr)
        self.assertIn(b"tokens", piped.stderr)
        redirected = self.shell(f"{PROGRAM} tokenize --tokenizer bytes --out stdout corpus.txt > ids.bin")
        self.assertEqual(redirected.returncode, 0, redirected.stderr)
        self.assertEqual((self.folder / "ids.bin").read_bytes(), self.ids())
        self.assertTrue(link.is_symlink())

    def test_format_that_cannot_be_streamed_is_refused(self):
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        done = self.tokenize(pipe, "--format", "llmc")  # there is no reader: opening it would wait for ever
        self.assertEqual(done.returncode, 3)
        self.assertIn("is a pipe or a device", done.stderr)
        self.assertTrue(stat.S_ISFIFO(os.lstat(pipe).st_mode))


if __name__ == "__main__":
    unittest.main()
