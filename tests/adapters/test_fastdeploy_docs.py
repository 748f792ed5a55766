"""docs/fastdeploy.md names things that exist."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from transferd.adapters.fastdeploy import EngineCacheQueue
from transferd.config import from_tree, to_tree

DOCS = Path(__file__).parents[2] / "docs"
TEXT = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("fastdeploy.md", "fastdeploy_details.md"))


def keys(tree: dict[str, Any], before: str = "") -> set[str]:
    found = set()
    for name, value in tree.items():
        found |= {before + name} | (keys(value, f"{before}{name}.") if isinstance(value, dict) else set())
    return found


def test_every_configuration_key_exists() -> None:
    known = keys(to_tree(from_tree({"cache": {}})))
    sections = "|".join(name for name in known if "." not in name)
    named = set(re.findall(rf"`((?:{sections})\.[a-z_.]+)", TEXT))
    assert len(named) > 20
    assert {name.rstrip(".") for name in named} <= known


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
def test_every_example_is_python_and_imports_what_is_there(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = importlib.import_module(node.module)
            assert all(hasattr(module, name.name) for name in node.names)


def test_every_call_and_variable_is_in_the_page() -> None:
    for name in vars(EngineCacheQueue):
        if not name.startswith("_"):
            assert name in TEXT, name
    assert "FILE_BACKEND_STORAGE_DIR" in TEXT


def test_every_row_of_the_line_by_line_table_has_a_test_or_lacks_hardware() -> None:
    table = TEXT.partition("\n## FastDeploy line by line\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 25
    for *_, what, test in rows:
        if "no such hardware" in what:
            continue
        file, _, name = test.strip(" `").partition("::")
        found = list(Path(__file__).parents[1].rglob(file))
        assert any(f"def {name}(" in one.read_text(encoding="utf-8") for one in found), (what, test)
