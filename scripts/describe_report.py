"""Write docs/report.md, the tables of docs/metrics.md, the alerts and the dashboard.

All of it is made from the rows of observability/report.py and concerns.py; watched.py has what alerts and panels show.

    python scripts/describe_report.py [--check]

--check writes nothing, and exits 1 if a file differs.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import re
import sys
import tokenize
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import watched  # noqa: E402
from transferd.observability import report  # noqa: E402
from transferd.observability.concerns import CONCERNS  # noqa: E402
from transferd.observability.figure import Figure, Sections  # noqa: E402
from transferd.observability.metrics import rows  # noqa: E402

Metrics = dict[str, watched.Metric]
PAGE, METRICS = ROOT / "docs" / "report.md", ROOT / "docs" / "metrics.md"
HEAD = """# The report

`transferd stats --format json`, `/status` on the metrics port, `stats()` of a client and `report` in `/live` show this.
Keys are added from time to time; none is renamed or removed without a note in the changelog. NAME stands for the name
of an engine, lane or node. This page is made by `python scripts/describe_report.py`.

| key | type | meaning |
|---|---|---|
"""


def page() -> str:
    return HEAD + "\n".join(_rows(report.Report, "")) + "\n"


def _rows(kind: type[msgspec.Struct], path: str) -> Iterator[str]:
    comments = comments_of(kind)
    for field in msgspec.structs.fields(kind):
        inner, many = _struct_in(field.type)
        key = f"{path}{field.name}"
        if key == "storage.other":
            yield f"| `storage.…` | map | {comments['other']} |"
        elif inner is not None:
            said = comments.get(field.name) or _help(field.type) or " ".join((inspect.getdoc(inner) or "").split())
            yield f"| `{key}` | {many or 'map'} | {said} |"
            below = {"": ".", "list": "[].", "map by name": ".NAME."}[many]
            yield from _rows(inner, key + below)
        else:
            absent = "; absent where it does not apply" if field.default is msgspec.UNSET else ""
            said = _help(field.type) or comments[field.name]
            yield f"| `{key}` | {_called(field.type)} | {said}{absent} |"


def _help(kind: Any) -> str:
    """What a field that is a metric says of itself."""
    return next((one.help for one in getattr(kind, "__metadata__", ()) if isinstance(one, Figure)), "")


def metrics_page(text: str) -> str:
    """docs/metrics.md with its tables made anew; when a concern begins is kept from the page."""
    when = begins(text)
    tables = {
        "metric": sorted({one.row() for one in metrics(report.Report).values()}),
        "concern": [f"| `{k}` | {one.severity} | {when[k]} | {one.remedy} |" for k, one in CONCERNS.items()],
    }
    for name, lines in tables.items():
        table = "\n".join(lines)
        found = re.search(rf"\| {name} \|.+\n\|[-|]+\n((?:\|.+\n)*)", text)
        assert found is not None
        text = f"{text[: found.start(1)]}{table}\n{text[found.end(1) :]}"
    return text


def begins(text: str) -> dict[str, str]:
    """When each concern begins, as docs/metrics.md says it."""
    rows_of_concerns = text.partition("## Concerns")[2]
    return dict(re.findall(r"^\| `([a-z_]+)` \|(?: \w+ \|)? (.+?) \| .+ \|$", rows_of_concerns, re.MULTILINE))


def metrics(kind: type[msgspec.Struct], path: str = "", above: str = "", labels: list[str] | None = None) -> Metrics:
    """The metrics of a section by the paths of their fields, such as `storage.levels.bytes`."""
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    found: Metrics = {}
    for name, row in rows(kind):
        if isinstance(row, Sections):
            inner, _ = _struct_in(types[name])
            assert inner is not None
            around = [] if row.apart else labels or []
            found |= metrics(inner, f"{path}{name}.", row.begins, [*around, *row.labels])
            continue
        ends = "_total" if row.kind == "counter" else ""
        called = f"transferd_{above}{row.name or name}{ends}"
        own = [*(labels or []), *([row.label] if row.label else [])]
        found[path + name] = watched.Metric(called, own, row)
    return found


def comments_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """{field: the comment beside it}, also those that it inherits."""
    source = inspect.getsource(report)
    lines = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    names = {one.__name__ for one in kind.__mro__}
    bodies = [node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name in names]
    fields = [one for body in bodies for one in body if isinstance(one, ast.AnnAssign)]
    found = {}
    for one in fields:
        assert isinstance(one.target, ast.Name)
        if line := next((n for n in range(one.lineno, (one.end_lineno or one.lineno) + 1) if n in lines), None):
            found[one.target.id] = lines[line]
    return found


def _struct_in(kind: Any) -> tuple[type[msgspec.Struct] | None, str]:
    """The section that a field holds, and how many: "" for one. None for a field that is no section."""
    kind = _bare(kind)
    if len(given := [one for one in typing.get_args(kind) if one is not msgspec.UnsetType]) == 1:
        kind = given[0] if msgspec.UnsetType in typing.get_args(kind) else kind
    options = typing.get_args(kind) or (kind,)
    inner = next((one for one in options if isinstance(one, type) and issubclass(one, msgspec.Struct)), None)
    return inner, {dict: "map by name", list: "list"}.get(typing.get_origin(kind), "")


def _bare(kind: Any) -> Any:
    """A type without its annotations."""
    return kind.__origin__ if hasattr(kind, "__metadata__") else kind


def _called(kind: Any) -> str:
    """A type in the words of JSON."""
    kind = _bare(kind)
    named = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null", Any: "any"}
    if kind in named:
        return named[kind]
    arguments = [one for one in typing.get_args(kind) if one is not msgspec.UnsetType]
    origin = typing.get_origin(kind)
    if origin is list:
        return f"list of {_called(arguments[0])}"
    if origin is dict:
        return f"map of {_called(arguments[1])}"
    return " or ".join(_called(one) for one in arguments)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = metrics_page(METRICS.read_text())
    made = {PAGE: page(), METRICS: text} | watched.files(metrics(report.Report), CONCERNS, begins(text))
    if parser.parse_args().check:
        sys.exit(any(file.read_text() != text for file, text in made.items()))
    for file, text in made.items():
        file.write_text(text)
