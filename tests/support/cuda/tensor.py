"""Tensors as torch shows those on a GPU, with what TransferdConnector asks of them, over memory of any driver."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

AXES = "LBHNC"  # vLLM's logical axes: layers, blocks, heads, tokens, content


class GpuTensor:
    """shape, strides: in elements of `itemsize` bytes. storage: address of the allocation that it is a view of."""

    def __init__(
        self, storage: int, offset: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, device: int = 0
    ) -> None:
        self.shape = tuple(shape)
        self.device = SimpleNamespace(type="cuda", index=device)
        self.offset = offset  # bytes
        self._storage, self._strides, self._itemsize = storage, tuple(strides), itemsize

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def element_size(self) -> int:
        return self._itemsize

    def data_ptr(self) -> int:
        return self._storage + self.offset

    def untyped_storage(self) -> SimpleNamespace:
        return SimpleNamespace(data_ptr=lambda: self._storage)


def layer_views(
    layout: str, shape: Sequence[int], itemsize: int, *, parts: int = 1, padding: int = 0
) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Each layer's offset in bytes, its shape [blocks, heads, tokens, content], and its strides in elements.

    layout: a permutation of AXES, outermost first, as vLLM names its layouts. shape: in the order of AXES. parts: the
    kernel's blocks in one of vLLM's. padding: elements behind each page, of layouts that have L and B outermost.
    """
    sizes = dict(zip(AXES, shape, strict=True))
    sizes["B"], sizes["N"] = sizes["B"] * parts, sizes["N"] // parts
    strides, step = {}, 1
    for axis in reversed(layout):
        strides[axis] = step = step + (padding if axis == layout[1] else 0)
        step *= sizes[axis]
    inner = [(sizes[axis], strides[axis]) for axis in AXES[1:]]
    one = tuple(size for size, _ in inner), tuple(stride for _, stride in inner)
    return [(layer * strides["L"] * itemsize, *one) for layer in range(sizes["L"])]


def extent(shape: Sequence[int], itemsize: int, padding: int = 0) -> int:
    """Bytes that all layers need together."""
    return (math.prod(shape) + shape[0] * shape[1] * padding) * itemsize
