"""Write the tables of docs/performance.md from benchmarks/results/*.json, between its markers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def table(tree: dict[str, Any]) -> str:
    """One result file as Markdown."""
    where = tree["machine"]
    lines = [
        f"{where['cpu']}, {where['cores']} cores, Linux {where['kernel']}, Python {where['python']}.",
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


def main() -> None:
    page = ROOT / "docs" / "performance.md"
    text = page.read_text(encoding="utf-8")
    for result in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        tree = json.loads(result.read_text(encoding="utf-8"))
        pattern = rf"(<!-- {re.escape(result.stem)} -->\n).*?(<!-- end -->)"
        text, found = re.subn(pattern, lambda m, t=tree: f"{m[1]}{table(t)}\n{m[2]}", text, flags=re.DOTALL)
        if not found:
            raise SystemExit(f"docs/performance.md has no place for {result.name}")
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
