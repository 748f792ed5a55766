"""What the adversary knows of the place that it attacks, and what it reports."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from zmq.utils import z85

from tests.machine.hostile.raw_peer import Keys


@dataclass(frozen=True)
class Place:
    """door: the socket for engines. window: for observers. pub, replay: KV events. page: host:port of the reports.

    honest: names of the engines of other users. signatures: how their blocks begin, in hexadecimal; nobody else may
    ever hold one. users: (uid, gid) of those whom the adversary may become. honest_uids: of those whom it may not.
    tcp: the socket for engines on the network. keys: what it asks for, [the server's public one, a client's public and
    secret ones]; empty if it asks for none. raw: the socket for engines on which raw peers knock; "" for the door.
    transfers: host:port of a neighbour's `pd.listen`. tokens: the socket of the neighbour with AttentionStore's SDK.
    groups: those of the adversary's users beside their own, which open that socket.
    members: the socket of the neighbour on files, with little memory and a silent collector of traces.
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
    tcp: str = ""
    keys: list[str] = field(default_factory=list)
    raw: str = ""
    transfers: str = ""
    tokens: str = ""
    groups: list[int] = field(default_factory=list)
    members: str = ""

    @property
    def knock(self) -> str:
        return self.raw or self.door

    def keys_of(self, endpoint: str) -> Keys | None:
        """The keys with which a peer is let in there; None if it needs none."""
        if endpoint != self.tcp or not self.keys:
            return None
        server, public, secret = map(z85.decode, self.keys)
        return server, public, secret

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
