"""Write the tables of docs/*.md from benchmarks/results/*.json, between their markers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def table(tree: dict[str, Any]) -> str:
    """One result file as Markdown."""
    return verdicts(tree) if "checks" in tree else measured(tree)


def measured(tree: dict[str, Any]) -> str:
    """The rows of a benchmark."""
    where = tree["machine"]
    gpu = f"{where['gpu']}, " if "gpu" in where else ""
    lines = [
        f"{gpu}{where['cpu']}, {where['cores']} cores, Linux {where['kernel']}, Python {where['python']}, "
        f"load {where['load_1min_before']:.1f} before the run.",
        "",
        "| what | value | limit, same run | ratio | spread |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['name']} | {r['value']:,.2f} {r['unit']} | {r['limit']:,.2f} {r['limit_name']} "
        f"| {r['ratio']:.2f} | {r['spread']:.0%} |"
        for r in tree["rows"]
    ]
    return "\n".join(lines)


def verdicts(tree: dict[str, Any]) -> str:
    """What `make gpu-check` wrote as Markdown."""
    facts = ", ".join(f"{name} {value}" for name, value in tree["environment"].items())
    lines = [facts + ".", "", "| row | verdict | what it found |", "|---|---|---|"]
    for row in tree["checks"]:
        note = " ".join(row["note"].split()).replace("|", "/")
        lines.append(f"| {row['check']} | {row['verdict']} | {note} |")
    return "\n".join(lines)


def _fill(text: str, pattern: str, content: str) -> tuple[str, int]:
    """The text with the content between each pair of markers, and how many pairs there are."""
    return re.subn(pattern, lambda markers: f"{markers[1]}{content}\n{markers[2]}", text, flags=re.DOTALL)


def main() -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}
    for result in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        tree = json.loads(result.read_text(encoding="utf-8"))
        pattern = rf"(<!-- {re.escape(result.stem)} -->\n).*?(<!-- end -->)"
        places = 0
        for page, text in pages.items():
            pages[page], found = _fill(text, pattern, table(tree))
            places += found
        if not places:
            raise SystemExit(f"no page of docs/ has a place for {result.name}")
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
