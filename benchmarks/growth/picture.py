"""docs/growth.svg: a panel for each axis, what a unit costs against the smallest size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

ACROSS = 3  # panels beside each other
WIDTH, HEIGHT = 320, 230  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 52, 18, 40, 40
STYLE = """
  svg { color: #1f2937; background: #ffffff; font: 12px system-ui, sans-serif }
  text { fill: currentColor }
  .grid { stroke: currentColor; stroke-opacity: 0.15 }
  .flat { stroke: currentColor; stroke-opacity: 0.6; stroke-dasharray: 4 4 }
  .line { fill: none; stroke: #2563eb; stroke-width: 2.5 }
  .spread { stroke: #2563eb; stroke-opacity: 0.5; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) { svg { color: #e5e7eb; background: #111827 } }
"""


def picture(axes: Sequence[dict[str, Any]]) -> str:
    """One self-contained SVG document. axes: as Axis.tree makes them.

    Sizes are evenly spaced, and a step upwards is twice the cost. The dashed line is the cost at the smallest size.
    """
    across, down = min(ACROSS, len(axes)), math.ceil(len(axes) / ACROSS)
    title = "What a unit of work costs as one thing grows, against the smallest size"
    panels = []
    for number, axis in enumerate(axes):
        place = f"translate({WIDTH * (number % ACROSS)} {HEIGHT * (number // ACROSS)})"
        panels.append("\n".join([f'<g transform="{place}">', *_panel(axis), "</g>"]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * across} {HEIGHT * down}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n" + "\n".join(panels) + "\n</svg>\n"
    )


def _panel(axis: dict[str, Any]) -> Iterator[str]:
    points = axis["points"]
    low = math.floor(min(-1.0, *(math.log2(point["ratio"]) for point in points)))
    high = math.ceil(max(1.0, *(math.log2(point["ratio"]) for point in points)))

    def x(number: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * number / max(1, len(points) - 1)

    def y(ratio: float) -> float:
        share = (min(max(math.log2(ratio), low), high) - low) / (high - low)
        return TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - share)

    yield f'<text x="{LEFT}" y="22" font-weight="600">{escape(axis["unit"])} by {escape(axis["title"])}</text>'
    for power in range(low, high + 1, max(1, (high - low) // 5)):
        at = y(2.0**power)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        told = f"{2**power}" if power >= 0 else f"1/{2**-power}"
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{told}</text>'
    yield f'<line class="flat" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(1.0):.1f}" y2="{y(1.0):.1f}"/>'
    for number, point in enumerate(points):
        at, half, ratio = x(number), point["spread"] / 2, point["ratio"]
        yield f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_short(point["size"])}</text>'
        bottom, top = y(ratio * max(1.0 - half, 2.0**low)), y(ratio * (1.0 + half))
        yield f'<line class="spread" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom:.1f}" y2="{top:.1f}"/>'
        told = f"{point['size']:,}: {ratio:.2f} (spread {point['spread']:.0%})"
        yield f'<circle cx="{at:.1f}" cy="{y(ratio):.1f}" r="3.5" fill="#2563eb"><title>{told}</title></circle>'
    line = " ".join(f"{x(number):.1f},{y(point['ratio']):.1f}" for number, point in enumerate(points))
    yield f'<polyline class="line" points="{line}"/>'


def _short(size: int) -> str:
    return f"{size // 1000}k" if size >= 1000 and size % 1000 == 0 else f"{size}"
