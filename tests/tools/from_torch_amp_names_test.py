"""docs/from-torch-amp.md has every public name of the installed torch's mixed precision, and Transformer Engine's."""
import dataclasses
import inspect
import pathlib
import re
import unittest

import torch
from torch.distributed import fsdp

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/from-torch-amp.md").read_text()
LEFT_COLUMNS = "\n".join(re.findall(r"^\| (.*?) \| ", PAGE, re.MULTILINE))
WORDS = set(re.findall(r"\w+", LEFT_COLUMNS))

# Not installed here. Arguments, recipes and fields of transformer_engine/common/recipe/__init__.py at commit 000b637.
OF_TRANSFORMER_ENGINE = """
fp8_autocast autocast enabled calibrating fp8_recipe recipe fp8_group amax_reduction_group
Format E2M1 E4M3 E5M2 HYBRID MMParams use_split_accumulator
QParams power_2_scale amax_epsilon random_hadamard_transform stochastic_rounding fp4_2d_quantization
DelayedScaling margin fp8_format amax_history_len amax_compute_algo scaling_factor_compute_algo reduce_amax fp8_dpa fp8_mha
backward_override interval override_linear_precision
Float8CurrentScaling use_power_2_scales fp8_quant_fwd_inp fp8_quant_fwd_weight fp8_quant_bwd_grad
fp8_gemm_fprop fp8_gemm_dgrad fp8_gemm_wgrad MXFP8BlockScaling
Float8BlockScaling use_f32_scales x_block_scaling_dim w_block_scaling_dim grad_block_scaling_dim
MXFP4QATMXFP8BlockScaling MXFP4QATFloat8BlockScaling
NVFP4BlockScaling disable_rht disable_stochastic_rounding disable_2d_quantization row_scaled_activation
nvfp4_4over6 nvfp4_4over6_e4m3_use_256 nvfp4_4over6_err_mode fp4_format CustomRecipe qfactory
""".split()


def arguments(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def public(of):
    return [name for name in vars(of) if not name.startswith("_")]


class FromTorchAmpNames(unittest.TestCase):
    def assert_on_page(self, names, least):
        self.assertGreaterEqual(len(names), least)
        self.assertEqual([name for name in names if name not in WORDS], [])

    def test_torch_amp(self):
        self.assert_on_page(torch.amp.__all__, 5)
        self.assert_on_page(arguments(torch.amp.autocast.__init__), 4)
        self.assert_on_page(arguments(torch.amp.custom_fwd)[1:] + arguments(torch.amp.custom_bwd)[1:], 3)

    def test_grad_scaler(self):
        self.assert_on_page(arguments(torch.amp.GradScaler.__init__), 6)
        self.assert_on_page(public(torch.amp.GradScaler), 14)
        self.assert_on_page(arguments(torch.amp.GradScaler.update), 1)

    def test_fsdp(self):
        for policy, least in ((fsdp.MixedPrecision, 7), (fsdp.MixedPrecisionPolicy, 4)):
            self.assert_on_page([policy.__name__, *(field.name for field in dataclasses.fields(policy))], least + 1)

    def test_transformer_engine(self):
        self.assert_on_page(OF_TRANSFORMER_ENGINE, 55)

    def test_a_name_that_is_missing_is_noticed(self):
        with self.assertRaises(AssertionError):
            self.assert_on_page(["autocast", "get_growth_factors"], 2)

    def test_every_row_answers(self):
        for row in re.findall(r"^\| `.*$", PAGE, re.MULTILINE):
            self.assertRegex(row, r"^\| .+ \| .*\w.* \|$")


if __name__ == "__main__":
    unittest.main()
