"""Where the blocks of vLLM's KV tensors lie: the pieces of a block, as segments of pages.

vLLM gives each layer a tensor [blocks, heads, tokens, content], in one of several physical orders (KVCacheLayout). A
block of a layer is one piece if its content is dense (LBHNC, LBNHC, BLHNC, BLNHC), or one piece for each head if other
blocks or layers lie between its heads (LHBNC, BHLNC). If an attention kernel needs smaller blocks than vLLM's own, the
first axis counts the smaller ones, and a block consists of several of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transferd.errors import TierError

MOST_SEGMENTS = 4096  # the most segments that a layout of pages may have


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """The blocks of one layer, in bytes."""

    pieces: tuple[int, ...]  # where each piece of block 0 starts in the tensor
    nbytes: int  # the size of a piece
    stride: int  # from block to block
    # the tensor's axes, from the outermost to the innermost, in a block's bytes; axes of size 1 are left out
    order: tuple[int, ...]


def distinct(kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors with memory of their own.

    Layers that share their KV have the same tensor. Those of several KV groups lie over each other; the largest counts.
    """
    largest: dict[int, str] = {}
    for name, tensor in kv_caches.items():
        other = largest.setdefault(tensor.data_ptr(), name)
        if _nbytes(tensor) > _nbytes(kv_caches[other]):
            largest[tensor.data_ptr()] = name
    return {name: kv_caches[name] for name in largest.values()}


def _nbytes(tensor: Any) -> int:
    return int(math.prod(tensor.shape) * tensor.element_size())


def blocks_of(tensors: Mapping[str, Any], blocks: int) -> dict[str, LayerBlocks]:
    """How the `blocks` blocks of each layer lie. Raises TierError for a tensor that has no such blocks."""
    found = {name: _blocks_of(name, tensor, blocks) for name, tensor in tensors.items()}
    pieces = sum(len(one.pieces) for one in found.values())
    if pieces > MOST_SEGMENTS:
        what = f"a block has {pieces} pieces in memory, at most {MOST_SEGMENTS} are supported"
        raise TierError(f"{what}: set VLLM_KV_CACHE_LAYOUT to LBHNC, LBNHC, BLHNC or BLNHC")
    return found


def joined(tensors: Mapping[str, Any], found: Mapping[str, LayerBlocks]) -> dict[str, LayerBlocks]:
    """The same bytes in fewer pieces: layers whose blocks touch, or overlap, within a block are one.

    Layouts with the blocks outermost (BLHNC, BLNHC) lay all layers of a block out together, so that it is one range.
    Each range has the name of its first layer.
    """
    runs: dict[str, LayerBlocks] = {}
    last, begin = "", 0
    for name in sorted(found, key=lambda name: int(tensors[name].data_ptr())):
        one, start = found[name], int(tensors[name].data_ptr())
        before = runs.get(last)
        end = start + one.nbytes - begin
        if (
            before is not None
            and len(one.pieces) == len(before.pieces) == 1
            and start - begin <= before.nbytes
            and end <= one.stride == before.stride
        ):
            runs[last] = dataclasses.replace(before, nbytes=max(before.nbytes, end))
        else:
            runs[name] = one
            last, begin = name, start
    return dict(found) if len(runs) == len(found) else runs


def check_shared(kv_caches: Mapping[str, Any], found: Mapping[str, LayerBlocks], blocks: int) -> None:
    """Check that a block of each layer is within the bytes that we move, if several KV groups share memory.

    found: the layers that we move, one for each piece of memory. Raises TierError.
    """
    moved = {kv_caches[name].data_ptr(): (name, one) for name, one in found.items()}
    for name, tensor in kv_caches.items():
        first, one = moved[tensor.data_ptr()]
        other = one if name == first else _blocks_of(name, tensor, blocks)
        nbytes, most = other.nbytes * len(other.pieces), one.nbytes * len(one.pieces)
        if other.stride != one.stride or nbytes > most or (nbytes < most and len(one.pieces) > 1):
            raise TierError(f"{name} and {first} share memory, but their blocks have other sizes: use TransferdTier")


def page_ends(kv_caches: Mapping[str, Any], found: Mapping[str, LayerBlocks]) -> dict[str, int]:
    """For each layer, how many leading pages of a block hold all of it. found: the layers that we move."""
    ends, count = {}, 0
    for name, one in found.items():
        count += len(one.pieces)
        ends[kv_caches[name].data_ptr()] = count
    return {name: ends[tensor.data_ptr()] for name, tensor in kv_caches.items()}


def _blocks_of(name: str, tensor: Any, blocks: int) -> LayerBlocks:
    shape, strides, size = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    parts, rest = divmod(shape[0], blocks)
    if len(shape) < 2 or rest or not parts:  # one raw buffer for all layers, or the first axis does not count blocks
        raise _refused(name, "its first axis does not count blocks", shape, strides, blocks)
    sizes = (parts, *shape[1:])
    axes = sorted(((strides[i], sizes[i], i) for i in range(len(shape)) if sizes[i] > 1), reverse=True)
    order = tuple(axis for _, _, axis in axes)
    run = 1
    while axes and axes[-1][0] == run:
        run *= axes.pop()[1]
    starts, extent = [0], run
    for stride, count, _ in reversed(axes):
        if stride < extent:
            raise _refused(name, "its elements overlap", shape, strides, blocks)
        extent += stride * (count - 1)
    for stride, count, _ in axes:
        starts = [start + i * stride for start in starts for i in range(count)]
    pieces = tuple(start * size for start in starts)
    return LayerBlocks(pieces, run * size, parts * strides[0] * size, order)


def _refused(name: str, what: str, shape: tuple[int, ...], strides: tuple[int, ...], blocks: int) -> TierError:
    return TierError(f"{name}: {what} (shape {shape}, strides {strides}, {blocks} blocks)")
