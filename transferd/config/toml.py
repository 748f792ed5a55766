"""Plain data as TOML text: the half that the standard library leaves out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def to_toml(tree: Mapping[str, Any]) -> str:
    """Plain sections as TOML. Values: text, numbers, booleans, lists and sections of these; None is left out."""
    lines: list[str] = []

    def section(path: str, values: Mapping[str, Any]) -> None:
        if path:
            lines.append(f"[{path}]")
        lines.extend(
            f"{_toml_key(key)} = {_toml_value(value)}"
            for key, value in values.items()
            if value is not None and not isinstance(value, Mapping)
        )
        for key, value in values.items():
            if isinstance(value, Mapping):
                section(f"{path}.{_toml_key(key)}" if path else _toml_key(key), value)

    section("", tree)
    return "\n".join(lines) + "\n"


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key, re.ASCII) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'
