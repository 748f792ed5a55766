"""What the daemon answers to orders about stored objects: how much they reached."""

from __future__ import annotations

from typing import Any

import msgspec

from transferd.runtime.compat import Self


class Purged(msgspec.Struct, frozen=True):
    """What a purge has removed, or would. Access fields as attributes or as items. An object is one rank's block.

    shared: levels that others use too, such as a bucket: they keep their objects. This daemon uses none of these there
        until it has stored them again, or restarts; after a purge by age it does.
    not_reached: the paths of disks that may still have objects, because they are away: these go when it returns.
    kept_by: the paths of the disks that have the order, and so see to the rest also after a restart of the daemon.
    """

    objects: int = 0
    bytes: int = 0
    not_reached: list[str] = []
    kept_by: list[str] = []
    shared: list[str] = []

    @property
    def complete(self) -> bool:
        """Whether no place has anything left of it."""
        return not self.not_reached and not self.shared

    def __getitem__(self, name: str) -> Any:
        if name not in self.__struct_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def __add__(self, other: Purged) -> Purged:
        away = list(dict.fromkeys([*self.not_reached, *other.not_reached]))
        kept = list(dict.fromkeys([*self.kept_by, *other.kept_by]))
        shared = list(dict.fromkeys([*self.shared, *other.shared]))
        return Purged(self.objects + other.objects, self.bytes + other.bytes, away, kept, shared)


class AtRestart(msgspec.Struct, frozen=True):
    """What a restart of the daemon would lose, besides what its report says. An object is one rank's block.

    objects, bytes: stored nowhere but in this process's memory, as the other levels and nodes say now.
    unknown: why they are not known; empty if they are.
    stop_copies_s: for how long a stop would copy those of a pool to other nodes.
    configuration: why the daemon would not start with the configuration as it is on disk; empty if it would.
    """

    objects: int = 0
    bytes: int = 0
    unknown: str = ""
    stop_copies_s: float = 0.0
    configuration: str = ""


class StoreDirectory(msgspec.Struct, frozen=True, array_like=True):
    """A directory of object files (storage/paths.py), and which one: another mount may have another at its path."""

    path: str
    device: int
    inode: int


class BlockPlaces(msgspec.Struct, frozen=True):
    """Where blocks lie, for processes of the daemon's user: they may read the files (docs/adr/0121).

    model, fingerprint, generation, rank: of the objects' names and footers (blocks/formats.py).
    where: for each of the request's keys the position of its directory in `directories`; nil if no file has it.
    """

    model: str
    fingerprint: str
    generation: str
    rank: int
    directories: list[StoreDirectory]
    where: list[int | None]


class Leased(msgspec.Struct, frozen=True):
    """What a look-up has found, and keeps, as far as an engine may pin.

    there: for each key, whether every rank can load its block.
    places: where the blocks lie, if the daemon says it to this client.
    """

    there: list[bool]
    places: BlockPlaces | None = None


class Pinned(int):
    """How many blocks are pinned.

    durable: of these, how many a restart leaves, pinned: they and their pin lie on a medium that outlives the daemon.
    reachable: of these, how many a load can use: all blocks before them, from the root of their chain on, are there.
    """

    durable: int
    reachable: int

    def __new__(cls, pinned: int = 0, durable: int = 0, reachable: int = 0) -> Self:
        self = super().__new__(cls, pinned)
        self.durable, self.reachable = durable, reachable
        return self

    @property
    def pinned(self) -> int:
        """The number itself."""
        return int(self)

    def __repr__(self) -> str:
        return f"Pinned({int(self)}, durable={self.durable}, reachable={self.reachable})"
