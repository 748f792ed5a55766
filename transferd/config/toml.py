"""Plain data as TOML text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w


def to_toml(tree: Mapping[str, Any]) -> str:
    """Sections of text, numbers, booleans, lists and further sections as TOML. A value of None is left out."""
    return tomli_w.dumps(_without_none(tree))


def inline(value: Any) -> str:
    """A value as TOML, in one line."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(inline, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{inline(key)} = {inline(one)}' for key, one in value.items())}}}"
    return tomli_w.dumps({"v": value}).strip().removeprefix("v = ")


def _without_none(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
        if value is not None
    }
