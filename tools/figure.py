"""Line plots as SVG text, with no library. For docs/: readable on white and on black."""
import dataclasses
import math
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, TITLE, GAP, AXIS = 760, 64, 16, 24, 26, 34
# Told apart by people who see few colours too, and on both backgrounds.
COLOURS = ("#3b7dd8", "#d9822b", "#2f9e6b", "#b5559e", "#7a7f87")
STYLE = """<style>
  svg { font: 12px system-ui, sans-serif; color: #1f2328; }
  @media (prefers-color-scheme: dark) { svg { color: #e6edf3; } }
  text { fill: currentColor; }
  .grid { stroke: currentColor; stroke-opacity: 0.15; }
  .line { fill: none; stroke-linejoin: round; }
</style>"""


@dataclasses.dataclass
class Line:
    name: str
    points: list  # of (x, y)
    colour: int = 0


@dataclasses.dataclass
class Panel:
    title: str
    lines: list
    height: int = 220
    overlaid: bool = False  # curves that lie on one another: the first is drawn widest, the last on top


def ticks(least: float, most: float, count: int = 5) -> list[float]:
    """Round numbers that lie within the range: 1, 2 or 5 times a power of ten apart."""
    if not most > least:
        return [least]
    raw = (most - least) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.7 * raw)
    first = math.ceil(least / step - 1e-9)
    return [i * step for i in range(first, math.floor(most / step + 1e-9) + 1)]


def label(value: float) -> str:
    return f"{value:.10g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.0e}"


def figure(panels: list[Panel], x_title: str) -> str:
    """Panels above one another over the same x axis. Points that are not finite leave a gap."""
    finite = lambda point: all(map(math.isfinite, point))
    xs = [x for panel in panels for line in panel.lines for x, y in line.points if finite((x, y))]
    if not xs:
        raise ValueError("figure: no point is finite")
    x_least, x_most = min(xs), max(xs)
    x_at = lambda x: LEFT + (WIDTH - LEFT - RIGHT) * (x - x_least) / ((x_most - x_least) or 1)
    parts, top = [], 0
    for panel in panels:
        parts.append(draw_panel(panel, top, x_at, ticks(x_least, x_most, 8), finite))
        top += TITLE + panel.height + GAP
    for tick in ticks(x_least, x_most, 8):
        parts.append(f'<text x="{x_at(tick):.1f}" y="{top - GAP + 16}" text-anchor="middle">{label(tick)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{top - GAP + AXIS}" text-anchor="middle">{escape(x_title)}</text>')
    height = top - GAP + AXIS + 8
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
            f"<title>{escape(panels[0].title)}</title>\n{STYLE}\n" + "\n".join(parts) + "\n</svg>\n")


def draw_panel(panel: Panel, top: float, x_at, x_ticks, finite) -> str:
    ys = [y for line in panel.lines for x, y in line.points if finite((x, y))]
    least, most = (min(ys), max(ys)) if ys else (0, 1)
    margin = 0.04 * (most - least) or 0.04 * abs(most) or 1
    least, most = least - margin, most + margin
    first, last = top + TITLE, top + TITLE + panel.height
    y_at = lambda y: last - (last - first) * (y - least) / (most - least)
    parts = [f'<text x="{LEFT}" y="{top + 16}" font-weight="600">{escape(panel.title)}</text>']
    for tick in ticks(least, most):
        parts.append(f'<path class="grid" d="M{LEFT} {y_at(tick):.1f}H{WIDTH - RIGHT}"/>'
                     f'<text x="{LEFT - 6}" y="{y_at(tick) + 4:.1f}" text-anchor="end">{label(tick)}</text>')
    for tick in x_ticks:
        parts.append(f'<path class="grid" d="M{x_at(tick):.1f} {first}V{last}"/>')
    legend_right = WIDTH - RIGHT
    for i, line in enumerate(panel.lines):
        width = 1.4 + (2 * (len(panel.lines) - 1 - i) if panel.overlaid else 0)
        for run in unbroken(line.points, finite):
            at = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in run)
            parts.append(f'<polyline class="line" stroke="{COLOURS[line.colour]}" stroke-width="{width:.1f}" '
                         f'points="{at}"/>')
    for line in reversed(panel.lines):
        colour = COLOURS[line.colour]
        legend_right -= 7 * len(line.name) + 26
        parts.append(f'<path d="M{legend_right} {top + 12}h14" stroke="{colour}" stroke-width="3"/>'
                     f'<text x="{legend_right + 18}" y="{top + 16}">{escape(line.name)}</text>')
    return "\n".join(parts)


def unbroken(points: list, finite) -> list[list]:
    runs = [[]]
    for point in points:
        if finite(point):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
