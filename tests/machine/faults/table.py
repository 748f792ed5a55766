"""The table of a run: one line a cell as text, everything as JSON, and a page of docs/faults.md.

A table in the page stands between two comments, `<!-- NAME -->` and `<!-- end of NAME -->`; a run replaces
what is between them and nothing else.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.machine.faults.cell import PHASES, Row
from tests.machine.faults.resources import Finding, Scenario
from transferd.runtime.compat import UTC


def line(row: Row) -> str:
    result = "-" if row.result_s is None else f"{row.result_s:.2f} s"
    served = "-" if row.served_s is None else f"{row.served_s:.2f} s"
    verdict = "green" if not row.problems else f"RED: {'; '.join(row.problems)}"
    return (
        f"{row.cell.name:45} told {row.told or '-':28} after {result:8} served {served:8} "
        f"checked {row.checked:3} gone {row.gone:3} wrong {row.wrong} beside {_beside([row])} {verdict}"
    )


def machine() -> dict[str, Any]:
    """Where and when a run was made."""
    today = dt.datetime.now(tz=UTC).date().isoformat()
    model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return {
        "date": today,
        "cpu": model[1].strip() if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def write_json(path: Path, rows: Sequence[Row], findings: Sequence[tuple[Scenario, Finding]] | None) -> None:
    """Everything that was found, for programs. findings: None keeps those that the file has."""
    resources = json.loads(path.read_text(encoding="utf-8"))["resources"] if findings is None else _plain(findings)
    _write(path, {"machine": machine(), "cells": [asdict(row) for row in rows], "resources": resources})


def merge_json(
    path: Path, findings: Sequence[tuple[Scenario, Finding]], scenarios: Sequence[Scenario]
) -> list[tuple[Scenario, Finding]]:
    """Put these in the place of the same scenarios' earlier findings; all that the file has now, in their order."""
    body = json.loads(path.read_text(encoding="utf-8"))
    known = {(row["name"], row["when"]): row for row in [*body["resources"], *_plain(findings)]}
    kept = [(one, dict(known[one.name, one.when])) for one in scenarios if (one.name, one.when) in known]
    body["resources"] = [row for _, row in kept]
    _write(path, body)
    return [(one, Finding(**{k: v for k, v in row.items() if k not in ("name", "when")})) for one, row in kept]


def _plain(findings: Sequence[tuple[Scenario, Finding]]) -> list[dict[str, Any]]:
    return [{"name": scenario.name, "when": scenario.when} | asdict(finding) for scenario, finding in findings]


def _write(path: Path, body: dict[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def markdown(rows: Sequence[Row]) -> str:
    """One line for each backend, process and fault; one column for each phase."""
    lines = [
        f"| storage | process | fault | {' | '.join(PHASES)} | served again | gone | wrong | the second engine |",
        f"|{'---|' * (len(PHASES) + 7)}",
    ]
    groups: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row.cell.backend, row.cell.victim, row.cell.fault), {})[row.cell.phase] = row
    for group, of_phase in groups.items():
        answers = [_answer(of_phase[phase]) if phase in of_phase else "" for phase in PHASES]
        served = max(row.served_s or 0.0 for row in of_phase.values())
        gone, wrong = (sum(getattr(row, name) for row in of_phase.values()) for name in ("gone", "wrong"))
        beside = _beside(of_phase.values())
        lines.append(f"| {' | '.join([*group, *answers])} | {served:.1f} s | {gone} | {wrong} | {beside} |")
    return "\n".join(lines)


def _beside(rows: Iterable[Row]) -> str:
    """What the second engine was told, and how often: most often first."""
    told = sum((Counter(row.beside) for row in rows), Counter[str]())
    return ", ".join(f"{count} {what}" for what, count in told.most_common())


def _answer(row: Row) -> str:
    if row.problems:
        return f"**RED** {row.problems[0]}"
    if row.result_s is None:
        return "(died)"
    status, _, code = row.told.partition(" ")
    told = status if not code else code if status == "failed" else f"{status}, {code}"
    return f"{told} {row.result_s:.1f} s"


def resources(findings: Sequence[tuple[Scenario, Finding]]) -> str:
    """One line for each thing that ran out or went wrong."""
    lines = ["| fault | when | results | after | the daemon | gone | wrong |", "|---|---|---|---|---|---|---|"]
    for scenario, finding in findings:
        after = "" if finding.seconds is None else f"{finding.seconds * 1000:.0f} ms"
        gone, wrong = ("" if count is None else str(count) for count in (finding.gone, finding.wrong))
        verdict = scenario.fate if not finding.problems else f"**RED** {finding.problems[0]}"
        cells = (scenario.name, scenario.when, "; ".join(finding.told), after, verdict, gone, wrong)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(rows: Sequence[Row], seconds: float) -> str:
    where = machine()
    red = sum(bool(row.problems) for row in rows)
    beside = sum(sum(row.beside.values()) for row in rows)
    return (
        f"{len(rows)} cells, {red} red; {sum(row.checked for row in rows)} keys read back, "
        f"{sum(row.wrong for row in rows)} wrong; {beside} tasks of the second engine. "
        f"{where['date']}, {where['cpu']}, {where['cores']} cores shared with other work, Linux {where['kernel']}, "
        f"{seconds / 60:.0f} minutes."
    )


def replace_section(page: Path, name: str, text: str) -> None:
    """Put a table in its place. Raises ValueError when the page has no such place."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"{page} has no section {name!r}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
