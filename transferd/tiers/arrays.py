"""Where the arrays of a cache lie: said in a handle by whoever allocated it, checked by whoever maps it.

A rank's device memory is one or more *regions*; each (plane, layer) of the layout is one array in one of
them: contiguous, blocks along its first axis. The daemon describes its own memory with `describe`; what
an engine hands over is checked and located with `locate`, which trusts nothing: an array that is missing,
twice there, of another shape or type, outside its region or over another one is refused, because a copy
plan made from it would write where it must not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from transferd.blocks.layout.base import Arena, BlockLayout, Geometry, Segment
from transferd.errors import RequestError

MISMATCH = "layout_mismatch"


class ArrayPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One (plane, layer) array. shape: with the block axis first. offset: bytes from its region's start."""

    plane: str
    layer: int
    offset: int
    shape: list[int]
    dtype: str
    region: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    """A range of device memory that is mapped here. Borrowed; whoever mapped it owns the mapping."""

    address: int
    nbytes: int


def describe(layout: BlockLayout) -> list[dict[str, Any]]:
    """The arrays of memory that is laid out as `layout.device` says, in one region; plain data for a handle."""
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
    """The arena that these arrays make, its origin the lowest address of them.

    arrays: as in a handle, in any order; an array may have more blocks than the layout, never fewer.
    Raises RequestError with code `layout_mismatch`, naming the array.
    """
    try:
        places = msgspec.convert(arrays, list[ArrayPlace])
    except msgspec.ValidationError as error:
        raise RequestError(f"the arrays of the handle cannot be read: {error}", code=MISMATCH) from None
    found: dict[tuple[str, int], ArrayPlace] = {}
    for place in places:
        if found.setdefault((place.plane, place.layer), place) is not place:
            raise _mismatch(place, "is there twice")
    starts: list[int] = []
    ends: list[int] = []
    for part in layout.segments:
        chosen = found.pop((part.plane.name, part.layer), None)
        if chosen is None:
            raise RequestError(f"{part.plane.name} of layer {part.layer} is missing", code=MISMATCH)
        _check(layout, part, chosen, regions)
        starts.append(regions[chosen.region].address + chosen.offset)
        ends.append(starts[-1] + chosen.shape[0] * part.nbytes)
    if found:
        raise _mismatch(next(iter(found.values())), "is not in this layout")
    _check_apart(layout, starts, ends)
    origin = min(starts)
    nbytes = np.array([part.nbytes for part in layout.segments], dtype=np.int64)
    offsets = np.array(starts, dtype=np.int64) - origin
    geometry = Geometry(offsets, nbytes, nbytes, layout.device.blocks, max(ends) - origin)
    return Arena(geometry, origin)


def _check(layout: BlockLayout, part: Segment, place: ArrayPlace, regions: Sequence[Region]) -> None:
    """One array against the layout and its region."""
    plane, blocks = part.plane, layout.device_blocks_of(part.layer)
    if place.dtype != plane.numpy_dtype.name:
        raise _mismatch(place, f"has elements of type {place.dtype[:20]!r}, the layout {plane.numpy_dtype.name}")
    if tuple(place.shape[1:]) != plane.shape or not place.shape or place.shape[0] < blocks:
        raise _mismatch(place, f"has the shape {place.shape}, the layout {[blocks, *plane.shape]}")
    if not 0 <= place.region < len(regions):
        raise _mismatch(place, f"is in region {place.region} of {len(regions)}")
    room = regions[place.region].nbytes
    if place.offset < 0 or place.offset + place.shape[0] * part.nbytes > room:
        raise _mismatch(place, f"is not inside its region, which has {room} bytes")
    if place.offset % plane.numpy_dtype.itemsize:
        raise _mismatch(place, f"starts at byte {place.offset}, between two of its elements")


def _check_apart(layout: BlockLayout, starts: list[int], ends: list[int]) -> None:
    order = sorted(range(len(starts)), key=starts.__getitem__)
    for before, after in itertools.pairwise(order):
        if starts[after] < ends[before]:
            one, other = layout.segments[before], layout.segments[after]
            what = f"{one.plane.name} of layer {one.layer} and {other.plane.name} of layer {other.layer} overlap"
            raise RequestError(what, code=MISMATCH)


def _mismatch(place: ArrayPlace, problem: str) -> RequestError:
    plane = place.plane if place.plane.isprintable() else repr(place.plane)
    return RequestError(f"{plane[:40]} of layer {place.layer} {problem}", code=MISMATCH)
