"""The launcher of the packages, with imitations of LibTorch, of Python and of the program that it becomes."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

LAUNCHER = os.environ["HALFSTEP_LAUNCHER"]
NEEDED = os.environ["HALFSTEP_TORCH_VERSION"]

PROGRAM = """#!/bin/sh
echo "$LD_LIBRARY_PATH"
for word; do echo "$word"; done
exit 7
"""


class Launcher(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name).resolve()
        for folder in ("bin", "libexec/halfstep", "path", "elsewhere"):
            (self.root / folder).mkdir(parents=True)
        self.launcher = self.root / "bin/halfstep"
        shutil.copy(LAUNCHER, self.launcher)
        self.script(self.root / "libexec/halfstep/halfstep", PROGRAM)

    @staticmethod
    def script(path, text):
        path.write_text(text)
        path.chmod(0o755)

    def torch(self, folder, version=NEEDED + ".1+cpu", package=True):
        """An imitation of the Python package, or of the archive libtorch."""
        folder = self.root / folder
        (folder / "lib").mkdir(parents=True)
        (folder / "lib/libtorch_cpu.so").touch()
        if package:
            (folder / "version.py").write_text(f"from typing import Optional\n__version__ = '{version}'\ndebug = False\n")
        else:
            (folder / "build-version").write_text(version + "\n")
        return folder

    def run_in(self, *arguments, python=None, **environment):
        """With a python3 that finds torch at `python`, or none."""
        self.script(self.root / "path/python3", f"#!/bin/sh\necho '{python}'\n" if python else "#!/bin/sh\nexit 1\n")
        return subprocess.run([self.launcher, *arguments], capture_output=True, text=True, cwd=self.root / "elsewhere",
                              env={"PATH": f"{self.root}/path:/bin", **{k: str(v) for k, v in environment.items()}})

    def expect(self, done, folder, *arguments):
        self.assertEqual(done.stderr, "")
        self.assertEqual(done.returncode, 7)
        self.assertEqual(done.stdout.splitlines(), [str(folder / "lib"), *arguments])

    def test_finds_torch_by_the_variable_first_then_the_environment_then_python(self):
        given = self.torch("given")
        active = self.torch("active/lib/python3.11/site-packages/torch")
        of_python = self.torch("of_python")
        self.expect(self.run_in(HALFSTEP_TORCH=given, VIRTUAL_ENV=self.root / "active", python=of_python), given)
        self.expect(self.run_in(VIRTUAL_ENV=self.root / "active", python=of_python), active)
        self.expect(self.run_in(VIRTUAL_ENV=self.root / "elsewhere", python=of_python), of_python)
        self.expect(self.run_in(python=of_python), of_python)

    def test_the_variable_may_name_an_environment_or_an_archive(self):
        package = self.torch("venv/lib/python3.12/site-packages/torch")
        self.expect(self.run_in(HALFSTEP_TORCH=self.root / "venv"), package)
        archive = self.torch("libtorch", package=False)
        self.expect(self.run_in(HALFSTEP_TORCH=archive), archive)

    def test_arguments_and_libraries_of_the_user_are_kept(self):
        torch = self.torch("torch")
        done = self.run_in("train", "--set", "a b=*", HALFSTEP_TORCH=torch, LD_LIBRARY_PATH="/mine")
        self.assertEqual(done.stdout.splitlines(), [f"{torch}/lib:/mine", "train", "--set", "a b=*"])

    def test_is_found_through_a_link(self):
        torch = self.torch("torch")
        link = self.root / "elsewhere/halfstep"
        link.symlink_to(self.launcher)
        done = subprocess.run([link], capture_output=True, text=True, env={"HALFSTEP_TORCH": str(torch)})
        self.assertEqual(done.returncode, 7, done.stderr)

    def test_another_minor_version_is_refused_with_what_to_install(self):
        major, minor = NEEDED.split(".")
        for version in (f"{major}.{int(minor) + 1}.0", f"{major}.{minor}0.0", f"{major}.{minor[:-1]}.0", ""):
            folder = self.torch(f"of {version}", version)
            done = self.run_in(HALFSTEP_TORCH=folder)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            for words in (str(folder), "HALFSTEP_TORCH", version or "of an unknown version", f"torch=={NEEDED}.*"):
                self.assertIn(words, done.stderr)

    def test_a_variable_that_names_nothing_is_refused_even_if_python_has_torch(self):
        done = self.run_in(HALFSTEP_TORCH=self.root / "elsewhere", python=self.torch("torch"))
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn(f"HALFSTEP_TORCH is {self.root}/elsewhere", done.stderr)

    def test_without_any_torch_it_says_where_it_looked_and_what_to_install(self):
        done = self.run_in(VIRTUAL_ENV=self.root / "elsewhere")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        for words in (f"needs LibTorch {NEEDED}", "HALFSTEP_TORCH is not set", f"{self.root}/elsewhere has no torch",
                      "python3 has no torch", f"pip install 'torch=={NEEDED}.*'"):
            self.assertIn(words, done.stderr)

    def test_a_folder_called_torch_in_the_current_one_is_not_torch(self):
        mine = self.torch("elsewhere/torch")
        (mine / "__init__.py").touch()
        done = subprocess.run([self.launcher], capture_output=True, text=True, cwd=self.root / "elsewhere",
                              env={"PATH": "/usr/bin:/bin"})
        self.assertNotIn(str(mine), done.stdout)

    def test_a_package_without_its_program_says_so(self):
        (self.root / "libexec/halfstep/halfstep").unlink()
        done = self.run_in(HALFSTEP_TORCH=self.torch("torch"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("libexec/halfstep/halfstep: No such file", done.stderr)


if __name__ == "__main__":
    unittest.main()
