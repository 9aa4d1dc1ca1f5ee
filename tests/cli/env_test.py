"""`halfstep env` against /proc/cpuinfo, Python's torch, and the code that oneDNN generates."""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import torch

from program import ask, run

# The kernel's names of what each of our features stands for.
CPUINFO_FLAGS = {
    "AVX2": {"avx2", "fma", "f16c"},
    "AVX-512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "AVX512-BF16": {"avx512_bf16"},
    "AVX512-FP16": {"avx512_fp16"},
    "AMX-BF16": {"amx_tile", "amx_bf16"},
    "AMX-INT8": {"amx_tile", "amx_int8"},
    "AMX-FP16": {"amx_tile", "amx_fp16"},
}

MULTIPLY = """
import sys, torch
a = torch.ones(128, 128, dtype=getattr(torch, sys.argv[1]))
a @ a
"""


def instructions_that_multiply(dtype):
    """The multiplying instructions in the machine code that oneDNN writes for a product of this type."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", MULTIPLY, dtype], cwd=folder, check=True,
                       env={**os.environ, "ONEDNN_JIT_DUMP": "1"})
        listing = "".join(
            subprocess.run(["objdump", "-D", "-b", "binary", "-m", "i386:x86-64", code], check=True,
                           capture_output=True, text=True).stdout
            for code in pathlib.Path(folder).glob("*.bin"))
    return set(re.findall(r"\b(tdp\w+|vdpbf16ps|vfmadd\w+)\b", listing))


class Cpu(unittest.TestCase):
    def test_features_are_those_that_the_kernel_lists(self):
        flags = set(re.search(r"^flags\s*:(.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.M)[1].split())
        expected = {name: needed <= flags for name, needed in CPUINFO_FLAGS.items()}
        self.assertEqual(ask("env")["cpu"]["features"], expected)

    def test_counts_the_cpus_that_this_process_may_use(self):
        allowed = os.sched_getaffinity(0)
        self.assertEqual(ask("env")["cpu"]["logical_cpus"], len(allowed))
        confined = ask("env", prefix=("taskset", "-c", str(min(allowed))))
        self.assertEqual(confined["cpu"]["logical_cpus"], 1)

    def test_precisions_are_computed_by_the_instructions_that_it_names(self):
        cpu = ask("env")["cpu"]
        features, told = cpu["features"], cpu["precisions"]
        bf16, fp16 = instructions_that_multiply("bfloat16"), instructions_that_multiply("float16")
        # Below these features LibTorch uses loops of its own, which multiply in FP32: no code is generated.
        self.assertEqual((bool(bf16), bool(fp16)), (features["AVX-512"], features["AVX512-FP16"]))
        self.assertEqual("tdpbf16ps" in bf16, told["BF16"]["reason"].startswith("AMX-BF16"), bf16)
        self.assertEqual(bool(bf16 & {"tdpbf16ps", "vdpbf16ps"}), told["BF16"]["support"] == "native", bf16)
        multiplies_fp16 = any(name == "tdpfp16ps" or name.endswith("ph") for name in fp16)
        self.assertEqual(multiplies_fp16, told["FP16"]["support"] == "native", fp16)

    def test_tf32_is_fp32_when_called_unavailable(self):
        self.assertEqual(ask("env")["cpu"]["precisions"]["TF32"]["support"], "unavailable")
        a = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
        in_fp32 = a @ a
        self.addCleanup(setattr, torch.backends.mkldnn.matmul, "fp32_precision",
                        torch.backends.mkldnn.matmul.fp32_precision)
        torch.backends.mkldnn.matmul.fp32_precision = "tf32"
        self.assertTrue(torch.equal(a @ a, in_fp32))


class Torch(unittest.TestCase):
    def setUp(self):
        self.machine = ask("env")

    def test_loaded_library_is_the_one_that_python_loads(self):
        told = self.machine["torch"]
        self.assertEqual(told["loaded"], torch.__version__.split("+")[0])
        self.assertEqual(told["cpu_kernels"], torch.backends.cpu.get_cpu_capability())
        self.assertEqual(told["threads"], torch.get_num_threads())
        self.assertEqual(told["interop_threads"], torch.get_num_interop_threads())

    def test_parts_of_the_library_are_those_that_its_configuration_lists(self):
        told, configuration = self.machine["torch"], torch.__config__.show()
        for name, pattern in {"onednn": r"MKL-DNN v([\d.]+)", "mkl": r"Math Kernel Library Version ([\d.]+)"}.items():
            found = re.search(pattern, configuration)
            self.assertEqual(told[name], found[1] if found else None, name)
        self.assertEqual(told["gloo_built"], torch.distributed.is_gloo_available())

    def test_cuda_is_as_python_finds_it(self):
        told = self.machine["cuda"]
        self.assertEqual(told["built"], torch.version.cuda is not None)
        self.assertEqual(told["available"], torch.cuda.is_available())
        devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
        self.assertEqual([tuple(device["compute_capability"]) for device in told["devices"]],
                         [torch.cuda.get_device_capability(i) for i in devices])


class Warnings(unittest.TestCase):
    def test_none_on_an_ordinary_machine(self):
        self.assertEqual(ask("env")["warnings"], [])

    def test_a_limit_on_instructions_is_told_by_name_and_value(self):
        warnings = ask("env", ONEDNN_MAX_CPU_ISA="AVX2")["warnings"]
        self.assertEqual(len(warnings), 1)
        self.assertIn("ONEDNN_MAX_CPU_ISA=AVX2", warnings[0])


class Plain(unittest.TestCase):
    def test_fits_a_terminal_of_80_columns(self):
        plain = run("env", ONEDNN_MAX_CPU_ISA="AVX2", DNNL_MAX_CPU_ISA="AVX2").stdout
        self.assertEqual(plain.count("Warning: "), 2)
        for line in plain.splitlines():
            self.assertLessEqual(len(line), 80, line)

    def test_says_of_each_precision_what_json_says(self):
        plain = run("env").stdout
        for name, row in ask("env")["cpu"]["precisions"].items():
            self.assertRegex(plain, rf"(?m)^{name} +{row['support']} +{re.escape(row['reason'])}$")


class Kernels(unittest.TestCase):
    def test_the_isa_in_use_is_told_and_can_be_chosen(self):
        self.assertEqual(ask("env", HALFSTEP_ISA="scalar")["cpu"]["kernels"], "scalar")
        features = ask("env")["cpu"]["features"]
        has_tiles = features["AMX-BF16"] and features["AVX-512"] and features["AVX512-BF16"]
        widest = (
            "amx" if has_tiles else "avx512" if features["AVX-512"] else "avx2" if features["AVX2"] else "scalar"
        )
        self.assertEqual(ask("env")["cpu"]["kernels"], widest)

    def test_an_unknown_isa_is_refused_with_those_there_are(self):
        done = run("env", HALFSTEP_ISA="avx1024")
        self.assertEqual(done.returncode, 1)
        self.assertIn("avx1024", done.stderr)
        self.assertIn("scalar", done.stderr)


if __name__ == "__main__":
    unittest.main()
