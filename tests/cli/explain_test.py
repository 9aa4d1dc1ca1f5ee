"""`halfstep explain policy` against the running dispatcher's own lists, asked of Python's torch."""
import unittest

import torch

from program import ask, run


def stock_list(key):
    """The operations that stock LibTorch registers for an autocast key; no Halfstep is loaded here."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


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

    def test_an_unknown_policy_to_compare_with_is_refused(self):
        done = run("explain", "policy", "--diff", "torch")
        self.assertEqual(done.returncode, 2)
        self.assertIn("stock", done.stderr)


if __name__ == "__main__":
    unittest.main()
