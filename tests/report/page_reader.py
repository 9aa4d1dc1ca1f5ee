"""Pages read by parsers that others wrote: html5lib for the page, expat for its drawings.

Question, one of: {"page": path} or {"log": path}.
"""
import json
import re
import sys
import xml.etree.ElementTree as tree

import html5lib


def page(path: str) -> dict:
    text = open(path, encoding="utf-8").read()
    parser = html5lib.HTMLParser(strict=False, namespaceHTMLElements=False)
    document = parser.parse(text)
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    for drawing in drawings:
        tree.fromstring(drawing)
    elements = list(document.iter())
    handlers = [name for one in elements for name in one.attrib if isinstance(name, str) and name.startswith("on")]
    data = [json.loads(one.text) for one in elements if one.tag == "script" and one.get("type") == "application/json"]
    return {
        "faults": [f"{place}: {code}" for place, code, _ in parser.errors],
        "drawings": len(drawings),
        "tags": sorted({str(one.tag) for one in elements if isinstance(one.tag, str)}),
        "scripts": sum(1 for one in elements if one.tag == "script" and one.get("type") is None),
        "handlers": handlers,
        "references": sorted(set(re.findall(r"[a-z]+://[^\s\"'<>]*", text))),
        "fetches": [one.get(name) for one in elements for name in ("src", "href") if one.get(name) is not None],
        "data": data,
        "words": " ".join(" ".join(part for one in document.iter("main") for part in one.itertext()).split()),
        "headings": ["".join(one.itertext()) for one in elements if one.tag in ("h1", "h2", "h3")],
        "bytes": len(text.encode()),
    }


def log(path: str) -> list:
    return [json.loads(line) for line in open(path, encoding="utf-8") if line.endswith("\n")]


((what, where),) = json.load(sys.stdin).items()
json.dump({"page": page, "log": log}[what](where), sys.stdout)
