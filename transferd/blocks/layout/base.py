"""A block is an ordered list of byte segments, one for each (layer, plane).

The rest of the package does not depend on a model's attention. A family (families.py) turns the
configuration into planes. From there on a block is a list of segments: layer-major, with planes in the order key,
value, key_scale, value_scale, indexer. The order is part of the stored format, and never depends on a dict or
on the order of registration.

An `Arena` places segments in memory. Segment s of block b starts at

    origin + offsets[s] + b * strides[s]

This formula describes every shape of memory:

* *layer-major* (device tensors): each segment is an array of all blocks; strides[s] = nbytes[s];
* *pages* (an engine's own memory): the engine's offer names the start and the step of each segment;
* *packed* (the host pool, staging slots, stored objects): a block's segments lie one after the other;
  strides[s] = the slot size. So one block is one range, which a DMA engine moves at full speed; one range per
  segment would be too short for that (docs/adr/0007).

So one function (copyplan) copies between any two places, for every direction and plane.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from transferd.config import CacheSection

PLANE_ORDER = ("key", "value", "key_scale", "value_scale", "indexer")

PAGE = "page"  # the plane of opaque bytes

PARTS = 3  # of a block that are sealed on their own: as many as a footer has room for

# Element types by config name, as the numpy type that carries the bytes. numpy has no bfloat16: uint16 stands
# for it, and adapters restore the true type.
ELEMENT_TYPES = {"bfloat16": "uint16", "float16": "float16", "float32": "float32", "uint8": "uint8"}


@dataclass(frozen=True, slots=True)
class Plane:
    """One kind of bytes in a block."""

    name: str
    shape: tuple[int, ...]  # one block in one layer, without the block axis, e.g. (kv_heads, block_size, head_dim)
    dtype: str  # the true element type, a key of ELEMENT_TYPES

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        return np.dtype(ELEMENT_TYPES[self.dtype])

    @property
    def nbytes(self) -> int:
        """Bytes of this plane in one block of one layer."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize


def page(nbytes: int) -> Plane:
    """The plane of a layer of pages."""
    return Plane(PAGE, (nbytes,), "uint8")


@dataclass(frozen=True, slots=True)
class Segment:
    """The bytes of one plane in one layer of a block. offset: its start in a packed block."""

    layer: int
    plane: Plane
    offset: int

    @property
    def nbytes(self) -> int:
        return self.plane.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """The location of each segment of each block, relative to an origin. Immutable; compare by identity."""

    offsets: npt.NDArray[np.int64]  # int64 [segments]
    strides: npt.NDArray[np.int64]  # int64 [segments]
    nbytes: npt.NDArray[np.int64]  # int64 [segments]
    blocks: int  # ids 0 … blocks-1 are valid in every segment
    extent: int  # bytes from the origin to the end of the last block


@dataclass(frozen=True, slots=True)
class Arena:
    """A geometry at an address. Borrows the memory; see the maker's docs for its owner."""

    geometry: Geometry
    origin: int


@dataclass(frozen=True)
class BlockLayout:
    """A model's KV block on one rank: its content, and its layout in every place.

    page_bytes: of *pages*, opaque bytes for engines that lay out their own KV cache (vLLM, SGLang, LMCache): the size
        of each layer's only segment. The offer contains the places of pages (tiers/arrays.py). Else empty.
    """

    planes: tuple[Plane, ...]  # in PLANE_ORDER, the same in every layer (of pages: one per size)
    layers: int  # main layers; mtp_layers follow them
    mtp_layers: int
    # device_blocks, mtp_blocks, host_blocks: the number of blocks in each place (MTP layers may have more device blocks
    # than the main layers; a block id is valid if every layer has it)
    device_blocks: int
    mtp_blocks: int
    host_blocks: int
    identity: str  # a text with everything that makes two caches incompatible; its digest is the fingerprint
    windows: bool = False  # device blocks may share bytes
    page_bytes: tuple[int, ...] = ()

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Every segment of a block in packed order: layer by layer, with planes in order."""
        segments: list[Segment] = []
        offset = 0
        for layer in range(self.layers + self.mtp_layers):
            for plane in (page(self.page_bytes[layer]),) if self.page_bytes else self.planes:
                segments.append(Segment(layer, plane, offset))
                offset += plane.nbytes
        return tuple(segments)

    @functools.cached_property
    def block_bytes(self) -> int:
        """Bytes of one block of one rank, all layers and planes."""
        return sum(segment.nbytes for segment in self.segments)

    @functools.cached_property
    def part_ends(self) -> tuple[tuple[int, int], ...]:
        """Where each sealed part of a packed block ends (formats.py): (layers, bytes) before the end.

        All parts but the last are whole layers, about as many in each. These ends belong to the stored format.
        """
        layers = self.layers + self.mtp_layers
        ends = [(layers, self.block_bytes)]
        if layers >= PARTS:
            firsts = [layers * part // PARTS for part in range(1, PARTS)]
            starts = {segment.layer: segment.offset for segment in reversed(self.segments)}
            ends = [*((layer, starts[layer]) for layer in firsts), *ends]
        return tuple(ends)

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits. Equal only for caches that store the same bytes with the same meaning."""
        return xxhash.xxh3_64_hexdigest(self.identity.encode())

    def device_blocks_of(self, layer: int) -> int:
        """How many device blocks this layer has. MTP layers, which follow the main ones, have their own count."""
        return self.device_blocks if layer < self.layers else self.mtp_blocks

    @functools.cached_property
    def device(self) -> Geometry:
        """Layer-major, in segment order, each segment aligned: one rank's device memory in one piece."""
        counts = [self.device_blocks_of(segment.layer) for segment in self.segments]
        offsets: list[int] = []
        end = 0
        for segment, count in zip(self.segments, counts, strict=True):
            offsets.append(end)
            end += align(segment.nbytes * count)
        nbytes = np.array([s.nbytes for s in self.segments], dtype=np.int64)
        return Geometry(np.array(offsets, dtype=np.int64), nbytes, nbytes, min(counts), end)

    @functools.cached_property
    def host(self) -> Geometry:
        """host_blocks packed blocks: one rank's pinned pool in one piece."""
        return self.packed(self.host_blocks, align(self.block_bytes))

    def packed(self, slots: int, slot_bytes: int, offsets: npt.NDArray[np.int64] | None = None) -> Geometry:
        """`slots` packed blocks, each at the start of a slot of `slot_bytes` (>= block_bytes).

        offsets: the start of each segment in its slot; None for packed order.

        Equal arguments give the same object, so that ranks can share copy plans.
        """
        assert slot_bytes >= self.block_bytes
        key = slots, slot_bytes, None if offsets is None else offsets.tobytes()
        if key not in self._packed:
            count = len(self.segments)
            self._packed[key] = Geometry(
                offsets=np.array([s.offset for s in self.segments], dtype=np.int64) if offsets is None else offsets,
                strides=np.full(count, slot_bytes, dtype=np.int64),
                nbytes=np.fromiter((s.nbytes for s in self.segments), np.int64, count),
                blocks=slots,
                extent=slots * slot_bytes,
            )
        return self._packed[key]

    @functools.cached_property
    def _packed(self) -> dict[tuple[int, int, bytes | None], Geometry]:
        return {}


ALIGNMENT = 256  # bytes, of each segment's start: cudaMalloc guarantees it, and vector loads need it


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """`nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


def assemble(cache: CacheSection, planes: Sequence[Plane]) -> BlockLayout:
    """The layout of these planes with the configured counts: the last step of every layout file."""
    ordered = tuple(sorted(planes, key=lambda plane: PLANE_ORDER.index(plane.name)))
    shapes = ";".join(f"{plane.name}:{'x'.join(map(str, plane.shape))}:{plane.dtype}" for plane in ordered)
    identity = (
        f"attention={cache.attention} layers={cache.layers} mtp_layers={cache.mtp_layers} "
        f"block_size={cache.block_size} dtype={cache.dtype} tp={cache.tensor_parallel_size} planes={shapes}"
    )
    return BlockLayout(
        planes=ordered,
        layers=cache.layers,
        mtp_layers=cache.mtp_layers,
        device_blocks=cache.device_blocks,
        mtp_blocks=cache.mtp_blocks or cache.device_blocks,
        host_blocks=cache.host_blocks,
        identity=identity,
    )
