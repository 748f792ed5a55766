"""The open token index: which node holds which blocks of a token sequence, and in which medium.

It learns from KV events (wire/kv_events.py), of its own node and of others. Pure logic. A block is identified
by its hash. For a sequence of tokens these are the hashes of its chained block keys (`keys.block_keys`), so
anyone who has the tokens can ask.
"""

from __future__ import annotations

from collections.abc import Sequence

from transferd.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

ANY_MEDIUM = "any"


class TokenIndex:
    """Announced blocks, by node and medium. Changed on the event loop only."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[str, set[int]]] = {}

    def apply(self, node: str, event: KvEvent) -> None:
        """Apply an event that a node published about itself. Removing a block it never announced does nothing."""
        if isinstance(event, BlockStored):
            self._nodes.setdefault(node, {}).setdefault(event.medium, set()).update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            self._nodes.get(node, {}).get(event.medium, set()).difference_update(event.block_hashes)
        elif isinstance(event, AllBlocksCleared):
            self._nodes.pop(node, None)

    def forget(self, node: str) -> None:
        """Drop everything known about this node."""
        self._nodes.pop(node, None)

    def blocks_of(self, node: str) -> int:
        """How many blocks a node has announced, summed over all media."""
        return sum(len(held) for held in self._nodes.get(node, {}).values())

    def locate(self, hashes: Sequence[int]) -> dict[str, dict[str, int]]:
        """For each node that has the first block: leading blocks per medium, and over all media under `any`."""
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
