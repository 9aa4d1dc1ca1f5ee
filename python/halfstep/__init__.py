"""Halfstep: mixed-precision training for LibTorch.

The command is `halfstep`. A C++ project finds the library by

    cmake -DCMAKE_PREFIX_PATH="$(python -c 'import halfstep; print(halfstep.cmake_prefix_path)')" ...

and find_package(Halfstep CONFIG REQUIRED). LibTorch is that of the package torch in the same environment.
"""
import importlib.util
import os
import pathlib
import sys

_folder = pathlib.Path(__file__).resolve().parent

#: For CMAKE_PREFIX_PATH.
cmake_prefix_path = str(_folder)

_NEEDED = "2.13."


def _torch_folder() -> pathlib.Path:
    """That of the package torch, which is not imported: it would take seconds."""
    beside = _folder.parent / "torch"
    if (beside / "lib/libtorch_cpu.so").exists():
        return beside
    sys.path[:] = [entry for entry in sys.path if entry]  # nobody's folder called torch where we happen to be
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        sys.exit(f"halfstep: this Python ({sys.executable}) has no torch. pip install 'torch=={_NEEDED}*'")
    return pathlib.Path(found.submodule_search_locations[0])


def _version_of(torch: pathlib.Path) -> str:
    for line in (torch / "version.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split("=")[1].strip(" '\"")
    return "of an unknown version"


def main() -> None:
    """Becomes the program."""
    torch = _torch_folder()
    version = _version_of(torch)
    if not version.startswith(_NEEDED):
        sys.exit(f"halfstep: torch in {torch} is {version}, and another minor version than {_NEEDED}* has another C++ "
                 f"ABI. pip install 'torch=={_NEEDED}*'")
    if torch.parent != _folder.parent:  # the program looks beside itself
        before = os.environ.get("LD_LIBRARY_PATH")
        os.environ["LD_LIBRARY_PATH"] = f"{torch / 'lib'}:{before}" if before else str(torch / "lib")
    program = _folder / "bin/halfstep"
    os.execv(program, ["halfstep", *sys.argv[1:]])
