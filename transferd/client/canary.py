"""The engine's half of a canary (wire/canary.py): write it, describe it in the handle, restore the original bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from transferd.errors import RequestError
from transferd.wire.canary import digest


class Rows(Protocol):
    """One array of a cache in memory that numpy cannot access. Blocks lie along its first axis.

    tiers/cuda/engine.py implements it for GPU memory, adapters/paddle.py for Paddle tensors.
    """

    @property
    def blocks(self) -> int: ...
    def read_block(self, block: int) -> bytes:
        """Wait for all work on the block, then return its bytes."""
        ...

    def write_block(self, block: int, data: bytes) -> None:
        """Write the block. Returns once every other process sees the new bytes."""
        ...


class _NumpyRows:
    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        self.blocks = len(array)

    def read_block(self, block: int) -> bytes:
        data: bytes = self._array[block].tobytes()
        return data

    def write_block(self, block: int, data: bytes) -> None:
        row = self._array[block]
        row[...] = np.frombuffer(data, dtype=row.dtype).reshape(row.shape)


@contextlib.contextmanager
def laid(caches: Mapping[str, Sequence[Any]], block: int | None = None) -> Iterator[dict[str, Any]]:
    """Fill one block of every array with random bytes while this is open; yield the canary for the handle.

    caches: {plane: [one array per layer]}, numpy arrays or Rows, over the memory that the handle names.
    block: 1 by default, which also reveals a wrong block stride; 0 if there is only one block. At the end, the
    original bytes are restored, even after an error. Do not use the block until then; the daemon only reads it.
    """
    rows = {plane: [_rows_of(array) for array in layers] for plane, layers in caches.items()}
    fewest = min((array.blocks for layers in rows.values() for array in layers), default=0)
    chosen = min(1, fewest - 1) if block is None else block
    if not 0 <= chosen < fewest:
        what = f"canary block {chosen} is out of range: the caches have {fewest} blocks"
        raise RequestError(what, code="id_out_of_range")
    former: list[tuple[Rows, bytes]] = []
    try:
        sums: dict[str, list[str]] = {}
        for plane, layers in rows.items():
            for array in layers:
                held = array.read_block(chosen)
                former.append((array, held))
                pattern = os.urandom(len(held))
                array.write_block(chosen, pattern)
                sums.setdefault(plane, []).append(digest(pattern))
        yield {"block": chosen, "sums": sums}
    finally:
        for array, held in reversed(former):
            array.write_block(chosen, held)


def _rows_of(array: Any) -> Rows:
    if isinstance(array, np.ndarray):
        return _NumpyRows(array)
    if hasattr(array, "read_block") and hasattr(array, "write_block"):
        return cast("Rows", array)
    what = f"a canary needs numpy arrays, or rows(...) over GPU or Paddle memory, not {type(array).__name__}"
    raise RequestError(what, code="bad_value")
