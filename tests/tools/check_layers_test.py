"""tools/check_layers.py can fail: each kind of wrong #include, alone in a small tree, is found and named."""
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

CHECK = pathlib.Path(__file__).resolve().parents[2] / "tools" / "check_layers.py"

GOOD = {
    "include/halfstep/error.h": "#include <string>\n",
    "src/base/error.cpp": "#include <halfstep/error.h>\n",
    "src/kernels/scalar.cpp": '#include "formats/traits.h"\n#include "kernels/scalar.h"\n',
    "src/memory/allocator.cpp": "#include <c10/core/Allocator.h>\n",
    "src/tensor/machine.cpp": "#include <ATen/Context.h>\n#include <halfstep/machine.h>\n",
    "src/cli/env.cpp": '#include <halfstep/machine.h>\n#include "cli/commands.h"\n',
}


def check(extra):
    """Exit code and output of the check on GOOD with these files added or replaced."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / "tools").mkdir()
        shutil.copy(CHECK, root / "tools")
        for name, text in {**GOOD, **extra}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        done = subprocess.run([sys.executable, root / "tools" / CHECK.name], capture_output=True, text=True)
        return done.returncode, done.stdout


class CheckLayers(unittest.TestCase):
    def assert_fault(self, name, text, *words):
        code, output = check({name: text})
        self.assertEqual(code, 1, output)
        self.assertEqual(len(output.splitlines()), 1, output)
        for word in (name, *words):
            self.assertIn(word, output)

    def test_a_good_tree_passes(self):
        self.assertEqual(check({})[0], 0)

    def test_including_a_higher_room_fails(self):
        self.assert_fault("src/formats/cast.cpp", '#include "kernels/scalar.h"\n', "formats", "kernels")

    def test_including_a_higher_rooms_public_header_fails(self):
        self.assert_fault("src/base/log.cpp", "\n#include <halfstep/scaling.h>\n", ":2:", "base", "scaling")

    def test_including_a_room_above_that_is_not_named_fails(self):
        self.assert_fault("src/scaling/scaler.cpp", '#include "kernels/cast.h"\n', "scaling", "may not know kernels")
        self.assert_fault("src/scaling/scaler.cpp", '#include "optim/adamw.h"\n', "scaling", "optim")

    def test_a_table_that_has_drifted_fails(self):
        code, output = check({"docs/architecture.md": "| room | what lives there | knows |\n|---|---|---|\n"})
        self.assertEqual(code, 1, output)
        self.assertIn("--write", output)

    def test_an_edge_that_nobody_uses_fails(self):
        code, output = check({"docs/architecture.md": ""})
        self.assertEqual(code, 1, output)
        self.assertIn("kernels may know base, and includes nothing of it", output)
        self.assertNotIn("kernels may know formats", output)

    def test_torch_below_memory_fails(self):
        for header in ("torch/torch.h", "ATen/Tensor.h", "c10/core/Device.h"):
            self.assert_fault("src/kernels/fast.cpp", f"#include <{header}>\n", header)

    def test_a_private_header_in_the_command_fails(self):
        self.assert_fault("src/cli/explain.cpp", '#include "tensor/views.h"\n', "public headers only")

    def test_a_public_header_without_a_room_fails(self):
        self.assert_fault("include/halfstep/surprise.h", "", "unlisted header surprise.h")

    def test_a_room_without_a_place_fails(self):
        self.assert_fault("src/attic/old.cpp", "", "attic")


if __name__ == "__main__":
    unittest.main()
