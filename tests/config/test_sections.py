"""What the sections are by default, what follows from them, and that nothing changes them once they are made."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from transferd.config import CacheSection, Config, ServerSection, from_tree, to_tree
from transferd.config.sections import StorageSection


def test_everything_has_a_default_and_only_the_engines_geometry_is_absent() -> None:
    config = Config()
    assert [name for name, value in to_tree(config).items() if value is None] == ["cache"]
    with pytest.raises(AssertionError, match="no engine in this configuration"):
        _ = config.geometry
    assert from_tree({"cache": {"ranks": 3}}).geometry.ranks == 3


def test_a_configuration_never_changes() -> None:
    config = from_tree({"cache": {}})
    for section, key, value in (
        (config, "cache", None),
        (config.geometry, "ranks", 9),
        (config.server, "endpoint", ""),
    ):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(section, key, value)
    assert config == from_tree({"cache": {}})


def test_ranks_have_the_first_devices_and_make_their_own_group_unless_told_otherwise() -> None:
    cache = CacheSection(ranks=3)
    assert (cache.device_of_rank, cache.tensor_parallel_size) == ([0, 1, 2], 3)
    placed = CacheSection(ranks=2, devices=[5, 4], group_ranks=8, first_rank=6)
    assert (placed.device_of_rank, placed.tensor_parallel_size) == ([5, 4], 8)
    placed.device_of_rank.clear()
    assert placed.device_of_rank == [5, 4], "a copy"


def test_each_key_is_in_the_reference() -> None:
    """Operators read the keys in docs/configuration.md; a section with names of its own (peers) is named there."""
    docs = Path(__file__).parents[2] / "docs"
    text = "".join((docs / name).read_text(encoding="utf-8") for name in ("configuration.md", "operations.md"))
    named = set(re.findall(r"[`\[]([a-z_.]+)[`\]]", text))
    missing = []
    for section in msgspec.structs.fields(Config):
        kind = type(getattr(from_tree({"cache": {}}), section.name))
        missing += [
            f"{section.name}.{field.name}"
            for field in msgspec.structs.fields(kind)
            if not {field.name, f"{section.name}.{field.name}", f"tuning.{section.name}.{field.name}"} & named
        ]
    assert missing == []
    assert StorageSection().backend == "file"


# What the reference says in words instead of a default.
IN_WORDS = {
    "server.socket_group": "the daemon's",
    "server.observer_group": "the daemon's",
    "cache.devices": "0 … ranks-1",
    "cache.mtp_blocks": "device_blocks",
    "cache.group_ranks": "ranks",
    "pd.rdma_devices": "all",
    "traces.endpoint": "off",
    "events.topic": "empty",
}


def defaults(kind: type[msgspec.Struct], above: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting with its default."""
    for field in msgspec.structs.fields(kind):
        options = typing.get_args(field.type) or (field.type,)
        inner = next((one for one in options if isinstance(one, type) and issubclass(one, msgspec.Struct)), None)
        if inner is not None and typing.get_origin(field.type) is not dict:
            yield from defaults(inner, f"{above}{field.name}.")
        elif field.default_factory is not msgspec.NODEFAULT:
            yield above + field.name, field.default_factory()
        else:
            yield above + field.name, "" if field.default is msgspec.NODEFAULT else field.default


def test_the_reference_has_the_defaults_of_the_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    ours, compared = dict(defaults(Config)), 0
    for names, values in re.findall(r"(?m)^\| (`[^|]*) \| ([^|]*) \|", text):
        named = [key.removeprefix("tuning.") for key in re.findall(r"`([a-z_.]+)`", names)]
        keys = [key for key in named if key in ours]
        for key, value in zip(keys, values.split(", ") if len(keys) > 1 else [values], strict=True):
            default = IN_WORDS.get(key, ours[key])
            if isinstance(default, list | tuple):
                default = ", ".join(map(str, default))
            said: Any = value.strip().strip("`")
            if isinstance(default, float):
                said = float(said)
            elif isinstance(default, bool):
                default = str(default).lower()
            assert said == (default if isinstance(default, float) else str("" if default is None else default)), key
            compared += 1
    assert compared > 60


@pytest.mark.parametrize(
    ("mode", "allowed", "open_"),
    [("0660", [], False), ("0666", [], True), ("0602", [], True), ("0664", [], False), ("0666", ["root"], False)],
)
def test_whether_every_user_may_connect(mode: str, allowed: list[int | str], open_: bool) -> None:
    assert ServerSection(socket_mode=mode, allowed_uids=allowed).open_to_all is open_
