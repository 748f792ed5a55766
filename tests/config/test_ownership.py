"""The one rule of who creates the cache, compared with its truth table in the documentation."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from transferd.config import from_tree
from transferd.config.ownership import Creator, creator
from transferd.errors import ConfigError

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "memory.md"
INPUTS = {
    "profiling": (True, False),
    "ownership": ("create", "attach", "auto"),
    "host_blocks": (0, 8),
    "backend": ("none", "memory"),
    "role": ("mixed", "prefill", "decode"),
}


def table() -> list[dict[str, str]]:
    """The rows of the documented truth table, in order: the first that fits is the answer."""
    text = DOCUMENT.read_text()
    found = re.search(r"<!-- ownership -->\n\|(.+)\|\n\|[-|]+\|\n((?:\|.+\|\n)+)", text)
    assert found, "docs/memory.md has no truth table"
    names = [name.strip() for name in found[1].split("|")]
    assert names == ["profiling", "`cache.ownership`", "host tier", "storage tier", "role", "who creates"]
    keys = ["profiling", "ownership", "host_blocks", "backend", "role", "creator"]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in found[2].splitlines()]
    return [dict(zip(keys, row, strict=True)) for row in rows]


def fits(row: dict[str, str], case: dict[str, Any]) -> bool:
    said = {
        "profiling": "yes" if case["profiling"] else "no",
        "ownership": case["ownership"],
        "host_blocks": "yes" if case["host_blocks"] else "no",
        "backend": "no" if case["backend"] == "none" else "yes",
        "role": case["role"],
    }
    return all(row[key] == "any" or said[key] in re.split(r",\s*", row[key]) for key in said)


@pytest.mark.parametrize("values", list(itertools.product(*INPUTS.values())), ids=str)
def test_the_rule_is_what_the_table_says(values: tuple[Any, ...]) -> None:
    case = dict(zip(INPUTS, values, strict=True))
    rows = [row for row in table() if fits(row, case)]
    assert len(rows) == 1, "each case is in exactly one row"
    cache = {key: case[key] for key in ("ownership", "host_blocks", "role")}
    config = from_tree({"cache": cache, "storage": {"backend": case["backend"]}})
    assert creator(config, profiling=case["profiling"]) is Creator(rows[0]["creator"])


def test_by_default_the_daemon_creates() -> None:
    assert creator(from_tree({"cache": {}})) is Creator.DAEMON


def test_a_role_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache\.role"):
        from_tree({"cache": {"role": "both"}})
