"""The settings that the operators of all engines can give, checked where they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from transferd.adapters.common.companion import DaemonFinder, OneDaemon, endpoint_named, store_directory
from transferd.adapters.common.entry import EngineFacts
from transferd.adapters.common.program import Program
from transferd.adapters.common.slots import PARTS
from transferd.config import names
from transferd.config.size import Size
from transferd.errors import ConfigError
from transferd.runtime.compat import convert

LONGEST_TIMEOUT_S = 3600.0


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of every adapter.

    endpoint: that of a running daemon; "" = see companion.py.
    name: the engine's; "" = derived by the adapter.
    generation: weight version; part of every key.
    path, capacity: where and how much a daemon started by the engine stores.
    timeout: seconds for one transfer.
    start_timeout: how many seconds the engine's start waits for a daemon.
    weights: the operator's name for the weights of the model; "" = by their files.
    """

    endpoint: str = ""
    name: str = ""
    generation: str = ""
    path: str = ""
    capacity: int | str = 0
    timeout: float = 30.0
    start_timeout: float = 20.0
    weights: str = ""

    @property
    def capacity_bytes(self) -> int:
        return int(Size.parse(self.capacity))

    def finder(self, program: Program, engine: EngineFacts | None, *, gpu: bool = False) -> DaemonFinder:
        """Where the daemon of these settings is. engine: None in a process that does not start it. gpu: see there.

        Raises ConfigError for settings that contradict each other.
        """
        block_bytes = 0 if engine is None else engine.block_bytes
        return DaemonFinder(program, **self._where, block_bytes=block_bytes, gpu=gpu)

    @property
    def _where(self) -> dict[str, Any]:
        return {"endpoint": self.endpoint, "path": self.path, "capacity": self.capacity_bytes}


class CopySettings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of every adapter, and those of one that copies blocks to and from slots.

    load_timeout: seconds for one load; after that its blocks count as missing.
    buffer: memory for the copies on their way, for each engine at the daemon.
    """

    load_timeout: float = 10.0
    buffer: int | str = "256MiB"

    @property
    def buffer_bytes(self) -> int:
        return int(Size.parse(self.buffer))

    def one_daemon(self, program: Program) -> OneDaemon:
        """Where the daemon of all links of this process is. Raises ConfigError like `finder`."""
        return OneDaemon(program, **self._where, block_bytes=self.buffer_bytes // PARTS)

    def file_of_store(self, program: Program, name: str, *also: str) -> Path:
        """A file about the store of these settings, where a daemon that is started here stores blocks.

        name: with {} for a digest of what tells stores apart: endpoint, generation, and `also`.
        """
        store = json.dumps([endpoint_named(self.endpoint), self.generation, *also])
        digest = hashlib.sha256(store.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return store_directory(program, self.path) / name.format(digest)


def _check_timeout(section: str, key: str, seconds: float) -> None:
    if not 0 < seconds <= LONGEST_TIMEOUT_S:
        raise ConfigError(f"{section}.{key}", f"must be above 0 and at most {LONGEST_TIMEOUT_S:g}", seconds)


def _check_size(section: str, key: str, given: int | str) -> None:
    """Raise ConfigError unless this is a size above 0."""
    try:
        enough = int(Size.parse(given)) > 0
    except ValueError as error:
        raise ConfigError(f"{section}.{key}", str(error), given) from None
    if not enough:
        raise ConfigError(f"{section}.{key}", "must be above 0", given)


def engine_name(label: str, suffix: str) -> str:
    """An engine's name that begins with a label, which is cut if it would be too long."""
    return label[: names.ENGINE.longest - len(suffix)] + suffix


S = TypeVar("S", bound=CommonSettings)


def parsed(section: str, given: Mapping[str, Any], kind: type[S]) -> S:
    """Parse the settings of a section. Raises ConfigError that names the key."""
    try:
        found = convert(given, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(section, str(error)) from None
    if found.name:
        names.ENGINE.check(f"{section}.name", found.name)
    names.GENERATION.check(f"{section}.generation", found.generation)
    _check_timeout(section, "timeout", found.timeout)
    if found.start_timeout < 0:
        raise ConfigError(f"{section}.start_timeout", "must be at least 0", found.start_timeout)
    try:
        _ = found.capacity_bytes
    except ValueError as error:
        raise ConfigError(f"{section}.capacity", str(error), found.capacity) from None
    if isinstance(found, CopySettings):
        _check_timeout(section, "load_timeout", found.load_timeout)
        _check_size(section, "buffer", found.buffer)
    return found
