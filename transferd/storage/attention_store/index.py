"""The open token index: which node holds which blocks of a token sequence, and in which medium.

Fed with KV events, its own node's or another's: to know where blocks are is to follow events (wire.py).
Pure logic. A block is known by its hash; of a sequence of tokens these are the hashes of its chained
block keys (`keys.block_keys`), so whoever has the tokens can ask without knowing anybody's keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from transferd.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

ANY_MEDIUM = "any"


class TokenIndex:
    """Blocks by node and medium, as far as they were announced. Mutated on the event loop only."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[str, set[int]]] = {}

    def apply(self, node: str, event: KvEvent) -> None:
        """What a node announces about itself. Withdrawing what was never announced is nothing."""
        if isinstance(event, BlockStored):
            self._nodes.setdefault(node, {}).setdefault(event.medium, set()).update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            self._nodes.get(node, {}).get(event.medium, set()).difference_update(event.block_hashes)
        elif isinstance(event, AllBlocksCleared):
            self._nodes.pop(node, None)

    def forget(self, node: str) -> None:
        """Nothing is known of this node."""
        self._nodes.pop(node, None)

    def blocks_of(self, node: str) -> int:
        """How many blocks a node has announced, in all media together."""
        return sum(len(held) for held in self._nodes.get(node, {}).values())

    def locate(self, hashes: Sequence[int]) -> dict[str, dict[str, int]]:
        """For each node that has the first block: leading blocks in each medium, and in `any` of them together."""
        found: dict[str, dict[str, int]] = {}
        for node, media in self._nodes.items():
            counts = {medium: _leading(hashes, [held]) for medium, held in media.items()}
            together = _leading(hashes, list(media.values()))
            if together:
                found[node] = {medium: count for medium, count in counts.items() if count} | {ANY_MEDIUM: together}
        return found

    def statistics(self) -> dict[str, dict[str, int]]:
        """Blocks known, by node and medium."""
        return {node: {medium: len(held) for medium, held in media.items()} for node, media in self._nodes.items()}


def _leading(hashes: Sequence[int], held: Sequence[set[int]]) -> int:
    return next((i for i, hash_ in enumerate(hashes) if not any(hash_ in some for some in held)), len(hashes))
