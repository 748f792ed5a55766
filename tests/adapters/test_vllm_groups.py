"""Which blocks of a model's KV groups a run of tokens needs, and which models the connector refuses."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from transferd.adapters.vllm.groups import KvGroup, KvGroups, groups_of
from transferd.errors import ConfigError

TOKENS = 4


def spec(kind: str, **fields: Any) -> Any:
    """An object whose class has the name of one of vLLM's."""
    return type(kind, (), {"block_size": TOKENS} | fields)()


def config(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=one) for one in specs])


def groups(*specs: Any, unit: int = TOKENS, ahead: int = 0) -> KvGroups:
    return groups_of(config(*specs), unit, TOKENS, ahead)


def test_each_group_has_its_window() -> None:
    found = groups(
        spec("FullAttentionSpec", sliding_window=None),
        spec("SlidingWindowSpec", sliding_window=10),
        spec("MLAAttentionSpec", sliding_window=None),
        spec("SlidingWindowMLASpec", sliding_window=10, extra_retained_tokens=2),
        spec("ChunkedLocalAttentionSpec", attention_chunk_size=8),
        spec("MambaSpec", mamba_cache_mode="align"),
    )
    assert found.groups == (
        KvGroup(TOKENS),
        KvGroup(TOKENS, 10),
        KvGroup(TOKENS),
        KvGroup(TOKENS, 12),
        KvGroup(TOKENS, chunk=8),
        KvGroup(TOKENS, state=True),
    )
    assert not found.whole


def test_full_attention_that_keeps_all_blocks_of_a_model_with_windows_is_whole() -> None:
    """Without its hybrid manager, vLLM keeps all blocks of such layers."""
    assert groups(spec("FullAttentionSpec", sliding_window=10)).whole


def test_layers_of_one_kind_with_other_sizes_are_one_group() -> None:
    members = {"a": spec("SlidingWindowSpec", sliding_window=8), "b": spec("SlidingWindowSpec", sliding_window=8)}
    assert groups(spec("UniformTypeKVCacheSpecs", kv_cache_specs=members)).groups == (KvGroup(TOKENS, 8),)


def test_each_group_has_blocks_of_its_own_size() -> None:
    found = groups(spec("FullAttentionSpec", block_size=8), spec("SlidingWindowSpec", sliding_window=6), unit=8)
    assert found.groups == (KvGroup(8), KvGroup(4, 6))
    assert found.places(16) == [(1, 0), (0, 0), (1, 1), (1, 2), (0, 1), (1, 3)]
    assert [found.before(place) for place in found.places(16)] == list(range(6))
    assert [found.hash_of(*place) for place in found.places(16)] == [0, 1, 1, 2, 3, 3]
    assert [found.before_of_whole(place)[1] for place in found.places(16)] == [-1, -1, 0, 0, 0, 1]


def test_a_draft_model_sees_ahead_in_its_groups_or_in_all_if_vllm_names_none() -> None:
    assert groups(spec("FullAttentionSpec"), ahead=1).groups == (KvGroup(TOKENS, ahead=1),)
    made = config(spec("FullAttentionSpec"), spec("FullAttentionSpec"))
    made.kv_cache_groups[1].is_eagle_group = True
    assert groups_of(made, TOKENS, TOKENS, 2).groups == (KvGroup(TOKENS), KvGroup(TOKENS, ahead=2))


@pytest.mark.parametrize(
    ("specs", "named", "remedy"),
    [
        ([spec("CrossAttentionSpec")], r"kv_cache_groups: .* \('?CrossAttentionSpec'?\)", "use TransferdTier"),
        ([spec("FullAttentionSpec"), spec("SinkFullAttentionSpec")], "SinkFullAttentionSpec", "use TransferdTier"),
        ([spec("CircularBufferSpec")], "CircularBufferSpec", "use TransferdTier"),
        ([spec("MambaSpec", mamba_cache_mode="none")], "mamba_cache_mode", "--enable-prefix-caching"),
        ([spec("FullAttentionSpec"), spec("SlidingWindowSpec", block_size=6, sliding_window=8)], "hash's 4", "Tier"),
        ([spec("UniformTypeKVCacheSpecs", kv_cache_specs={
            "a": spec("SlidingWindowSpec", sliding_window=8), "b": spec("FullAttentionSpec")})],
         "several windows", "--disable-hybrid-kv-cache-manager"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_in_one_line_with_the_remedy(
    specs: list[Any], named: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        groups(*specs)
    assert remedy in str(refused.value)
    assert "\n" not in str(refused.value)


# --- what a request needs ---------------------------------------------------------------------------


def seen(group: KvGroup, behind: int) -> range:
    """The blocks that the token behind so many tokens needs, by the definition of each kind."""
    if group.state:
        return range(behind // group.tokens - 1, behind // group.tokens)
    first = 0
    if group.window is not None:
        first = max(0, behind - group.window + 1)
    if group.chunk is not None:
        first = behind - behind % group.chunk
    return range(first // group.tokens, behind // group.tokens)


def readable(found: list[list[bool]], model: KvGroups, first: int, end: int) -> bool:
    """Whether the token behind `end` tokens needs only blocks that are there, or that vLLM has."""
    return all(
        i < first // group.tokens or there[i]
        for there, group in zip(found, model.groups, strict=True)
        for i in seen(group, end)
    )


def drawn(draw: random.Random) -> KvGroups:
    kinds = [
        lambda size: KvGroup(size),
        lambda size: KvGroup(size, draw.randrange(2, 30)),
        lambda size: KvGroup(size, chunk=draw.choice([8, 16])),
        lambda size: KvGroup(size, state=True),
    ]
    sizes = draw.choice([(4,), (4, 8), (8, 4, 4)])
    made = tuple(draw.choice(kinds)(size) for size in sizes)
    return KvGroups(made, max(sizes), 4, draw.choice([None, 0, 16]))


@pytest.mark.parametrize("seed", range(300))
def test_as_far_as_every_group_can_be_read(seed: int) -> None:
    draw = random.Random(seed)
    model = drawn(draw)
    end = model.unit * draw.randrange(1, 8)
    first = model.unit * draw.randrange(0, end // model.unit + 1)
    found = [[draw.random() < draw.choice([0.5, 0.9]) for _ in range(end // group.tokens)] for group in model.groups]
    boundaries = range(first + model.unit, end + 1, model.unit)
    expected = max((at for at in boundaries if readable(found, model, first, at)), default=first)
    assert model.reach(found, first, end) == expected
    short = [there[: draw.randrange(len(there) + 1)] for there in found]
    padded = [some + [False] * (len(there) - len(some)) for some, there in zip(short, found, strict=True)]
    assert model.reach(short, first, end) == model.reach(padded, first, end)


@pytest.mark.parametrize("seed", range(300))
def test_what_is_kept_is_what_is_needed_where_a_later_request_goes_on(seed: int) -> None:
    draw = random.Random(seed)
    model = drawn(draw)
    tokens = model.unit * 12
    marks = [model.unit * draw.randrange(1, 9) for _ in range(draw.randrange(3))]
    step = model.unit if model.every is None else model.every
    places = {*marks, *(range(step, tokens + 1, step) if step else ())}
    for number, group in enumerate(model.groups):
        for i in range(tokens // 2 // group.tokens):
            needed = group.whole or group.chunk is not None or any(i in seen(group, at) for at in places)
            assert model.kept(number, i, marks) == needed


def test_prompts_part_where_the_store_ends_to_have_what_sees_all_tokens() -> None:
    model = KvGroups((KvGroup(4), KvGroup(8, 9), KvGroup(8)), 8, 4)
    assert model.junction([[True] * 7 + [False, True], [False] * 4, [True] * 4]) == 24
    assert model.junction([[True] * 7, [False] * 4, [True, False, True]]) == 8
    assert KvGroups((KvGroup(4, 9),), 4, 4).junction([[True] * 7]) == 0
