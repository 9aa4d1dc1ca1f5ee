#!/usr/bin/env python3
"""Writes src/jinja/case_ranges.h: upper, lower and title case as Python's `str` has them, code point by code point.

    .venv/bin/python tools/case_ranges.py > src/jinja/case_ranges.h
"""
import unicodedata

PER_LINE = 5


def rows(mapping: dict[int, int]) -> list[tuple[int, int, int, int]]:
    """first, last, step, shift: neighbours one or two apart that move by as much."""
    found = []
    for code, to in sorted(mapping.items()):
        shift = to - code
        if found:
            first, last, step, same = found[-1]
            gap = code - last
            if same == shift and (gap == step or (first == last and gap in (1, 2))):
                found[-1] = (first, code, gap, shift)
                continue
        found.append((code, code, 1, shift))
    return found


def array(kind: str, name: str, cells: list[str]) -> str:
    lines = ["  " + ", ".join(cells[i:i + PER_LINE]) + "," for i in range(0, len(cells), PER_LINE)]
    return f"inline constexpr {kind} {name}[] = {{\n" + "\n".join(lines) + "\n};\n"


def table(name: str, change, without_table) -> str:
    """Of the code points outside ASCII that `change` makes something else of than `without_table`."""
    characters = [chr(code) for code in range(0x80, 0x110000) if not 0xD800 <= code <= 0xDFFF]
    changed = {ord(c): change(c) for c in characters if change(c) != without_table(c)}
    single = {code: ord(to) for code, to in changed.items() if len(to) == 1}
    ranges = [f"{{0x{a:X}, 0x{b:X}, {step}, {shift}}}" for a, b, step, shift in rows(single)]
    escaped = lambda text: "".join(f"\\u{ord(c):04X}" if ord(c) >= 0x80 else c for c in text)
    texts = [f'{{0x{code:X}, "{escaped(to)}"}}' for code, to in changed.items() if len(to) > 1]
    return array("CaseRange", f"k{name}", ranges) + array("CaseText", f"k{name}Texts", texts)


def main() -> None:
    print(f"// Made by tools/case_ranges.py from Python's str, Unicode {unicodedata.unidata_version}: do not edit.")
    print("// clang-format off\n#pragma once\n\n#include <cstdint>\n#include <string_view>\n\nnamespace halfstep::python {\n")
    print("/// The code points from `first` to `last`, every `step`th, become themselves plus `shift`.")
    print("struct CaseRange {\n  uint32_t first, last;\n  uint32_t step;\n  int32_t shift;\n};\n")
    print("/// One code point that becomes several.\nstruct CaseText {\n  uint32_t code_point;\n  std::string_view text;\n};\n")
    print(table("Upper", str.upper, lambda c: c))
    print(table("Lower", lambda c: "\u03c3" if c == "\u03a3" else c.lower(), lambda c: c))
    print("// Where it is not upper case.")
    print(table("Title", str.title, str.upper))
    print("// clang-format on\n}  // namespace halfstep::python")


if __name__ == "__main__":
    main()
