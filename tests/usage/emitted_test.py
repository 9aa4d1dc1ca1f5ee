"""A program that usage_fuzz prints is C++ that compiles against Halfstep and LibTorch alone, and runs.

emitted_test.py FUZZER COMPILER HALFSTEP_LIBRARY HALFSTEP_INCLUDE TORCH_PREFIX [FLAG...]
"""
import pathlib
import random
import subprocess
import sys
import tempfile


def main():
    fuzzer, compiler, library, include, torch = sys.argv[1:6]
    flags = [flag for flag in sys.argv[6:] if flag]
    seed = random.SystemRandom().randrange(10**9)
    print(f"seed {seed}", flush=True)
    source = subprocess.run([fuzzer, "--program", str(seed), "--print"], capture_output=True, text=True, check=True)
    library = pathlib.Path(library)
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder, "program")
        program.with_suffix(".cpp").write_text(source.stdout)
        torch_lib = f"{torch}/lib"
        subprocess.run(
            [compiler, "-std=c++20", "-O0", *flags, "-I", include, "-isystem", f"{torch}/include", "-isystem",
             f"{torch}/include/torch/csrc/api/include", f"{program}.cpp", "-o", program, library,
             f"-Wl,-rpath,{library.parent}", f"-L{torch_lib}", f"-Wl,-rpath,{torch_lib}", "-Wl,--no-as-needed",
             "-ltorch_cpu", "-ltorch", "-lc10", "-pthread"],
            check=True)
        done = subprocess.run([program], cwd=folder, capture_output=True, text=True)
        # Its marks have no derived bounds: it has to come to its end, whatever it says of the differences.
        if done.returncode not in (0, 1) or not done.stdout.rstrip().endswith("disagreements"):
            sys.exit(f"seed {seed}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        print(done.stdout)


main()
