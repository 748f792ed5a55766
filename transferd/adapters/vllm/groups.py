"""The KV groups of a model: how many tokens their blocks have, and which blocks a request needs.

vLLM divides a model's layers into groups. A request has separate blocks for each group, all from one pool, and each
group's blocks may have another number of tokens. A hit ends at a boundary: a multiple of the scheduler's block, the
least common multiple of all of them.

    whole     attention to all tokens needs all blocks
    window    a sliding window needs those that the window of the next token reaches
    chunk     chunked attention is a window that begins anew with each chunk
    state     linear attention (Mamba, GDN) needs only the one block with the state at the boundary

A request keeps only what its next token needs. Its list has the pool's null block in place of the earlier ones; we
neither read nor write that one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transferd.errors import ConfigError

INSTEAD = "use TransferdTier"
WITHOUT_GROUPS = f"{INSTEAD}, or --disable-hybrid-kv-cache-manager"
FULL, WINDOWS = ("FullAttentionSpec", "MLAAttentionSpec"), ("SlidingWindowSpec", "SlidingWindowMLASpec")
CHUNKS, STATES = "ChunkedLocalAttentionSpec", "MambaSpec"


@dataclass(frozen=True, slots=True)
class KvGroup:
    """A group of layers.

    tokens: of a block.
    window: how many tokens a token attends to, itself included; None for all.
    chunk: tokens of a chunk of chunked attention; None for none.
    state: a block holds the state of linear attention behind its last token.
    ahead: how many tokens behind a block its bytes depend on: a draft model sees the next ones.
    """

    tokens: int
    window: int | None = None
    chunk: int | None = None
    state: bool = False
    ahead: int = 0

    @property
    def whole(self) -> bool:
        """Whether a request keeps all of its blocks."""
        return self.window is None and self.chunk is None and not self.state

    def first_needed(self, end: int) -> int:
        """The first block that the token behind `end` tokens needs. end: a boundary."""
        if self.state:
            return max(0, end // self.tokens - 1)
        if self.chunk is not None:
            return end // self.chunk * self.chunk // self.tokens
        return 0 if self.window is None else max(0, end - self.window + 1) // self.tokens


@dataclass(frozen=True, slots=True)
class KvGroups:
    """A model's groups.

    unit: tokens of the scheduler's block.
    hashed: tokens of each of vLLM's block hashes.
    every: vLLM's --prefix-cache-retention-interval, in tokens; None: all boundaries.
    """

    groups: tuple[KvGroup, ...]
    unit: int
    hashed: int
    every: int | None = None

    @property
    def whole(self) -> bool:
        """Whether all layers see all tokens, in one group."""
        return len(self.groups) == 1 and self.groups[0].whole

    def hash_of(self, group: int, i: int) -> int:
        """The place of the hash that stands for all tokens up to the end of a block."""
        return (i + 1) * self.groups[group].tokens // self.hashed - 1

    def aligned(self, tokens: int) -> int:
        """The last boundary in so many tokens."""
        return tokens // self.unit * self.unit

    def order(self, place: tuple[int, int]) -> tuple[int, int]:
        """What sorts the blocks of all groups from the root on. place: a group, and a block in it."""
        group, i = place
        return (i + 1) * self.groups[group].tokens, group

    def places(self, tokens: int) -> list[tuple[int, int]]:
        """All groups' blocks of so many tokens, from the root on."""
        every = [(group, i) for group, one in enumerate(self.groups) for i in range(tokens // one.tokens)]
        return sorted(every, key=self.order)

    def before(self, place: tuple[int, int]) -> int:
        """How many blocks of all groups come before this one, from the root on."""
        end, group = self.order(place)
        return sum((end - (number >= group)) // one.tokens for number, one in enumerate(self.groups))

    def before_of_whole(self, place: tuple[int, int]) -> tuple[int, int]:
        """The last block before this one of a group of which all are stored, or of its own group if there is none."""
        end, group = self.order(place)
        whole = next((number for number, one in enumerate(self.groups) if one.whole), group)
        return whole, (end - (whole >= group)) // self.groups[whole].tokens - 1

    def kept(self, group: int, i: int, marks: Iterable[int]) -> bool:
        """Whether a later request can use a block, by vLLM's rule: it is needed at a boundary that vLLM keeps.

        marks: boundaries of the request where others may go on, besides those at each interval.
        """
        one = self.groups[group]
        if one.whole or one.chunk is not None:
            return True
        end = (i + 1) * one.tokens
        interval = self.unit if self.every is None else self.every
        at = [*marks, math.ceil(end / interval) * interval] if interval else marks
        return any(one.first_needed(mark) <= i and end <= mark for mark in at)

    def reach(self, found: Sequence[Sequence[bool]], first: int, end: int) -> int:
        """How many tokens of a request can be there after a load: the last boundary, at least `first`, at most `end`.

        found: for each group and block, whether it can be loaded; blocks behind that are not there.
        first: how many of the tokens vLLM has, a boundary.
        """
        best = first
        # For each group, the block behind the last one that is missing, and the first one that was not looked at.
        gaps = [[first // one.tokens] * 2 for one in self.groups]
        for boundary in range(first + self.unit, end + 1, self.unit):
            for gap, there, one in zip(gaps, found, self.groups, strict=True):
                for i in range(gap[1], boundary // one.tokens):
                    if i >= len(there) or not there[i]:
                        gap[0] = i + 1
                gap[1] = boundary // one.tokens
            if all(
                gap <= max(first // one.tokens, one.first_needed(boundary))
                for (gap, _), one in zip(gaps, self.groups, strict=True)
            ):
                best = boundary
        return best

    def junction(self, found: Sequence[Sequence[bool]]) -> int:
        """The boundary up to which the store has all that sees all tokens; 0 if nothing does.

        If the rest is not there, this is where prompts have parted that share a prefix.
        """
        leading = [
            next((i for i, is_there in enumerate(there) if not is_there), len(there)) * one.tokens
            for there, one in zip(found, self.groups, strict=True)
            if one.whole
        ]
        return self.aligned(min(leading, default=0))


def groups_of(kv_cache_config: Any, unit: int, hashed: int, ahead: int = 0) -> KvGroups:
    """The groups of vLLM's KVCacheConfig. Raises ConfigError for what the connector cannot serve.

    unit, hashed: see KvGroups.
    ahead: how many tokens a draft model sees ahead; 0 if there is none.
    """
    drafts = [group for group in kv_cache_config.kv_cache_groups if getattr(group, "is_eagle_group", False)]
    found = tuple(
        _group(group.kv_cache_spec, ahead if not drafts or group in drafts else 0)
        for group in kv_cache_config.kv_cache_groups
    )
    for group in found:
        if group.tokens % hashed or unit % group.tokens:
            what = f"blocks must be multiples of a hash's {hashed} tokens, and divide the scheduler's {unit}; {INSTEAD}"
            raise ConfigError("kv_cache_groups", what, group.tokens)
    return KvGroups(found, unit, hashed, getattr(kv_cache_config, "prefix_cache_retention_interval", None))


def _group(spec: Any, ahead: int) -> KvGroup:
    members = getattr(spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs: layers of one kind with other sizes
    found = {_served(one, ahead) for one in (members.values() if members else [spec])}
    if len(found) > 1:
        windows = sorted(str(group.window) for group in found)
        what = f"layers of one group have several windows or blocks; {WITHOUT_GROUPS}"
        raise ConfigError("kv_cache_groups", what, windows)
    return found.pop()


def _served(spec: Any, ahead: int) -> KvGroup:
    kind = type(spec).__name__
    if kind in FULL:
        return KvGroup(spec.block_size, ahead=ahead)
    if kind in WINDOWS:  # some more tokens are kept for drafts of several tokens
        window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
        return KvGroup(spec.block_size, window, ahead=ahead)
    if kind == CHUNKS:
        return KvGroup(spec.block_size, chunk=spec.attention_chunk_size, ahead=ahead)
    if kind != STATES:
        what = "TransferdConnector serves attention with all tokens, windows or chunks, and states of linear attention"
        raise ConfigError("kv_cache_groups", f"{what}; {INSTEAD}", kind)
    if spec.mamba_cache_mode != "align":
        what = "a state can be loaded only at a block's end: start vLLM with --enable-prefix-caching"
        raise ConfigError("mamba_cache_mode", f"{what} --mamba-cache-mode align, or {INSTEAD}", spec.mamba_cache_mode)
    return KvGroup(spec.block_size, state=True)
