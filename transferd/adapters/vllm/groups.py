"""The KV groups of a model, and which of a request's blocks a run of tokens needs.

vLLM divides a model's layers into groups. A request has separate blocks for each group, all from one pool. If all
layers of a group have a sliding window, a request keeps only the blocks that the window of its next token reaches. Its
list has the pool's null block in place of the earlier ones; we neither read nor write that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transferd.errors import ConfigError

SERVED = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec")  # vLLM's classes
INSTEAD = "use TransferdTier, or --disable-hybrid-kv-cache-manager"


@dataclass(frozen=True, slots=True)
class KvGroup:
    """A group of layers."""

    window: int | None = None  # how many tokens a token attends to, itself included; None for all

    def first_needed(self, blocks: int, tokens: int) -> int:
        """The first block that the token behind `blocks` blocks attends to. tokens: of a block."""
        return 0 if self.window is None else max(0, blocks * tokens - self.window + 1) // tokens


WHOLE = (KvGroup(),)  # a model whose layers all see all tokens


def groups_of(kv_cache_config: Any, tokens: int, tokens_a_hash: int) -> tuple[KvGroup, ...]:
    """The groups of vLLM's KVCacheConfig. Raises ConfigError for what the connector cannot serve.

    tokens: of a block.
    tokens_a_hash: of each of vLLM's block hashes.
    """
    if tokens != tokens_a_hash:
        what = f"each block of {tokens} tokens must have one hash; {INSTEAD}"
        raise ConfigError("kv_cache_groups", what, tokens_a_hash)
    return tuple(_group(group.kv_cache_spec, tokens) for group in kv_cache_config.kv_cache_groups)


def _group(spec: Any, tokens: int) -> KvGroup:
    members = getattr(spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs: layers of one kind with other sizes
    found = {_group(one, tokens) for one in members.values()} if members else {_served(spec, tokens)}
    if len(found) > 1:
        windows = sorted(str(group.window) for group in found)
        raise ConfigError("kv_cache_groups", f"layers of one group have several windows; {INSTEAD}", windows)
    return found.pop()


def _served(spec: Any, tokens: int) -> KvGroup:
    kind = type(spec).__name__
    if kind not in SERVED:
        what = f"TransferdConnector serves attention with all tokens or a sliding window; {INSTEAD}"
        raise ConfigError("kv_cache_groups", what, kind)
    if spec.block_size != tokens:
        what = f"has blocks of {spec.block_size} tokens, others of {tokens}; {INSTEAD}"
        raise ConfigError("kv_cache_groups", what, kind)
    if not kind.startswith("SlidingWindow"):
        return KvGroup()
    return KvGroup(spec.sliding_window + getattr(spec, "extra_retained_tokens", 0))  # kept for drafts of several tokens


def reach(found: Sequence[Sequence[bool]], groups: Sequence[KvGroup], first: int, end: int, tokens: int) -> int:
    """How many blocks of a request can be there after a load: the most, at least `first` and at most `end`.

    found: for each group and block, whether it can be loaded.
    first: how many of them vLLM has.
    """
    best, behind_gap = first, [first] * len(groups)  # for each group, the block behind the last one that is missing
    for count in range(first + 1, end + 1):
        for i, there in enumerate(found):
            if not there[count - 1]:
                behind_gap[i] = count
        if all(
            gap <= max(first, group.first_needed(count, tokens)) for group, gap in zip(groups, behind_gap, strict=True)
        ):
            best = count
    return best
