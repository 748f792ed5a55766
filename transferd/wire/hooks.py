"""What msgpack does not know by itself: token ids, block ids in any form, and sizes of the configuration."""

from __future__ import annotations

from typing import Any

from transferd.tasks import TokenIds


def plain(value: Any) -> Any:
    """A value as msgpack has it. Raises TypeError."""
    if isinstance(value, TokenIds):
        return value.to_bytes()
    if isinstance(value, int):  # a subclass, such as config.Size
        return int(value)
    if isinstance(value, range):  # block ids
        return list(value)
    import numpy as np

    if isinstance(value, np.ndarray | np.generic):  # block ids as an engine's block manager holds them
        return value.tolist()
    raise TypeError(f"cannot encode {type(value).__name__}")


def typed(kind: type, value: Any) -> Any:
    """The inverse, for a field of this type. Raises ValueError."""
    if kind is TokenIds:
        if not isinstance(value, bytes):
            raise ValueError(f"Expected `bytes`, got `{type(value).__name__}`")
        return TokenIds.from_bytes(value)
    raise NotImplementedError(kind)
