"""The pins of a store, in a file beside its objects, so that they last until their time also if the daemon restarts.

    <root>/pins     JSON: {"version": 1, "pins": [{"engine", "uid", "until", "paths"}]}

until: Unix time, in seconds.
paths: of the objects, see paths.py.

The file is replaced at each pin and unpin. It may name objects that have left since: a start drops pins that are over,
and pins of objects that are not there.

Blocking; called from I/O threads, one call at a time.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable

import msgspec
import structlog

from transferd.storage.examine import READ_FLAGS
from transferd.storage.journal import write_anew
from transferd.storage.paths import name_of, path_of
from transferd.storage.pins import KeptPin
from transferd.storage.queues import EngineOwner

log = structlog.get_logger(__name__)

VERSION = 1


class _PinRow(msgspec.Struct, frozen=True):
    engine: str
    uid: int | None
    until: float
    paths: list[str]


class _Content(msgspec.Struct, frozen=True):
    version: int
    pins: list[_PinRow]


_decoder = msgspec.json.Decoder(_Content)  # at import: a first use by two threads at once would end the process


class PinFile:
    """See the module. lost: why the directory is another one than before; "" if it is the same."""

    def __init__(self, path: str, lost: Callable[[], str]) -> None:
        self._path = path
        self._lost = lost

    def read(self, now: float) -> list[KeptPin]:
        """The pins that are not over. now: Unix time."""
        try:
            with open(os.open(self._path, READ_FLAGS), "rb") as file:
                content = _decoder.decode(file.read())
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("the pins of the store cannot be read; none is kept", path=self._path, problem=str(error))
            return []
        rows = [row for row in content.pins if row.until > now] if content.version == VERSION else []
        return [
            KeptPin(name, EngineOwner(row.engine, row.uid), row.until - now)
            for row in rows
            for path in row.paths
            if (name := name_of(path)) is not None
        ]

    def write(self, pins: Iterable[KeptPin], now: float) -> None:
        """Replace the file. now: Unix time. If that fails, the pins hold all the same, until the daemon ends."""
        rows = defaultdict[tuple[EngineOwner, float], list[str]](list)
        for pin in pins:
            if isinstance(pin.owner, EngineOwner):
                rows[pin.owner, now + pin.left_s].append(path_of(pin.name))
        content = _Content(VERSION, [_PinRow(*owner, until, paths) for (owner, until), paths in rows.items()])
        problem = self._lost()
        try:
            if not problem:
                write_anew(self._path, [msgspec.json.encode(content)])
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            log.warning("the pins of the store were not written: a restart ends them", problem=problem)
