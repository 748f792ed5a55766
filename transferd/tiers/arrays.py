"""The arrays of a cache: the process that allocates them describes them in a handle; the one that maps them checks it.

A rank's device memory is one or more *regions*. Each (plane, layer) of the layout is one contiguous array in one
of them, with blocks along its first axis. `locate` trusts nothing: a copy plan made from an array that is missing,
duplicate, misshaped, outside its region or overlapping another one would write to the wrong place.
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
    try:
        places = msgspec.convert(arrays, list[ArrayPlace])
    except msgspec.ValidationError as error:
        raise RequestError(f"the handle's arrays are malformed: {error}", code=MISMATCH) from None
    found: dict[tuple[str, int], ArrayPlace] = {}
    for place in places:
        if found.setdefault((place.plane, place.layer), place) is not place:
            raise _mismatch(place, "occurs twice")
    starts: list[int] = []
    ends: list[int] = []
    for part in layout.segments:
        chosen = found.pop((part.plane.name, part.layer), None)
        if chosen is None:
            raise RequestError(f"{part.plane.name} of layer {part.layer} is missing from the handle", code=MISMATCH)
        _check(layout, part, chosen, regions)
        starts.append(regions[chosen.region].address + chosen.offset)
        ends.append(starts[-1] + chosen.shape[0] * part.nbytes)
    if found:
        raise _mismatch(next(iter(found.values())), "is not part of this layout")
    _check_apart(layout, starts, ends)
    origin = min(starts)
    nbytes = np.array([part.nbytes for part in layout.segments], dtype=np.int64)
    offsets = np.array(starts, dtype=np.int64) - origin
    geometry = Geometry(offsets, nbytes, nbytes, layout.device.blocks, max(ends) - origin)
    return Arena(geometry, origin)


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
