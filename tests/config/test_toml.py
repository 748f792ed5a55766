"""Plain data as TOML: what is printed reads back as it was."""

from __future__ import annotations

import pytest

from transferd.config import load, to_tree
from transferd.config.toml import to_toml
from transferd.runtime.compat import tomllib


@pytest.mark.parametrize("name", ["carriage\rreturn", "nul\0", "del\x7f", "tab\t", 'quote"', "new\nline", "模型"])
def test_printed_configuration_reads_back_with_any_value(name: str) -> None:
    tree = to_tree(load(overrides=[f"storage.model={name}"], env={}))
    assert tomllib.loads(to_toml(tree))["storage"]["model"] == name


def test_unset_values_are_left_out_at_any_depth_and_all_others_come_back() -> None:
    tree = {"a": 1, "b": None, "s": {"c": None, "d": {"e": None, "f": ["x", 2.5, True]}, "only": {"g": None}}}
    assert tomllib.loads(to_toml(tree)) == {"a": 1, "s": {"d": {"f": ["x", 2.5, True]}, "only": {}}}
