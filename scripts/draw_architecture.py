"""Draw docs/architecture.svg: the folders of transferd/, who may import whom, and the way of a task.

    python scripts/draw_architecture.py            writes the picture
    python scripts/draw_architecture.py --check    exit 1 if the picture is not what the tree says

The sentence in each box is the first one of the folder's own docstring, and the columns are the import order that
tests/test_tidy.py checks, so the picture cannot say anything else than the code.
"""

from __future__ import annotations

import ast
import itertools
import sys
import textwrap
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "transferd"
PICTURE = ROOT / "docs" / "architecture.svg"

# Rows from what knows nothing of the others (bottom) to what puts everything together (top).
ROWS = [
    ["adapters", "cli"],
    ["workers", "daemon"],
    ["storage", "client"],
    ["wire", "tiers"],
    ["observability", "control"],
    ["tasks", "barrier", "config", "blocks"],
    ["errors", "runtime"],
]
# The way of a write task: the upper line goes out, the lower one comes back.
# Each stop: its column, its name, and what it hands to the next (on the way back: gets from the next).
OUT = [
    (0, "client", "task"),
    (1, "wire", "message"),
    (2, "daemon", "event"),
    (3, "control", "start"),
    (4, "workers", "copy, put"),
    (5, "tiers, storage", ""),
]
BACK = [
    (0, "client", "result"),
    (2, "daemon", "reply"),
    (3, "control", "merged"),
    (4, "barrier", "each rank"),
    (5, "workers", ""),
]
WIDTH, BOX_HEIGHT, GAP, MARGIN, LETTERS = 1180, 82, 14, 24, 7.0
FLOW_BOX, FLOW_HEIGHT, FLOW_TOP, STACK_TOP = 112.0, 40.0, 58.0, 250.0
STYLE = """
  .paper { fill: #ffffff } .box { fill: #f3f6fa; stroke: #8aa0b8 } .stop { fill: #fff4ea; stroke: #d2691e }
  text { font-family: sans-serif; fill: #1c2733 } .name { font-size: 16px; font-weight: bold } .says { font-size: 12px }
  .centre { font-size: 14px; font-weight: bold; text-anchor: middle } .step { font-size: 12px; text-anchor: middle }
  .flow { stroke: #d2691e; stroke-width: 2; fill: none; marker-end: url(#head) } .head { fill: #d2691e }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #14181d } .box { fill: #1f2730; stroke: #4d6278 } .stop { fill: #33241a } text { fill: #e6edf3 }
  }
"""

Box = tuple[float, float, float, float]  # x, y, width, height


def sentence(name: str) -> str:
    """The first sentence of a folder's or file's docstring."""
    path = PACKAGE / name / "__init__.py"
    docstring = ast.get_docstring(ast.parse((path if path.exists() else PACKAGE / f"{name}.py").read_text()))
    assert docstring, name
    return " ".join(docstring.split("\n\n")[0].split()).split(". ")[0].rstrip(".") + "."


def layout() -> dict[str, Box]:
    """Where each box is; a row's boxes share its width."""
    boxes: dict[str, Box] = {}
    for row, names in enumerate(ROWS):
        width = (WIDTH - 2 * MARGIN - GAP * (len(names) - 1)) / len(names)
        for column, name in enumerate(names):
            boxes[name] = (
                MARGIN + column * (width + GAP),
                STACK_TOP + 16 + row * (BOX_HEIGHT + GAP),
                width,
                BOX_HEIGHT,
            )
    return boxes


def draw_box(name: str, box: Box) -> str:
    x, y, width, height = box
    lines = textwrap.wrap(sentence(name), int((width - 24) / LETTERS))[:3]
    label = name + ("" if (PACKAGE / f"{name}.py").exists() else "/")
    text = [f'<text class="name" x="{x + 12:.0f}" y="{y + 22:.0f}">{label}</text>']
    text += [
        f'<text class="says" x="{x + 12:.0f}" y="{y + 41 + 16 * i:.0f}">{escape(line)}</text>'
        for i, line in enumerate(lines)
    ]
    return f'<rect class="box" x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height}" rx="6"/>\n' + "\n".join(
        text
    )


def draw_flow(stops: list[tuple[int, str, str]], top: float, *, back: bool) -> str:
    """A line of boxes with an arrow between each two; `back` points to the left."""
    step = (WIDTH - 2 * MARGIN - FLOW_BOX) / max(column for column, _, _ in OUT)
    parts = []
    for column, name, _ in stops:
        x = MARGIN + column * step
        parts.append(
            f'<rect class="stop" x="{x:.0f}" y="{top:.0f}" width="{FLOW_BOX:.0f}" height="{FLOW_HEIGHT:.0f}" rx="6"/>\n'
            f'<text class="centre" x="{x + FLOW_BOX / 2:.0f}" y="{top + 25:.0f}">{name}</text>'
        )
    for (column, _, handed), (following, _, _) in itertools.pairwise(stops):
        left, right = MARGIN + column * step + FLOW_BOX + 4, MARGIN + following * step - 4
        start, end = (right, left) if back else (left, right)
        middle = top + FLOW_HEIGHT / 2
        parts.append(
            f'<path class="flow" d="M {start:.0f} {middle:.0f} L {end:.0f} {middle:.0f}"/>\n'
            f'<text class="step" x="{(left + right) / 2:.0f}" y="{top - 8:.0f}">{escape(handed)}</text>'
        )
    return "\n".join(parts)


def picture() -> str:
    """The whole SVG."""
    height = STACK_TOP + 16 + len(ROWS) * (BOX_HEIGHT + GAP) + MARGIN
    parts = [
        f'<text class="name" x="{MARGIN}" y="28">The way of a write task</text>',
        draw_flow(OUT, FLOW_TOP, back=False),
        draw_flow(BACK, FLOW_TOP + 84, back=True),
        f'<text class="name" x="{MARGIN}" y="{STACK_TOP:.0f}">The folders: each imports only from rows below it, '
        "and from the left in its own row</text>",
        *(draw_box(name, box) for name, box in layout().items()),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">\n'
        "<title>The folders of transferd and the way of a write task through them</title>\n"
        f"<style>{STYLE}</style>\n"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path class="head" d="M 0 0 L 8 4 L 0 8 z"/></marker></defs>\n'
        f'<rect class="paper" width="{WIDTH}" height="{height:.0f}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def main() -> int:
    if "--check" in sys.argv:
        return 0 if PICTURE.read_text() == picture() else 1
    PICTURE.write_text(picture())
    return 0


if __name__ == "__main__":
    sys.exit(main())
