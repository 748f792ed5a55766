"""Facts and their digest: any other fact gives another digest, and nothing else does."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as some

from transferd.blocks.fingerprint import MOST_BYTES, MOST_FACTS, MOST_NAME, differences, digest, refusal
from transferd.blocks.layout import build_layout
from transferd.config import CacheSection, from_tree
from transferd.config.template import template
from transferd.errors import ConfigError
from transferd.runtime.compat import tomllib

names = some.text(some.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
values = some.one_of(
    some.text(some.characters(exclude_categories=["Cs"]), max_size=20),
    some.booleans(),
    some.integers(-(2**53), 2**53),
    some.floats(allow_nan=False, allow_infinity=False),
)
facts = some.dictionaries(names, values | some.lists(values, max_size=4), max_size=8)


def is_same(one: Any, other: Any) -> bool:
    """Equal in value and type: 1, 1.0 and True are equal to Python."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@given(facts, facts)
def test_other_facts_give_another_digest_and_equal_ones_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (digest(one) == digest(other)) == is_same(one, other)
    assert (not differences(one, other)) == is_same(one, other)


@given(facts, names, values)
def test_one_changed_added_or_removed_fact_is_the_difference(given_: dict[str, Any], name: str, value: Any) -> None:
    other = given_ | {name: value}
    if is_same(given_, other):
        return
    assert digest(other) != digest(given_)
    (line,) = differences(given_, other)
    assert line.startswith(f"{name} ")
    assert differences(other, given_) != [line]


@given(facts, some.randoms())
def test_the_order_of_facts_does_not_matter(given_: dict[str, Any], random: Any) -> None:
    shuffled = list(given_.items())
    random.shuffle(shuffled)
    assert digest(dict(shuffled)) == digest(given_)


@given(facts)
def test_facts_are_the_same_after_the_wire_and_after_a_file(given_: dict[str, Any]) -> None:
    assert not refusal(given_)
    wired = msgspec.msgpack.decode(msgspec.msgpack.encode({"fingerprint": given_}))
    cache = msgspec.convert(wired, CacheSection)
    assert digest(cache.fingerprint) == digest(given_)
    assert differences(cache.fingerprint, given_) == []
    filed = tomllib.loads(tomli_w.dumps({"cache": {"fingerprint": given_}}))
    assert digest(from_tree(filed).geometry.fingerprint) == digest(given_)


@given(facts)
def test_a_layout_with_facts_differs_from_one_without(given_: dict[str, Any]) -> None:
    bare = build_layout(CacheSection())
    with_facts = build_layout(CacheSection(fingerprint=given_))
    assert (with_facts.fingerprint == bare.fingerprint) == (not given_)
    assert with_facts.block_bytes == bare.block_bytes


def test_an_engine_without_facts_keeps_the_names_that_it_had() -> None:
    assert build_layout(CacheSection()).fingerprint == "74010266d3990ac6"
    pages: dict[str, Any] = {"attention": "pages", "layers": 2, "page_bytes": 4096, "identity": "vllm/LBHNC"}
    assert build_layout(CacheSection(**pages)).fingerprint == "330ab8dddc0a5526"


def test_a_difference_is_in_words() -> None:
    ours, theirs = {"rope theta": 10000, "weights": "a"}, {"rope theta": 1000000, "weights": "a", "LoRA": "b"}
    assert differences(ours, theirs) == ["LoRA (none) / b", "rope theta 10000 / 1000000"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({f"f{i}": i for i in range(MOST_FACTS + 1)}, "65 facts"),
        ({"": 1}, "1 to 64 characters"),
        ({"n" * (MOST_NAME + 1): 1}, "1 to 64 characters"),
        ({"a": None}, "None"),
        ({"a": {"b": 1}}, "'b'"),
        ({"a": [[1]]}, r"\[1\]"),
        ({"a": float("nan")}, "finite"),
        ({"a": [float("inf")]}, "finite"),
        ({"a": "x" * MOST_BYTES}, "at most 16384"),
    ],
)
def test_facts_beyond_the_bounds_are_refused_with_the_reason(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        build_layout(CacheSection(fingerprint=wrong))
    assert "cache.fingerprint" in str(refused.value)


def test_a_file_names_facts_as_a_table_of_the_cache() -> None:
    written = tomllib.loads(template({"cache.fingerprint": {"rope theta": 10000.0, "kinds": ["a", 1]}}))
    assert from_tree(written).geometry.fingerprint == {"rope theta": 10000.0, "kinds": ["a", 1]}
    with pytest.raises(ConfigError, match=r"cache\.fingerprint"):
        from_tree({"cache": {"fingerprint": {"a": {"b": 1}}}})
