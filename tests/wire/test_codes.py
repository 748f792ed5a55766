"""The codes are those that the source raises, and the documentation's tables have each of them, and each status."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from transferd.observability.report import REJECTS
from transferd.tasks import Status
from transferd.wire.codes import CODES

pytestmark = pytest.mark.one_loop

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "transferd"
# Folders whose errors travel to a client. Those of adapters and of the command line end in their own process.
FOLDERS = ("blocks", "client", "control", "daemon", "storage", "tiers", "wire", "workers")
FILES = ("barrier.py", "errors.py", "tasks.py")
NOT_SENT = {
    "bad_config": "ends the start, or the making of a client",
    "connect_refused": "a client's own error; its code is the daemon's",
    "stopped": "of a copy that was withdrawn; its task is answered as what it was stopped for",
    "busy": "a peer's answer that the sender asks again after",
}


def literals(path: Path) -> Iterator[str]:
    """Codes that a module names: `code="…"`, `code = "…"` of a class, `ErrorInfo("…", …)`, and constants used so."""
    tree = ast.parse(path.read_text())
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        found: list[ast.expr] = []
        if isinstance(node, ast.Call):
            found = [one.value for one in node.keywords if one.arg == "code"]
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            position = {"ErrorInfo": 0, "_refuse": 2}.get(name)
            if position is not None and len(node.args) > position:
                found.append(node.args[position])
        elif isinstance(node, ast.ClassDef):
            found = [
                one.value
                for one in node.body
                if isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None
                for target in (one.targets if isinstance(one, ast.Assign) else [one.target])
                if getattr(target, "id", "") == "code"
            ]
        for one in found:
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                yield one.value
            elif isinstance(one, ast.Name) and isinstance(constant := constants.get(one.id), str):
                yield constant


def raised() -> dict[str, str]:
    paths = [PACKAGE / name for name in FILES]
    paths += [path for name in FOLDERS for path in sorted((PACKAGE / name).rglob("*.py"))]
    return {code: str(path.relative_to(PACKAGE)) for path in paths for code in literals(path)}


def test_every_code_that_is_raised_is_in_the_table() -> None:
    found = raised()
    assert {"task_id_conflict", "storage_full", "out_of_memory", "layout_mismatch"} <= set(found)
    missing = {code: where for code, where in found.items() if code not in CODES and code not in NOT_SENT}
    assert not missing


def test_the_table_names_no_code_that_nothing_raises() -> None:
    text = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "codes.py")
    assert [code for code in CODES if f'"{code}"' not in text] == []


def test_the_table_has_every_code_that_metrics_count() -> None:
    assert set(REJECTS) <= set(CODES)


def rows(name: str) -> list[list[str]]:
    """The cells of a table of docs/protocol.md, without its head."""
    text = (ROOT / "docs" / "protocol.md").read_text()
    lines = text.split(f"<!-- {name} -->\n")[1].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_status_has_its_duty_in_the_documentation() -> None:
    assert [row[0] for row in rows("statuses")] == [f"`{status}`" for status in Status]
    assert all(all(row) and len(row) == 3 for row in rows("statuses"))


def test_the_documentation_has_every_code_and_no_other() -> None:
    assert sorted(row[0] for row in rows("codes")) == sorted(f"`{code}`" for code in CODES)
    assert all(all(row) and len(row) == 4 for row in rows("codes"))


def test_answers_are_statuses_or_refusals() -> None:
    known = {*map(str, Status), "refused", "client"}
    assert [row[0] for row in rows("codes") if not set(row[1].split(", ")) <= known] == []
