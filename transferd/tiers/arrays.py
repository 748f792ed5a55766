"""The arrays of a cache: their allocator describes them in a handle, and the process that maps them checks the handle.

A rank's device memory is one or more *regions*. Each (plane, layer) of the layout is one contiguous array in one
of them, with blocks along its first axis. `locate` trusts nothing: a copy plan made from an array that is missing,
duplicate, misshaped, outside its region or overlapping another one would write to the wrong place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from transferd.blocks.layout.base import Arena, BlockLayout, Geometry, Segment
from transferd.errors import RequestError
from transferd.runtime.compat import converted
from transferd.tiers.extents import extent, overlapping

MISMATCH = "layout_mismatch"


class ArrayPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One (plane, layer) array."""

    plane: str
    layer: int
    offset: int  # bytes from its region's start
    shape: list[int]  # with the block axis first
    dtype: str
    region: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    """A range of mapped device memory. Borrowed: the code that mapped it owns the mapping."""

    address: int
    nbytes: int


def describe(layout: BlockLayout) -> list[dict[str, Any]]:
    """Describe memory with the geometry `layout.device`, in one region: the `arrays` of a handle, as plain data."""
    return [
        msgspec.to_builtins(
            ArrayPlace(
                plane=part.plane.name,
                layer=part.layer,
                offset=int(offset),
                shape=[layout.device_blocks_of(part.layer), *part.plane.shape],
                dtype=part.plane.numpy_dtype.name,
            )
        )
        for part, offset in zip(layout.segments, layout.device.offsets, strict=True)
    ]


def locate(layout: BlockLayout, arrays: object, regions: Sequence[Region]) -> Arena:
    """The arena of these arrays. Its origin is their lowest address.

    arrays: as in a handle, in any order. An array may have more blocks than the layout, never fewer.
    Raises RequestError with code `layout_mismatch` that names the array.
    """
    places = converted(arrays, list[ArrayPlace], "the handle's arrays are malformed", MISMATCH)
    found: dict[tuple[str, int], ArrayPlace] = {}
    for place in places:
        if found.setdefault((place.plane, place.layer), place) is not place:
            raise _mismatch(place, "occurs twice")
    starts: list[int] = []
    counts: list[int] = []
    for part in layout.segments:
        chosen = found.pop((part.plane.name, part.layer), None)
        if chosen is None:
            raise RequestError(f"{part.plane.name} of layer {part.layer} is missing from the handle", code=MISMATCH)
        _check(layout, part, chosen, regions)
        starts.append(regions[chosen.region].address + chosen.offset)
        counts.append(chosen.shape[0])
    if found:
        raise _mismatch(next(iter(found.values())), "is not part of this layout")
    sizes = [part.nbytes for part in layout.segments]
    names = [f"{part.plane.name} of layer {part.layer}" for part in layout.segments]
    return _arena(starts, sizes, sizes, counts, layout.device.blocks, names)


def _arena(
    starts: list[int], strides: Sequence[int], sizes: Sequence[int], counts: list[int], blocks: int, names: list[str]
) -> Arena:
    """The arena of these arrays, of at least so many blocks. Raises RequestError if two overlap."""
    extents = [extent(None, *place) for place in zip(starts, sizes, strides, counts, strict=True)]
    if (both := overlapping(extents)) is not None:
        one, other = (names[position] for position in both)
        raise RequestError(f"{one} and {other} overlap", code=MISMATCH)
    origin = min(starts)
    offsets, steps, nbytes = (np.array(each, dtype=np.int64) for each in (starts, strides, sizes))
    return Arena(Geometry(offsets - origin, steps, nbytes, blocks, max(one.end for one in extents) - origin), origin)


def _check(layout: BlockLayout, part: Segment, place: ArrayPlace, regions: Sequence[Region]) -> None:
    """Check one array against the layout and its region."""
    plane, blocks = part.plane, layout.device_blocks_of(part.layer)
    if place.dtype != plane.numpy_dtype.name:
        raise _mismatch(place, f"has elements of type {place.dtype[:20]!r}; the layout needs {plane.numpy_dtype.name}")
    if tuple(place.shape[1:]) != plane.shape or not place.shape or place.shape[0] < blocks:
        raise _mismatch(place, f"has the shape {place.shape}; the layout needs {[blocks, *plane.shape]}")
    if not 0 <= place.region < len(regions):
        raise _mismatch(place, f"names region {place.region}; the handle has {len(regions)}")
    room = regions[place.region].nbytes
    if place.offset < 0 or place.offset + place.shape[0] * part.nbytes > room:
        raise _mismatch(place, f"extends past its region, which has {room} bytes")
    if place.offset % plane.numpy_dtype.itemsize:
        raise _mismatch(place, f"starts at byte {place.offset}, which is not a multiple of its element size")


def _mismatch(place: ArrayPlace, problem: str) -> RequestError:
    plane = place.plane if place.plane.isprintable() else repr(place.plane)
    return RequestError(f"{plane[:40]} of layer {place.layer} {problem}", code=MISMATCH)


MAX_BYTES = 2**62  # of an offset or a stride, so that no sum of them overflows


class PageSegment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the pages of one layer lie: block b is its page_bytes bytes at offset + b * stride of the region.

    The stride is at least page_bytes, unless blocks are windows.

    A handle over pages has `segments` instead of `arrays`: for each layer, in order, [offset, block_stride] or
    [offset, block_stride, region], in bytes.
    """

    offset: int
    stride: int
    region: int = 0


def locate_offered(layout: BlockLayout, data: Mapping[str, Any], regions: Sequence[Region]) -> Arena:
    """The arena that a handle's data describes, by its segments if the layout is pages, else by its arrays.

    Raises RequestError with code `layout_mismatch` that names what does not fit.
    """
    if not layout.page_bytes:
        return locate(layout, data.get("arrays"), regions)
    return _locate_pages(layout, data.get("segments"), regions)


def _locate_pages(layout: BlockLayout, said: object, regions: Sequence[Region]) -> Arena:
    segments = converted(said, list[PageSegment], "the handle's segments are malformed", MISMATCH)
    if len(segments) != layout.layers:
        what = f"the handle has {len(segments)} segments; the layout needs {layout.layers}, one per layer"
        raise RequestError(what, code=MISMATCH)
    blocks, sizes = layout.device_blocks, layout.page_bytes
    for layer, (segment, nbytes) in enumerate(zip(segments, sizes, strict=True)):
        _check_segment(layer, segment, nbytes, blocks, regions, windows=layout.windows)
    starts = [regions[segment.region].address + segment.offset for segment in segments]
    strides = [segment.stride for segment in segments]
    names = [f"the pages of layer {layer}" for layer in range(len(sizes))]
    return _arena(starts, strides, sizes, [blocks] * len(sizes), blocks, names)


def _check_segment(
    layer: int, segment: PageSegment, nbytes: int, blocks: int, regions: Sequence[Region], *, windows: bool
) -> None:
    if not 0 <= segment.region < len(regions):
        raise _bad_segment(layer, f"names region {segment.region}; the handle has {len(regions)}")
    if not (0 <= segment.offset <= MAX_BYTES and 0 <= segment.stride <= MAX_BYTES):
        raise _bad_segment(layer, f"starts at byte {segment.offset} with a stride of {segment.stride}")
    if segment.stride < (1 if windows else nbytes):
        least = "at least 1" if windows else f"less than its {nbytes} bytes per block: such blocks must be windows"
        raise _bad_segment(layer, f"has a stride of {segment.stride} bytes, {least}")
    room = regions[segment.region].nbytes
    end = segment.offset + (blocks - 1) * segment.stride + nbytes
    if end > room:
        raise _bad_segment(layer, f"ends at byte {end} with {blocks} blocks; its region has {room} bytes")


def _bad_segment(layer: int, problem: str) -> RequestError:
    return RequestError(f"the segment of layer {layer} {problem}", code=MISMATCH)
