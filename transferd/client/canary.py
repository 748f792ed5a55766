"""The engine's half of a canary (wire/canary.py): write one, say what it is, put the former bytes back."""

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
    """One array of a cache where numpy does not reach. Blocks lie along its first axis.

    tiers/cuda/rows.py has it for memory of a GPU, adapters/paddle.py for tensors.
    """

    @property
    def blocks(self) -> int: ...
    def read_block(self, block: int) -> bytes:
        """The block's bytes, once all work on it has ended."""
        ...

    def write_block(self, block: int, data: bytes) -> None:
        """Returns when the bytes are there for everybody."""
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
    """While this is open, one block of every array holds random bytes; yields what a handle says of them.

    caches: {plane: [one array per layer]}, numpy arrays or Rows, over the memory that the handle names. block: by
    default 1, which also shows a wrong distance between blocks; 0 where there is only one. At the end, also after an
    error, the block holds what it held before. Until then it is nobody's to use: the daemon only reads it.
    """
    rows = {plane: [_rows_of(array) for array in layers] for plane, layers in caches.items()}
    fewest = min((array.blocks for layers in rows.values() for array in layers), default=0)
    chosen = min(1, fewest - 1) if block is None else block
    if not 0 <= chosen < fewest:
        raise RequestError(f"block {chosen} for the canary: the caches have {fewest} blocks", code="id_out_of_range")
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
    what = f"a canary is written to numpy arrays, or to rows(...) of a GPU's or Paddle's; not to {type(array).__name__}"
    raise RequestError(what, code="bad_value")
