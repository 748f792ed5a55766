"""How a packed block becomes objects in a storage pool. There are two formats; `storage.key_schema` chooses one.

    schema        objects of one (block, rank)                              what proves an object intact
    transferd     one: all planes in layout order, then the footer          its footer (footer.py)
    fastdeploy    one per plane: [layers, heads, block_size, head_dim]      only its length

This module contains all the differences: the names of objects, the place of each segment in a staging slot, which
part of the slot is which object, and what is written and checked besides the bytes. Workers do not know which
ObjectFormat they use. `storage/divided.py` splits and joins blocks that are several objects.

FastDeploy's names are `prefix{version}_{hash}_{rank}_{plane}`, where plane is key, value, key_scale or value_scale.
Its objects hold raw bytes: all layers of one plane, one after the other, as its cache_transfer_manager.py and
swap_cache_layout.cu lay them out. `indexer` (DSA) is our addition: FastDeploy does not store it. Such a name
contains neither model nor tensor-parallel size nor dtype, and nothing in the object shows damage.
docs/fastdeploy.md describes the cost.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transferd.blocks.footer import FOOTER_BYTES, Damage, Inspection, check, seal, stamps
from transferd.blocks.keys import ObjectNamer
from transferd.blocks.layout.base import BlockLayout
from transferd.blocks.layout.families import PagesLayout
from transferd.config import StorageSection
from transferd.errors import ConfigError, InvariantError


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """One of a block's objects. Its name is the block's name + `suffix`; its bytes are slot[start:stop]."""

    suffix: str
    start: int
    stop: int


class ObjectFormat(abc.ABC):
    """See the module. Immutable; shared by all ranks and threads.

    space: what the names of all its objects begin with (storage/shares.py).
    parts: a block's objects. slot_bytes: they fill so many bytes at the begin of a slot.
    offsets: int64 [segments], the start of each segment in a slot.
    checked_bytes: how many bytes of a block `seal` and `check` read; that is their cost.
    """

    space: str
    parts: tuple[ObjectPart, ...]
    slot_bytes: int
    offsets: npt.NDArray[np.int64]
    checked_bytes: int

    @abc.abstractmethod
    def ids(self, keys: Iterable[str]) -> list[str]:
        """The part of each key that goes into names. The same on every rank, so it is computed once per task."""

    @abc.abstractmethod
    def names(self, generation: str, ids: Iterable[str], rank: int) -> list[str]:
        """The names of one rank's blocks, in order."""

    @abc.abstractmethod
    def id_of(self, generation: str, name: str) -> str | None:
        """The id in the name of a block of this generation and any rank; None for any other name."""

    def possible(self, name: str, nbytes: int) -> bool:  # noqa: ARG002 - most names do not tell the length
        """Whether an object of this name could have this length."""
        return nbytes > 0

    @abc.abstractmethod
    def seal(
        self,
        slots: Sequence[memoryview],
        generation: str,
        ids: Sequence[str],
        rank: int,
        checksums: Sequence[Sequence[int]] = (),
    ) -> None:
        """Complete slots that hold packed blocks, so that `check` can later prove them intact.

        checksums: for each block what footer.seal takes, if the caller has them.
        """

    @abc.abstractmethod
    def check(self, slots: Sequence[memoryview], generation: str, ids: Sequence[str], rank: int) -> list[Damage | None]:
        """For each slot: None if it holds the right block, intact; otherwise why it must not be delivered."""

    @abc.abstractmethod
    def inspections(self, generation: str, ids: Sequence[str], rank: int) -> list[Inspection]:
        """Like `check`, for objects read in pieces. Raises InvariantError if the format splits a block into objects."""


class SealedBlocks(ObjectFormat):
    """transferd's format: one object per block. Its footer seals model, layout, generation, key and rank."""

    def __init__(self, model: str, layout: BlockLayout) -> None:
        self._namer = ObjectNamer(model, layout.fingerprint)
        self.space = self._namer.space
        self._payload = layout.block_bytes
        self.slot_bytes = layout.block_bytes + FOOTER_BYTES
        self.parts = (ObjectPart("", 0, self.slot_bytes),)
        self.offsets = np.array([segment.offset for segment in layout.segments], dtype=np.int64)
        self.checked_bytes = layout.block_bytes

    def ids(self, keys: Iterable[str]) -> list[str]:
        return self._namer.digests(keys)

    def names(self, generation: str, ids: Iterable[str], rank: int) -> list[str]:
        return self._namer.names(generation, ids, rank)

    def id_of(self, generation: str, name: str) -> str | None:
        return self._namer.digest_of(generation, name)

    def possible(self, name: str, nbytes: int) -> bool:
        return nbytes == self.slot_bytes if self._namer.owns(name) else nbytes > FOOTER_BYTES

    def seal(
        self,
        slots: Sequence[memoryview],
        generation: str,
        ids: Sequence[str],
        rank: int,
        checksums: Sequence[Sequence[int]] = (),
    ) -> None:
        namer = self._namer
        marks = stamps(ids, model=namer.model, fingerprint=namer.fingerprint, generation=generation, rank=rank)
        for slot, mark, known in zip(slots, marks, checksums or [()] * len(slots), strict=True):
            seal(slot, self._payload, mark, known)

    def check(self, slots: Sequence[memoryview], generation: str, ids: Sequence[str], rank: int) -> list[Damage | None]:
        namer = self._namer
        marks = stamps(ids, model=namer.model, fingerprint=namer.fingerprint, generation=generation, rank=rank)
        return [check(slot, self._payload, mark) for slot, mark in zip(slots, marks, strict=True)]

    def inspections(self, generation: str, ids: Sequence[str], rank: int) -> list[Inspection]:
        namer = self._namer
        marks = stamps(ids, model=namer.model, fingerprint=namer.fingerprint, generation=generation, rank=rank)
        return [Inspection(mark, self.slot_bytes) for mark in marks]


class RawPlanes(ObjectFormat):
    """FastDeploy's format: one raw object per plane. Shares a pool with FastDeploy's own transfer processes."""

    space = ""
    checked_bytes = 0

    def __init__(self, layout: BlockLayout) -> None:
        layers = layout.layers + layout.mtp_layers
        parts, first = [], {}
        end = 0
        for plane in layout.planes:
            first[plane.name] = end
            parts.append(ObjectPart(f"_{plane.name}", end, end + layers * plane.nbytes))
            end = parts[-1].stop
        self.parts = tuple(parts)
        self.slot_bytes = end
        self.offsets = np.array(
            [first[segment.plane.name] + segment.layer * segment.nbytes for segment in layout.segments], dtype=np.int64
        )

    def ids(self, keys: Iterable[str]) -> list[str]:
        return list(keys)

    def names(self, generation: str, ids: Iterable[str], rank: int) -> list[str]:
        return [f"prefix{generation}_{key}_{rank}" for key in ids]

    def id_of(self, generation: str, name: str) -> str | None:
        head = f"prefix{generation}_"
        key, _, rank = name[len(head) :].rpartition("_")
        return key if name.startswith(head) and rank.isdigit() else None

    def seal(
        self,
        slots: Sequence[memoryview],
        generation: str,
        ids: Sequence[str],
        rank: int,
        checksums: Sequence[Sequence[int]] = (),
    ) -> None:
        """Does nothing: the format has only the raw bytes."""

    def check(
        self,
        slots: Sequence[memoryview],
        generation: str,  # noqa: ARG002 - nothing to compare with
        ids: Sequence[str],  # noqa: ARG002
        rank: int,  # noqa: ARG002
    ) -> list[Damage | None]:
        """Finds no damage: storage has checked the lengths, and there is nothing else to check."""
        return [None] * len(slots)

    def inspections(self, generation: str, ids: Sequence[str], rank: int) -> list[Inspection]:
        raise InvariantError(f"planes of rank {rank} have no footers: {len(ids)} blocks of generation {generation!r}")


def object_format(storage: StorageSection, layout: BlockLayout) -> ObjectFormat:
    """The configured format. Raises ConfigError."""
    if storage.key_schema == "fastdeploy":
        if isinstance(layout, PagesLayout):
            what = 'FastDeploy\'s objects are planes of a model; pages need the schema "transferd"'
            raise ConfigError("storage.key_schema", what, storage.key_schema)
        return RawPlanes(layout)
    return SealedBlocks(storage.model, layout)
