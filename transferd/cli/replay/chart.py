"""A picture of hit rate over storage size as SVG: one line for each host size, the knee of each marked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from transferd.cli.replay.sizing import SizePoint, gigabytes, knees

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 40, 48, 64
COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")  # legible on white and on black
STYLE = """
  svg { color: #1f2937; background: #ffffff; font: 13px system-ui, sans-serif }
  text { fill: currentColor }
  .grid { stroke: currentColor; stroke-opacity: 0.15 }
  .curve { fill: none; stroke-width: 2.5 }
  .knee { stroke-dasharray: 4 4; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) { svg { color: #e5e7eb; background: #111827 } }
"""


def chart(points: Sequence[SizePoint], title: str) -> str:
    """The picture as one self-contained SVG document.

    Sizes are evenly spaced, smallest first, because they usually double from one to the next.
    """
    body = [*_axes(points), *_curves(points), *_knees(points)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        f'<text x="{LEFT}" y="26" font-size="16" font-weight="600">{escape(title)}</text>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _sizes(points: Sequence[SizePoint]) -> list[int]:
    return sorted({point.storage_bytes for point in points})


def _x(points: Sequence[SizePoint], storage: int) -> float:
    sizes = _sizes(points)
    return LEFT + (WIDTH - LEFT - RIGHT) * sizes.index(storage) / max(1, len(sizes) - 1)


def _top(points: Sequence[SizePoint]) -> int:
    """The highest percentage on the axis: the next full 20 above every point."""
    return math.ceil(max(point.hits for point in points) * 5) * 20 or 20


def _y(points: Sequence[SizePoint], share: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - share * 100 / _top(points))


def _axes(points: Sequence[SizePoint]) -> Iterator[str]:
    for percent in range(0, _top(points) + 1, 5 if _top(points) <= 40 else 20):
        y = _y(points, percent / 100)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>'
    for size in _sizes(points):
        x = _x(points, size)
        yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{gigabytes(size)}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{middle:.1f}" y="{HEIGHT - 18}" text-anchor="middle">storage size</text>'


def _curves(points: Sequence[SizePoint]) -> Iterator[str]:
    hosts = sorted({point.host_bytes for point in points})
    for number, host in enumerate(hosts):
        color = COLORS[number % len(COLORS)]
        line = [point for point in points if point.host_bytes == host]
        places = [(_x(points, point.storage_bytes), _y(points, point.hits)) for point in line]
        yield f'<polyline class="curve" stroke="{color}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'
        for (x, y), point in zip(places, line, strict=True):
            title = f"{gigabytes(point.storage_bytes)} of storage: {point.hits:.1%} without prefill"
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"><title>{title}</title></circle>'
        x, y = WIDTH - RIGHT - 8, TOP + 16 * number
        yield f'<text x="{x}" y="{y}" text-anchor="end" style="fill:{color}">{gigabytes(host)} of host memory</text>'


def _knees(points: Sequence[SizePoint]) -> Iterator[str]:
    for point in knees(points):
        x, y, base = _x(points, point.storage_bytes), _y(points, point.hits), _y(points, 0)
        yield f'<line class="knee" stroke="currentColor" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{base:.1f}"/>'
        yield f'<text x="{x + 6:.1f}" y="{base - 8:.1f}">knee: {point.hits:.0%}</text>'
