"""What the adversary knows of the place that it attacks, and what it reports."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """door: the socket for engines. window: for observers. pub, replay: KV events. page: host:port of the reports.

    honest: names of the engines of other users. signatures: how their blocks begin, in hexadecimal; nobody else may
    ever hold one. users: (uid, gid) of those whom the adversary may become. honest_uids: of those whom it may not.
    """

    door: str
    window: str
    pub: str
    replay: str
    page: str
    honest: list[str]
    honest_uids: list[int]
    signatures: list[str]
    users: list[tuple[int, int]]

    def stolen_from(self, memory: bytes | bytearray | memoryview) -> list[str]:
        """The honest engines whose bytes are in there."""
        found = bytes(memory)
        return [name for name, mark in zip(self.honest, self.signatures, strict=True) if bytes.fromhex(mark) in found]


@dataclass
class Report:
    """told: what the daemon answered, for a reader. wrong: promises that it broke."""

    told: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def fresh_name() -> str:
    """A name in /dev/shm of this process; the campaign counts what is left of them."""
    return f"hostile-{os.getpid()}-{os.urandom(4).hex()}"


SHARED = Path("/dev/shm")
