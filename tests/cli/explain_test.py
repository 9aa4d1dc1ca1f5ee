"""`halfstep explain model`, and `halfstep explain policy` against the running dispatcher's own lists, asked of Python's torch."""
import pathlib
import re
import tempfile
import unittest

import torch

from program import ask, run, tiny_run


def stock_list(key):
    """The operations that stock LibTorch registers for an autocast key; no Halfstep is loaded here."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    # Only a LibTorch with CUDA has _cudnn_rnn, which casts a recurrent layer's weights into one buffer: it has no row.
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")} - {"_cudnn_rnn"}


class ExplainPolicy(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rows = {row["op"]: row for row in ask("explain", "policy")}

    def test_every_operation_of_both_engine_lists_has_a_row_and_a_reason(self):
        for column, key in [("stock_cpu", "AutocastCPU"), ("stock_cuda", "AutocastCUDA")]:
            listed = {op for op, row in self.rows.items() if row[column] != "not listed"}
            self.assertEqual(listed, stock_list(key))
        for row in self.rows.values():
            self.assertGreater(len(row["reason"]), 20, row)
            self.assertIn(row["rule"], {"low", "fp32", "promote", "first", "as is"}, row)

    def test_the_difference_is_exactly_the_rows_that_a_stock_device_treats_otherwise(self):
        def same(rule, stock):
            return rule == stock or (rule == "as is" and stock == "not listed")

        expected = {op for op, row in self.rows.items()
                    if not (same(row["rule"], row["stock_cpu"]) and same(row["rule"], row["stock_cuda"]))}
        self.assertEqual({row["op"] for row in ask("explain", "policy", "--diff", "stock")}, expected)
        self.assertIn("softmax.int", expected)
        self.assertNotIn("bmm", expected)

    def test_the_plain_form_fits_80_columns_and_names_every_operation(self):
        for arguments in [(), ("--diff", "stock")]:
            text = run("explain", "policy", *arguments).stdout
            self.assertLessEqual(max(map(len, text.splitlines())), 80)
        words = set(run("explain", "policy").stdout.replace(",", " ").split())
        self.assertEqual(set(self.rows) - words, set())

    def test_it_says_what_stays_in_fp32_where_this_processor_lacks_the_type(self):
        flags = set(re.search(r"^flags\s*:(.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
        text = run("explain", "policy").stdout
        for low, has_products in (("bf16", bool(flags & {"avx512_bf16", "amx_bf16"})), ("fp16", "avx512_fp16" in flags)):
            stays = {op for op, row in self.rows.items() if row["on_this_cpu"][low] != row["rule"]}
            for op in ("conv2d", "conv_transpose1d", "gru.input", "lstm.input", "rnn_tanh.data"):
                self.assertEqual(op in stays, not has_products, op)
            for op in ("linear", "mm", "softmax.int", "gru_cell", "cudnn_convolution"):
                self.assertNotIn(op, stays)
            self.assertTrue(all(self.rows[op]["on_this_cpu"][low] == "fp32" for op in stays))
            self.assertEqual(f"FP32 IN A {low.upper()} SCOPE" in text, bool(stays))

    def test_an_unknown_policy_to_compare_with_is_refused(self):
        done = run("explain", "policy", "--diff", "torch")
        self.assertEqual(done.returncode, 2)
        self.assertIn("stock", done.stderr)


class ExplainModel(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        _, self.config = tiny_run(pathlib.Path(scratch.name), "steps = 6\n")

    def test_every_weight_of_two_dimensions_has_a_line_and_a_reason(self):
        told = ask("explain", "model", str(self.config), "--precision", "mxfp8")
        reasons = {layer["weight"]: layer["reason"] for layer in told["layers"]}
        self.assertIn("an embedding", reasons.values())
        self.assertIn("the first linear layer", reasons.values())
        self.assertIn("the last linear layer", reasons.values())
        self.assertEqual({layer["quantised"] for layer in told["layers"] if layer["reason"] == "follows the recipe"},
                         {True})
        self.assertEqual(set(told["products"]), {"forward", "input_grad", "weight_grad"})
        plain = run("explain", "model", str(self.config), "--precision", "mxfp8").stdout
        for name, reason in reasons.items():
            self.assertTrue(any(name in line and reason in line for line in plain.splitlines()), name)

    def test_without_a_recipe_it_says_so(self):
        self.assertIn("No recipe", run("explain", "model", str(self.config)).stdout)

    def test_a_rule_that_fits_no_weight_is_refused(self):
        done = run("explain", "model", str(self.config), "--precision", "nvfp4", "--set",
                   'precision.keep_high=["nobody"]')
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("nobody", done.stderr)


if __name__ == "__main__":
    unittest.main()
