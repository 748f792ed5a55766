"""What a block is: an ordered list of byte segments, one for each (layer, plane).

The rest of the package never asks which attention a model has. A layout file (gqa, mla, dsa) turns
the configuration into planes; from there on a block is `segments`, layer-major, planes in the order
key, value, key_scale, value_scale, indexer. The order is part of the stored format and never
depends on a dict or on the order of registration.

Where segments lie in memory is an `Arena`: segment s of block b starts at

    origin + offsets[s] + b * strides[s]

This one formula describes both shapes that memory comes in:

* *layer-major* (device tensors): each segment is an array of all blocks; strides[s] = nbytes[s];
* *packed* (the host pool, staging slots, stored objects): a block's segments lie one after the other;
  strides[s] = the slot size. One block is then one range, which a DMA engine moves at full speed where
  a range for each segment would be too small for it (docs/adr/0007).

Copying between any two places is therefore one function (copyplan), for every direction and plane.
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

# Element types by config name: (numpy type that carries the bytes, bytes per element). numpy has no
# bfloat16; uint16 stands for it, and adapters give the true type back.
ELEMENT_TYPES = {"bfloat16": "uint16", "float16": "float16", "float32": "float32", "uint8": "uint8"}


@dataclass(frozen=True, slots=True)
class Plane:
    """One kind of bytes in a block.

    shape: of one block in one layer, without the block axis, e.g. (kv_heads, block_size, head_dim).
    dtype: the true element type, a key of ELEMENT_TYPES.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        return np.dtype(ELEMENT_TYPES[self.dtype])

    @property
    def nbytes(self) -> int:
        """Bytes of this plane in one block of one layer."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Segment:
    """The bytes of one plane in one layer of a block. `offset` is its place in a packed block."""

    layer: int
    plane: Plane
    offset: int

    @property
    def nbytes(self) -> int:
        return self.plane.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """Where each segment of each block lies, relative to an origin. Immutable; compare by identity.

    offsets, strides, nbytes: int64 [segments]. blocks: ids 0 … blocks-1 are legal in every segment.
    extent: bytes from the origin to the end of the last block.
    """

    offsets: npt.NDArray[np.int64]
    strides: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    blocks: int
    extent: int


@dataclass(frozen=True, slots=True)
class Arena:
    """A geometry at an address. Borrows the memory; whoever made it says in its docs who owns it."""

    geometry: Geometry
    origin: int


@dataclass(frozen=True)
class BlockLayout:
    """A model's KV block on one rank: what it holds and how it is laid out everywhere.

    planes: in PLANE_ORDER. layers: main layers; mtp_layers follow them as further layers.
    device_blocks, mtp_blocks, host_blocks: how many blocks each place has (MTP layers may have more
    device blocks than the main ones; a block id is legal if every layer has it).
    identity: everything that makes two caches incompatible, as text; its digest is the fingerprint.
    """

    planes: tuple[Plane, ...]
    layers: int
    mtp_layers: int
    device_blocks: int
    mtp_blocks: int
    host_blocks: int
    identity: str

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Every segment of a block in packed order: layer by layer, planes in order within it."""
        segments: list[Segment] = []
        offset = 0
        for layer in range(self.layers + self.mtp_layers):
            for plane in self.planes:
                segments.append(Segment(layer, plane, offset))
                offset += plane.nbytes
        return tuple(segments)

    @functools.cached_property
    def block_bytes(self) -> int:
        """Bytes of one block of one rank, all layers and planes."""
        return sum(segment.nbytes for segment in self.segments)

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits; equal only for caches whose stored bytes mean the same."""
        return xxhash.xxh3_64_hexdigest(self.identity.encode())

    def device_blocks_of(self, layer: int) -> int:
        """How many device blocks this layer has: MTP layers, which follow the main ones, have their own count."""
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

        offsets: where each segment begins in its slot; packed order if None.
        """
        assert slot_bytes >= self.block_bytes
        in_order = np.array([s.offset for s in self.segments], dtype=np.int64)
        return Geometry(
            offsets=in_order if offsets is None else offsets,
            strides=np.full(len(self.segments), slot_bytes, dtype=np.int64),
            nbytes=np.array([s.nbytes for s in self.segments], dtype=np.int64),
            blocks=slots,
            extent=slots * slot_bytes,
        )


ALIGNMENT = 256  # bytes: what cudaMalloc guarantees and vector loads like; applied to each segment's start


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """The next multiple of `to` at or above nbytes."""
    return -(-nbytes // to) * to


def assemble(cache: CacheSection, planes: Sequence[Plane]) -> BlockLayout:
    """The layout that these planes make with the configured counts; what the layout files end with."""
    ordered = tuple(sorted(planes, key=lambda plane: PLANE_ORDER.index(plane.name)))
    shapes = ";".join(f"{plane.name}:{'x'.join(map(str, plane.shape))}:{plane.dtype}" for plane in ordered)
    identity = (
        f"attention={cache.attention} layers={cache.layers} mtp_layers={cache.mtp_layers} "
        f"block_size={cache.block_size} dtype={cache.dtype} tp={cache.ranks} planes={shapes}"
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
