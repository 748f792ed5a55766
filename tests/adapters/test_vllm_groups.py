"""Which blocks of a model's KV groups a run of tokens needs, and which models the connector refuses."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from transferd.adapters.vllm.groups import WHOLE, KvGroup, groups_of, reach
from transferd.errors import ConfigError

TOKENS = 4


def spec(kind: str, **fields: Any) -> Any:
    """An object whose class has the name of one of vLLM's."""
    return type(kind, (), {"block_size": TOKENS} | fields)()


def config(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=one) for one in specs])


def test_each_group_has_its_window() -> None:
    found = groups_of(
        config(
            spec("FullAttentionSpec", sliding_window=None),
            spec("SlidingWindowSpec", sliding_window=10),
            spec("MLAAttentionSpec", sliding_window=None),
            spec("SlidingWindowMLASpec", sliding_window=10, extra_retained_tokens=2),
        ),
        TOKENS,
        TOKENS,
    )
    assert found == (KvGroup(), KvGroup(10), KvGroup(), KvGroup(12))


def test_full_attention_that_keeps_all_blocks_of_a_model_with_windows_is_whole() -> None:
    """Without its hybrid manager, vLLM keeps all blocks of such layers."""
    assert groups_of(config(spec("FullAttentionSpec", sliding_window=10)), TOKENS, TOKENS) == WHOLE


def test_layers_of_one_kind_with_other_sizes_are_one_group() -> None:
    members = {"a": spec("SlidingWindowSpec", sliding_window=8), "b": spec("SlidingWindowSpec", sliding_window=8)}
    assert groups_of(config(spec("UniformTypeKVCacheSpecs", kv_cache_specs=members)), TOKENS, TOKENS) == (KvGroup(8),)


@pytest.mark.parametrize(
    ("specs", "named"),
    [
        ([spec("MambaSpec")], r"kv_cache_groups: .* \('?MambaSpec'?\)"),
        ([spec("FullAttentionSpec"), spec("MambaSpec")], "MambaSpec"),
        ([spec("ChunkedLocalAttentionSpec", attention_chunk_size=8)], "ChunkedLocalAttentionSpec"),
        ([spec("CrossAttentionSpec")], "CrossAttentionSpec"),
        ([spec("SinkFullAttentionSpec")], "SinkFullAttentionSpec"),
        ([spec("FullAttentionSpec"), spec("SlidingWindowSpec", block_size=8, sliding_window=8)], "blocks of 8 tokens"),
        ([spec("UniformTypeKVCacheSpecs", kv_cache_specs={
            "a": spec("SlidingWindowSpec", sliding_window=8), "b": spec("FullAttentionSpec")})], "several windows"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_in_one_line_with_the_remedy(specs: list[Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        groups_of(config(*specs), TOKENS, TOKENS)
    assert "use TransferdTier" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_hash_must_stand_for_a_whole_block() -> None:
    with pytest.raises(ConfigError, match="one hash"):
        groups_of(config(spec("FullAttentionSpec")), 2 * TOKENS, TOKENS)


def readable(found: list[list[bool]], groups: tuple[KvGroup, ...], first: int, count: int) -> bool:
    """Whether the token behind `count` blocks sees only blocks that are there, token by token."""
    for there, group in zip(found, groups, strict=True):
        behind = count * TOKENS
        seen = range(behind) if group.window is None else range(max(0, behind - group.window + 1), behind)
        if any(token // TOKENS >= first and not there[token // TOKENS] for token in seen):
            return False
    return True


@pytest.mark.parametrize("seed", range(200))
def test_as_far_as_every_group_can_be_read(seed: int) -> None:
    draw = random.Random(seed)
    end = draw.randrange(1, 12)
    first = draw.randrange(0, end + 1)
    windows = [None if draw.random() < 0.4 else draw.randrange(2, 30) for _ in range(draw.choice([1, 1, 2, 3]))]
    groups = tuple(KvGroup(window) for window in windows)
    found = [[draw.random() < draw.choice([0.5, 0.9]) for _ in range(end)] for _ in groups]
    expected = max(
        (count for count in range(first + 1, end + 1) if readable(found, groups, first, count)), default=first
    )
    assert reach(found, groups, first, end, TOKENS) == expected
