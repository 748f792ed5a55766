"""A commented configuration file, generated from sections.py, where each comment and default is written once."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from transferd.config.loading import of_tuning, section_in
from transferd.config.sections import Config
from transferd.config.size import Size
from transferd.config.toml import inline

# A value for each setting that is not set by default: what the file shows must be valid when it is uncommented.
EXAMPLES: dict[str, Any] = {
    "cache.devices": [0, 1],
    "cache.mtp_blocks": 256,
    "cache.group_ranks": 2,
    "cache.page_bytes": 65536,
    "storage.level.NAME.write": "back",
    "storage.level.NAME.promote": 2,
    "storage.attention_store.namespace": "my-model",
    "storage.attention_store.pod_name": "default_pod",
}


def template(chosen: Mapping[str, Any] | None = None) -> str:
    """Every section and key but those of [tuning], commented out, with its default and its meaning.

    chosen: {"section.key": value} to write as active settings; all others stay comments.
    """
    chosen = dict(chosen or {})
    lines = ["# transferd: the settings with their defaults. Uncomment what you want to change."]
    for section in msgspec.structs.fields(Config):
        needed = section.default is not None or any(key.startswith(f"{section.name}.") for key in chosen)
        lines += _section(section.name, section_in(section.type), chosen, optional=not needed)
    if chosen:
        raise ValueError(f"there are no such settings: {', '.join(chosen)}")
    return "\n".join(lines) + "\n"


def _section(name: str, kind: type[msgspec.Struct], chosen: dict[str, Any], *, optional: bool = False) -> Iterator[str]:
    comments = _comments(kind)
    mark = "# " if optional else ""
    yield ""
    yield from (f"# {line}".rstrip() for line in inspect.getdoc(kind).splitlines())  # type: ignore[union-attr]
    yield f"{mark}[{name}]"
    nested = []
    for field in msgspec.structs.fields(kind):
        key = f"{name}.{field.name}"
        if inner := section_in(field.type):
            named = typing.get_origin(field.type) is dict
            nested.append((f"{key}.NAME" if named else key, inner, named or field.default is None))
        elif not of_tuning(key):
            yield _setting(key, field, comments.get(field.name, ""), chosen)
    for key, inner, may_be_absent in nested:
        yield from _section(key, inner, chosen, optional=may_be_absent)


def _setting(key: str, field: msgspec.structs.FieldInfo, comment: str, chosen: dict[str, Any]) -> str:
    mark = "" if key in chosen else "# "
    value = chosen.pop(key) if key in chosen else _default(field)
    if value is None:
        value, comment = EXAMPLES[key], f"(an example) {comment}"
    beside = f"  # {comment}" if comment else ""
    return f"{mark}{field.name} = {inline(str(value) if isinstance(value, Size) else value)}{beside}"


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return "" if field.default is msgspec.NODEFAULT else field.default


def _comments(kind: type[msgspec.Struct]) -> dict[str, str]:
    """{field: the comment beside it}, read from the source of sections.py."""
    setting = r"^    (\w+): .*?(?:= \(\n.*?)?(?:  # (.*))?$"
    return dict(re.findall(setting, inspect.getsource(kind), re.MULTILINE))
