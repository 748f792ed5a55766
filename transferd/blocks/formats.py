"""How a packed block becomes objects of a storage pool. Two formats; `storage.key_schema` chooses one at start.

    schema        objects of one (block, rank)                        what proves an object whole
    transferd     one: all planes in layout order, then the footer    its footer (footer.py)
    fastdeploy    one a plane: [layers, heads, block_size, head_dim]  its length, nothing else

Everything that differs is here: what objects are called, where each segment of a block lies in a staging
slot, which part of the slot is which object, and what is written and checked beside the bytes. Workers
ask the format and never which one it is; a block that is several objects is taken apart and put
together by `storage/divided.py`.

FastDeploy's names are `prefix{version}_{hash}_{rank}_{plane}` with plane one of key, value, key_scale,
value_scale. Its objects hold raw bytes, all layers of one plane one after the other, as its
cache_transfer_manager.py and swap_cache_layout.cu lay them out. `indexer` (DSA) is ours: FastDeploy does
not store it. Neither model, tensor-parallel size nor dtype are part of such a name, and nothing in the
object tells damage from data: docs/fastdeploy.md says what that costs.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transferd.blocks.footer import FOOTER_BYTES, Damage, check, seal, stamps
from transferd.blocks.keys import ObjectNamer
from transferd.blocks.layout.base import BlockLayout
from transferd.config import StorageSection


@dataclass(frozen=True, slots=True)
class Part:
    """One of a block's objects: its name is the block's name and `suffix`, its bytes are slot[start:stop]."""

    suffix: str
    start: int
    stop: int


class ObjectFormat(abc.ABC):
    """See the module. Immutable; shared by all ranks and threads.

    parts: the objects of a block, which together fill a slot's first `slot_bytes` bytes.
    offsets: int64 [segments], where each segment of a block begins in a slot.
    checked_bytes: how many bytes of a block `seal` and `check` go over, which is what they cost.
    """

    parts: tuple[Part, ...]
    offsets: npt.NDArray[np.int64]
    checked_bytes: int

    @property
    def slot_bytes(self) -> int:
        return self.parts[-1].stop

    @abc.abstractmethod
    def ids(self, keys: Iterable[str]) -> list[str]:
        """What of the keys goes into names. The same on every rank: computed once per task."""

    @abc.abstractmethod
    def names(self, generation: str, ids: Iterable[str], rank: int) -> list[str]:
        """The names of one rank's blocks, in order."""

    @abc.abstractmethod
    def id_of(self, generation: str, name: str) -> str | None:
        """The id in the name of a block of this generation, whatever its rank; None for any other name."""

    def possible(self, name: str, nbytes: int) -> bool:  # noqa: ARG002 - names say nothing of lengths, usually
        """Whether something of this length can be the object of this name, as far as name and length tell."""
        return nbytes > 0

    @abc.abstractmethod
    def seal(self, slots: Sequence[memoryview], generation: str, ids: Sequence[str], rank: int) -> None:
        """Complete slots that hold packed blocks, so that `check` can tell whether they come back as they are."""

    @abc.abstractmethod
    def check(self, slots: Sequence[memoryview], generation: str, ids: Sequence[str], rank: int) -> list[Damage | None]:
        """For each slot: None if it holds the whole block it should, else why it must not be delivered."""


class SealedBlocks(ObjectFormat):
    """transferd's own: one object for a block, sealed with a footer that names model, layout, generation, key, rank."""

    def __init__(self, model: str, layout: BlockLayout) -> None:
        self._namer = ObjectNamer(model, layout.fingerprint)
        self._payload = layout.block_bytes
        self.parts = (Part("", 0, layout.block_bytes + FOOTER_BYTES),)
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

    def seal(self, slots: Sequence[memoryview], generation: str, ids: Sequence[str], rank: int) -> None:
        namer = self._namer
        marks = stamps(ids, model=namer.model, fingerprint=namer.fingerprint, generation=generation, rank=rank)
        for slot, mark in zip(slots, marks, strict=True):
            seal(slot, self._payload, mark)

    def check(self, slots: Sequence[memoryview], generation: str, ids: Sequence[str], rank: int) -> list[Damage | None]:
        namer = self._namer
        marks = stamps(ids, model=namer.model, fingerprint=namer.fingerprint, generation=generation, rank=rank)
        return [check(slot, self._payload, mark) for slot, mark in zip(slots, marks, strict=True)]


class RawPlanes(ObjectFormat):
    """FastDeploy's: an object for each plane, raw. Shares a pool with FastDeploy's own transfer processes."""

    checked_bytes = 0

    def __init__(self, layout: BlockLayout) -> None:
        layers = layout.layers + layout.mtp_layers
        parts, first = [], {}
        end = 0
        for plane in layout.planes:
            first[plane.name] = end
            parts.append(Part(f"_{plane.name}", end, end + layers * plane.nbytes))
            end = parts[-1].stop
        self.parts = tuple(parts)
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

    def seal(self, slots: Sequence[memoryview], generation: str, ids: Sequence[str], rank: int) -> None:
        """There is nothing beside the bytes."""

    def check(
        self,
        slots: Sequence[memoryview],
        generation: str,  # noqa: ARG002 - nothing to compare with
        ids: Sequence[str],  # noqa: ARG002
        rank: int,  # noqa: ARG002
    ) -> list[Damage | None]:
        """Storage has checked the lengths, and that is all that can be."""
        return [None] * len(slots)


def object_format(storage: StorageSection, layout: BlockLayout) -> ObjectFormat:
    """The configured format."""
    if storage.key_schema == "fastdeploy":
        return RawPlanes(layout)
    return SealedBlocks(storage.model, layout)
