"""Block keys of token paths, with a cache of the most recent paths."""

from __future__ import annotations

from collections import OrderedDict

from transferd.blocks.keys import block_keys
from transferd.tasks import TokenIds

REMEMBERED_PATHS = 32  # a match, then every rank of the task, then the KV events ask for the same path


class PathKeys:
    """The chained keys (`keys.block_keys`) of a path's full blocks. An incomplete last block gets no key.

    A path's salt is an extra key of its first token, so it is part of every block's key.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._paths: OrderedDict[tuple[TokenIds, str], list[str]] = OrderedDict()

    def keys(self, path: TokenIds, start: int = 0, count: int | None = None, salt: str = "") -> list[str]:
        """The keys of `count` full blocks from block `start` on; without `count`, of all that follow."""
        keys = self._paths.get((path, salt))
        if keys is None:
            keys = self._paths[path, salt] = path_keys(path, self.block_size, salt)
            if len(self._paths) > REMEMBERED_PATHS:
                self._paths.popitem(last=False)
        return keys[start:] if count is None else keys[start : start + count]


def path_keys(path: TokenIds, block_size: int, salt: str = "") -> list[str]:
    """The keys of a path's full blocks. salt: "" for none."""
    return block_keys(path, block_size, [(f"salt {salt}", 0, 1)] if salt else None, partial=False)
