"""Where an engine's pages lie: checks the segments of an offer and makes an arena from them.

A handle over pages has `segments` instead of `arrays`: for each layer, in order, [offset, block_stride] or
[offset, block_stride, region], in bytes. Block b of layer l is the layout's page_bytes[l] bytes at offset + b * stride
of the region (region 0 if not given). A wrong segment would make a copy write to the wrong place, so all is checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from transferd.blocks.layout.base import Arena, BlockLayout, Geometry
from transferd.blocks.layout.pages import PagesLayout
from transferd.errors import RequestError
from transferd.tiers.arrays import MISMATCH, Region, locate
from transferd.tiers.extents import extent, overlapping

MAX_BYTES = 2**62  # of an offset or a stride, so that no sum of them overflows


class PageSegment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the pages of one layer lie in their region."""

    offset: int
    stride: int
    region: int = 0


def locate_offered(layout: BlockLayout, data: Mapping[str, Any], regions: Sequence[Region]) -> Arena:
    """The arena that a handle's data describes, by its segments if the layout is pages, else by its arrays.

    Raises RequestError with code `layout_mismatch` that names what does not fit.
    """
    if not isinstance(layout, PagesLayout):
        return locate(layout, data.get("arrays"), regions)
    return _locate(layout, data.get("segments"), regions)


def _locate(layout: PagesLayout, said: object, regions: Sequence[Region]) -> Arena:
    try:
        segments = msgspec.convert(said, list[PageSegment])
    except msgspec.ValidationError as error:
        raise RequestError(f"the handle's segments are malformed: {error}", code=MISMATCH) from None
    if len(segments) != layout.layers:
        what = f"the handle has {len(segments)} segments; the layout needs {layout.layers}, one per layer"
        raise RequestError(what, code=MISMATCH)
    blocks, sizes = layout.device_blocks, layout.page_bytes
    for layer, (segment, nbytes) in enumerate(zip(segments, sizes, strict=True)):
        _check(layer, segment, nbytes, blocks, regions)
    starts = [regions[segment.region].address + segment.offset for segment in segments]
    strides = [segment.stride for segment in segments]
    extents = [extent(None, *place, blocks) for place in zip(starts, sizes, strides, strict=True)]
    if (both := overlapping(extents)) is not None:
        one, other = sorted(both)
        raise RequestError(f"the pages of layers {one} and {other} overlap", code=MISMATCH)
    ends = [start + (blocks - 1) * step + size for start, step, size in zip(starts, strides, sizes, strict=True)]
    origin = min(starts)
    geometry = Geometry(
        offsets=np.array(starts, dtype=np.int64) - origin,
        strides=np.array(strides, dtype=np.int64),
        nbytes=np.array(sizes, dtype=np.int64),
        blocks=blocks,
        extent=max(ends) - origin,
    )
    return Arena(geometry, origin)


def _check(layer: int, segment: PageSegment, nbytes: int, blocks: int, regions: Sequence[Region]) -> None:
    if not 0 <= segment.region < len(regions):
        raise _mismatch(layer, f"names region {segment.region}; the handle has {len(regions)}")
    if not (0 <= segment.offset <= MAX_BYTES and 0 <= segment.stride <= MAX_BYTES):
        raise _mismatch(layer, f"starts at byte {segment.offset} with a stride of {segment.stride}")
    if segment.stride < nbytes:
        raise _mismatch(layer, f"has a stride of {segment.stride} bytes, less than its {nbytes} bytes per block")
    room = regions[segment.region].nbytes
    end = segment.offset + (blocks - 1) * segment.stride + nbytes
    if end > room:
        raise _mismatch(layer, f"ends at byte {end} with {blocks} blocks; its region has {room} bytes")


def _mismatch(layer: int, problem: str) -> RequestError:
    return RequestError(f"the segment of layer {layer} {problem}", code=MISMATCH)
