"""`halfstep checkpoint` against the safetensors package and hashlib, on a run that a C++ program saved."""
import hashlib
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

import safetensors.torch
import torch

from program import ask, run

SAMPLE_RUN = os.environ["HALFSTEP_SAMPLE_RUN"]


class CheckpointCommand(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.run = pathlib.Path(self.folder.name) / "run"
        subprocess.run([SAMPLE_RUN, self.run], check=True)
        self.tensors = self.run / "step-000000002" / "tensors.safetensors"

    def test_inspect_lists_what_the_safetensors_package_finds(self):
        answer = ask("checkpoint", "inspect", str(self.run))
        self.assertEqual((answer["step"], answer["steps"]), (2, [1, 2]))
        found = safetensors.torch.load_file(self.tensors)
        listed = {f"{part}/{name}": tensor for part, values in answer["parts"].items()
                  for name, tensor in values["tensors"].items()}
        self.assertEqual(set(found), set(listed))
        for name, tensor in found.items():
            self.assertEqual(list(tensor.shape), listed[name]["shape"], name)
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            self.assertEqual(hashlib.sha256(raw).hexdigest(), listed[name]["sha256"], name)
        self.assertEqual(answer["parts"]["optimizer"]["values"]["optimizer"], "AdamW")
        self.assertIn("libtorch", answer["fingerprint"])
        self.assertIn("model: ", run("checkpoint", "inspect", str(self.run)).stdout)

    def test_the_manifest_is_sealed_by_the_hash_of_what_stands_before(self):
        text = (self.run / "step-000000002" / "manifest.json").read_text()
        body, seal = text.rsplit(",\n\"sha256\":\"", 1)
        self.assertEqual(hashlib.sha256(body.encode()).hexdigest() + "\"}\n", seal)
        self.assertEqual(json.loads(text)["halfstep_checkpoint"], 1)

    def test_verify_says_which_tensor_of_which_step_is_damaged(self):
        self.assertEqual(ask("checkpoint", "verify", str(self.run)), {"1": [], "2": []})
        damaged = bytearray(self.tensors.read_bytes())
        damaged[-1] ^= 1
        self.tensors.write_bytes(damaged)
        done = run("checkpoint", "verify", str(self.run), "--json")
        self.assertEqual(done.returncode, 3)
        faults = json.loads(done.stdout)
        self.assertEqual(faults["1"], [])
        self.assertEqual(len(faults["2"]), 1)
        self.assertIn("is damaged", faults["2"][0])
        self.assertIn("1 of 2 checkpoints damaged", done.stderr)
        self.assertEqual(run("checkpoint", "verify", str(self.run), "--step", "1").returncode, 0)

    def test_a_step_may_be_given_as_it_stands_in_the_folders_name(self):
        self.assertEqual(ask("checkpoint", "inspect", str(self.run), "--step", "000000001")["step"], 1)
        for text in ("0x2", "-1", "1e0", ""):
            self.assertEqual(run("checkpoint", "inspect", str(self.run), "--step", text).returncode, 2, text)

    def test_ls_shows_a_damaged_one_among_the_others(self):
        manifest = self.run / "step-000000001" / "manifest.json"
        manifest.write_text(manifest.read_text().replace("step", "stop", 1))
        rows = ask("checkpoint", "ls", str(self.run))
        self.assertIn("damaged", rows[0])
        self.assertEqual(rows[1]["step"], 2)
        self.assertIn("DAMAGED", run("checkpoint", "ls", str(self.run)).stdout)

    def test_export_writes_a_part_and_full_precision_weights(self):
        to = str(self.run.parent / "out.safetensors")
        ask("checkpoint", "export", str(self.run), "--part", "model", "-o", to)
        saved = safetensors.torch.load_file(self.tensors)
        exported = safetensors.torch.load_file(to)
        self.assertEqual({f"model/{name}" for name in exported}, {name for name in saved if name.startswith("model/")})
        for name, tensor in exported.items():
            self.assertTrue(torch.equal(tensor, saved[f"model/{name}"]), name)

        ask("checkpoint", "export", str(self.run), "--part", "precision", "--full-precision", "-o", to)
        weights = safetensors.torch.load_file(to)
        for name, weight in weights.items():
            # A split master: the FP32 bits are the BF16 code, ties rounded away, and 16 bits that correct it.
            working = saved[f"precision/working.{name}"]
            self.assertEqual(weight.dtype, torch.float32)
            self.assertLessEqual((weight - working.float()).abs().max().item(),
                                 2.0 ** -8 * working.float().abs().max().item(), name)
            self.assertGreater((weight - working.float()).abs().max().item(), 0, name)

    def test_what_is_not_there_is_said(self):
        for arguments, words in [(("inspect", str(self.run / "none")), "none"),
                                 (("inspect", str(self.run.parent)), "no checkpoints"),
                                 (("export", str(self.run), "--part", "modle", "-o", "/dev/null"), "It has 'model'")]:
            done = run("checkpoint", *arguments)
            self.assertEqual(done.returncode, 3, arguments)
            self.assertIn(words, done.stderr)
        self.assertEqual(run("checkpoint", "export", str(self.run)).returncode, 2)


if __name__ == "__main__":
    unittest.main()
