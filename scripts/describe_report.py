"""Write docs/report.md: every field of the daemon's report, with the comment beside it in observability/report.py.

    python scripts/describe_report.py [--check]

--check writes nothing, and exits 1 if the file differs.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import sys
import tokenize
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from transferd.observability import report  # noqa: E402

PAGE = ROOT / "docs" / "report.md"
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
            said = comments.get(field.name) or " ".join((inspect.getdoc(inner) or "").split())
            yield f"| `{key}` | {many or 'map'} | {said} |"
            below = {"": ".", "list": "[].", "map by name": ".NAME."}[many]
            yield from _rows(inner, key + below)
        else:
            absent = "; absent where it does not apply" if field.default is msgspec.UNSET else ""
            yield f"| `{key}` | {_called(field.type)} | {comments[field.name]}{absent} |"


def comments_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """{field: the comment beside it}."""
    source = inspect.getsource(report)
    (body,) = [n.body for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == kind.__name__]
    lines = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    fields = [node for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {node.target.id: lines[node.lineno] for node in fields if node.lineno in lines}  # type: ignore[union-attr]


def _struct_in(kind: Any) -> tuple[type[msgspec.Struct] | None, str]:
    """The section that a field holds, and how many: "" for one. None for a field that is no section."""
    if msgspec.UnsetType in typing.get_args(kind):
        (kind,) = (one for one in typing.get_args(kind) if one is not msgspec.UnsetType)
    options = typing.get_args(kind) or (kind,)
    inner = next((one for one in options if isinstance(one, type) and issubclass(one, msgspec.Struct)), None)
    return inner, {dict: "map by name", list: "list"}.get(typing.get_origin(kind), "")


def _called(kind: Any) -> str:
    """A type in the words of JSON."""
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
    if parser.parse_args().check:
        sys.exit(PAGE.read_text() != page())
    PAGE.write_text(page())
