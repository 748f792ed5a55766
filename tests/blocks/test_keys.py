"""Keys of blocks: injective, canonical, and the same for ever (golden vectors)."""

from __future__ import annotations

import hashlib
import re
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferd.blocks.keys import block_keys, partial_tokens
from transferd.errors import RequestError
from transferd.tasks import TokenIds

any_text = st.text(st.characters(exclude_categories=()), max_size=30)  # lone surrogates too


def reference(tokens: list[int], size: int, extras: list[tuple[Any, int, int]], partial: bool = True) -> list[str]:
    """The definition in the module's docstring, once more, as plainly as possible."""
    parent = hashlib.sha256(b"transferd block keys v1\0" + size.to_bytes(4, "little")).digest()
    keys = []
    for start in range(0, len(tokens), size):
        block = tokens[start : start + size]
        text = parent + len(block).to_bytes(4, "little")
        for token in block:
            text += token.to_bytes(8, "little", signed=True)
        mine = []
        for key, offset, length in extras:
            if set(range(start, start + len(block))) & set(range(offset, offset + length)):
                raw = key if isinstance(key, bytes) else key.encode("utf-8", "surrogatepass")
                mine.append((offset - start, length, raw))
        text += len(mine).to_bytes(4, "little")
        for relative, length, raw in sorted(mine):
            text += struct.pack("<qQI", relative, length, len(raw)) + raw
        parent = hashlib.sha256(text).digest()
        if len(block) == size:
            keys.append(parent.hex())
        elif partial:
            keys.append(f"{parent.hex()}:partial:{len(block)}")
    return keys


ONE = "a7cbef3c8a4c1b297fbe96e5bee297b6d8163c439e3f9c197dc845ab859971d9"
NINE = [
    "807e8dc567489d604a72d0eafa1f126ab96f9b0d1d8bc35975cb3569079b7b7d",
    "80603a32086d431c8f7a0d0e12b5e8b7de335036cf597596c74e32ee36c9b518:partial:1",
]
EXTRAS = [
    "27abace3ba9629214770dcaed360bcda4b78141171a5d8fae32a2c95a6c4065c",
    "aae672d2f7684425acb2cad7aee94e27d954a3e3d560f1b17e4c08c56eda01a6",
    "be6a471620d1e0115d66af0727aba6db37932c2b576cc50bbef986d707bf5e48:partial:1",
]
GOLDEN: list[tuple[list[int], int, list[tuple[Any, int, int]], list[str]]] = [
    ([1, 2, 3, 4], 4, [], [ONE]),
    ([1, 2, 3, 4, 5, 6, 7, 8, 9], 4, [], [ONE, *NINE]),
    ([0, -1, 2**31, -(2**63), 2**63 - 1], 2, [("img-a", 1, 3), (b"\x00\xff", 4, 100), ("\ud800", 1, 1)], EXTRAS),
]


@pytest.mark.parametrize(("tokens", "size", "extras", "keys"), GOLDEN)
def test_block_keys_are_what_they_always_were(
    tokens: list[int], size: int, extras: list[tuple[Any, int, int]], keys: list[str]
) -> None:
    assert block_keys(tokens, size, extras) == keys
    assert reference(tokens, size, extras) == keys


token_lists = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)
extra_lists = st.lists(
    st.tuples(st.one_of(any_text, st.binary(max_size=20)), st.integers(0, 50), st.integers(0, 50)), max_size=5
)


@given(token_lists, st.integers(1, 9), extra_lists, st.booleans())
def test_block_keys_follow_their_definition(tokens: list[int], size: int, extras: Any, partial: bool) -> None:
    assert block_keys(tokens, size, extras, partial) == reference(tokens, size, extras, partial)


@given(token_lists, st.integers(1, 9), extra_lists, st.randoms())
def test_the_callers_order_and_types_do_not_matter(tokens: list[int], size: int, extras: Any, rng: Any) -> None:
    shuffled = [tuple(extra) for extra in extras]
    rng.shuffle(shuffled)
    keys = block_keys(tokens, size, extras)
    assert block_keys(tuple(tokens), size, shuffled) == keys
    assert block_keys(np.array(tokens, dtype=np.int64), size, iter(extras)) == keys
    assert block_keys(TokenIds(tokens), size, extras) == keys


@pytest.mark.parametrize("dtype", ["i1", "u2", "<i4", ">i4", "u4", "<i8", ">i8", "u8"])
def test_every_integer_array_type_gives_the_same_keys(dtype: str) -> None:
    assert block_keys(np.arange(100).astype(dtype), 16) == block_keys(list(range(100)), 16)


def test_a_strided_array_gives_the_keys_of_its_values() -> None:
    assert block_keys(np.arange(200)[::2], 16) == block_keys(list(range(0, 200, 2)), 16)


def test_a_prefix_has_a_prefix_of_the_keys_and_a_change_changes_all_after_it() -> None:
    tokens = list(range(64))
    keys = block_keys(tokens, 8)
    assert block_keys(tokens[:40], 8) == keys[:5]
    tokens[20] += 1
    changed = block_keys(tokens, 8)
    assert changed[:2] == keys[:2]
    assert not set(changed[2:]) & set(keys[2:])


def test_block_sizes_never_share_a_key() -> None:
    assert not set(block_keys([1] * 64, 8)) & set(block_keys([1] * 64, 16))


def test_the_partial_block_is_named_with_its_count_or_left_out() -> None:
    keys = block_keys(list(range(10)), 4)
    assert [partial_tokens(key) for key in keys] == [None, None, 2]
    assert block_keys(list(range(10)), 4, partial=False) == keys[:2]
    assert len(block_keys(list(range(8)), 4)) == 2
    assert block_keys([], 4) == []


def test_partial_blocks_of_different_length_differ_in_more_than_the_count() -> None:
    one, two = block_keys([1], 4)[0], block_keys([1, 2], 4)[0]
    assert one.partition(":")[0] != two.partition(":")[0]


def test_an_extra_key_changes_exactly_the_blocks_from_the_first_it_overlaps() -> None:
    tokens = [7] * 20
    plain = block_keys(tokens, 4)
    with_image = block_keys(tokens, 4, [("image", 6, 3)])  # tokens 6, 7, 8: blocks 1 and 2
    assert with_image[0] == plain[0]
    assert not set(with_image[1:]) & set(plain[1:])
    other = block_keys(tokens, 4, [("picture", 6, 3)])
    assert other[0] == plain[0]
    assert not set(other[1:]) & set(with_image[1:])


def test_an_extra_key_of_the_partial_block_enters_it() -> None:
    plain, image = (block_keys([7] * 6, 4, extras) for extras in ([], [("image", 5, 1)]))
    assert plain[0] == image[0]
    assert plain[1] != image[1]
    assert partial_tokens(image[1]) == 2


def test_numpy_integers_are_integers() -> None:
    extras: list[Any] = [("image", np.int64(1), np.int32(2))]
    size: Any = np.int64(4)
    assert block_keys([7] * 6, size, extras) == block_keys([7] * 6, 4, [("image", 1, 2)])


def test_the_place_of_an_extra_key_within_its_block_matters() -> None:
    assert block_keys([7] * 4, 4, [("image", 0, 2)]) != block_keys([7] * 4, 4, [("image", 1, 2)])


def test_an_extra_key_beyond_the_tokens_or_without_length_changes_nothing() -> None:
    plain = block_keys([7] * 6, 4)
    assert block_keys([7] * 6, 4, [("image", 6, 5), ("image", 3, 0), ("image", 10**18, 10**18)]) == plain


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (([1], 0), "block_size"),
        (([1], -4), "block_size"),
        (([1], 2**32), "block_size"),
        (([1], True), "block_size"),
        (([1], "4"), "block_size"),
        (([1.5], 4), "token_ids"),
        ((["a"], 4), "token_ids"),
        (([[1, 2]], 4), "token_ids"),
        (([2**64], 4), "token_ids"),
        (([1], 4, [("k", -1, 2)]), "offset"),
        (([1], 4, [("k", 0, -2)]), "length"),
        (([1], 4, [("k", 0.0, 2)]), "offset"),
        (([1], 4, [("k", 0, 2**63)]), "length"),
        (([1], 4, [(5, 0, 2)]), "text or bytes"),
        (([1], 4, ["k"]), "(key, offset, length)"),
        (([1], 4, [5]), "(key, offset, length)"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: Any, what: str) -> None:
    with pytest.raises(RequestError, match=re.escape(what)):
        block_keys(*arguments)


@pytest.mark.parametrize(
    ("key", "count"),
    [
        ("ab:partial:1", 1),
        ("ab:partial:63", 63),
        (":partial:7", 7),
        ("ab", None),
        ("", None),
        ("ab:partial:", None),
        ("ab:partial:0", None),
        ("ab:partial:07", None),
        ("ab:partial:-7", None),
        ("ab:partial:7 ", None),
        ("ab:partial:7\n", None),
        ("ab:partial:٧", None),
        ("ab:partial:7:x", None),
        ("ab:partial:" + "9" * 5000, None),
    ],
)
def test_the_token_count_of_a_partial_key_is_read_back(key: str, count: int | None) -> None:
    assert partial_tokens(key) == count
