"""tools/figure.py draws what it is given, inside its frame."""
import math
import pathlib
import re
import sys
import unittest
import xml.etree.ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import figure

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*lines, height=200):
    text = figure.figure([figure.Panel("Loss & more", list(lines), height)], "step")
    return xml.etree.ElementTree.fromstring(text)


def points_of(picture):
    return [[tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
            for line in picture.iter(SVG + "polyline")]


class Figure(unittest.TestCase):
    def test_all_points_lie_in_the_frame_and_larger_values_higher(self):
        picture = drawn(figure.Line("a", [(1, 3.0), (2, 1.0), (3, 2.0)]))
        _, _, width, height = map(float, picture.get("viewBox").split())
        (line,) = points_of(picture)
        self.assertTrue(all(0 <= x <= width and 0 <= y <= height for x, y in line))
        self.assertTrue(line[0][1] < line[2][1] < line[1][1])
        self.assertTrue(line[0][0] < line[1][0] < line[2][0])

    def test_what_is_not_finite_leaves_a_gap(self):
        lines = points_of(drawn(figure.Line("a", [(1, 1), (2, 2), (3, math.nan), (4, 2), (5, math.inf), (6, 1)])))
        self.assertEqual([len(line) for line in lines], [2, 1, 1])

    def test_a_constant_has_a_height(self):
        ((first, last),) = points_of(drawn(figure.Line("a", [(1, 5), (2, 5)])))
        self.assertEqual(first[1], last[1])

    def test_nothing_finite_is_refused(self):
        with self.assertRaises(ValueError):
            drawn(figure.Line("a", [(1, math.nan)]))

    def test_ticks_are_round_and_inside(self):
        for least, most in [(0.2, 11.7), (-0.0031, 0.0042), (1e6, 1.3e6), (2.38571, 2.38612)]:
            found = figure.ticks(least, most)
            self.assertTrue(3 <= len(found) <= 7, found)
            step = found[1] - found[0]
            self.assertIn(round(step / 10 ** math.floor(math.log10(step * 1.000001)), 6), (1, 2, 5))
            self.assertTrue(all(least <= tick <= most for tick in found), found)

    def test_names_are_in_the_legend(self):
        text = "".join(drawn(figure.Line("BF16 <x>", [(1, 1), (2, 2)])).itertext())
        self.assertTrue(re.search("BF16 <x>", text) and "Loss & more" in text)


if __name__ == "__main__":
    unittest.main()
