"""docs/first_token.svg: what storage does to a first token in vLLM, from results/vllm_offload.json.

python -m benchmarks.first_token      # writes the picture
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.growth.picture import STYLE

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "first_token.svg"
TITLE = "First token of a stored prompt of vLLM 0.32 on two CPU cores: milliseconds, less is better"
# What a row is called in the results, what it is, and whether it is ours.
BARS = (
    ("none", "no storage", False),
    ("fs", "vLLM's fs tier", False),
    ("tier", "transferd's tier, files", True),
    ("connector", "transferd's connector, files", True),
    ("obj", "vLLM's obj tier, a bucket", False),
    ("object", "transferd's tier, a bucket", True),
    ("levels", "transferd's connector, memory above the bucket", True),
)
FILLS = "  .ours { fill: #2563eb }\n  .others { fill: #9ca3af }\n"
WIDTH, ROW, TOP, LABEL, FIGURE = 760, 28, 44, 320, 70


def picture(tree: dict[str, Any]) -> str:
    """One self-contained SVG document. tree: what `make vllm-gains` has measured."""
    values = {row["name"]: float(row["value"]) for row in tree["rows"]}
    bars = [(name, ours, values[f"{kind}: first token, warm"]) for kind, name, ours in BARS]
    height = TOP + ROW * len(bars) + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"<title>{escape(TITLE)}</title>\n<style>{STYLE}{FILLS}</style>\n"
        f'<text x="12" y="26" font-weight="600">{escape(TITLE)}</text>\n' + "\n".join(_rows(bars)) + "\n</svg>\n"
    )


def _rows(bars: list[tuple[str, bool, float]]) -> Iterator[str]:
    longest = max(value for _, _, value in bars)
    for number, (name, ours, value) in enumerate(bars):
        y, long = TOP + ROW * number, (WIDTH - LABEL - FIGURE) * value / longest
        yield f'<text x="{LABEL - 10}" y="{y + 15}" text-anchor="end">{escape(name)}</text>'
        yield f'<rect class="{"ours" if ours else "others"}" x="{LABEL}" y="{y}" width="{long:.1f}" height="20"/>'
        yield f'<text x="{LABEL + long + 8:.1f}" y="{y + 15}">{value:,.0f}</text>'


def results() -> dict[str, Any]:
    return dict(json.loads((ROOT / "benchmarks" / "results" / "vllm_offload.json").read_text(encoding="utf-8")))


if __name__ == "__main__":
    PICTURE.write_text(picture(results()), encoding="utf-8")
