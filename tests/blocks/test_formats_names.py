"""Names of objects: injective, canonical, and the same for ever (golden vectors)."""

from __future__ import annotations

import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferd.blocks.formats import PART_BYTES, ObjectNamer, key_digest, quote_part, unquote_part

any_text = st.text(st.characters(exclude_categories=()), max_size=30)  # lone surrogates too


@pytest.mark.parametrize(
    ("key", "digest"),
    [
        ("", "df1b3851e9cc9047d55cf1d381f00792f07229d8"),
        ("k1", "353638aab9d52568eec5d1567f481fefb18b5551"),
        ("\ud800", "4784092b885b9b8e1772d36bc48a6a0070a80e2e"),
    ],
)
def test_key_digests_are_what_they_always_were(key: str, digest: str) -> None:
    assert key_digest(key) == digest


def test_a_key_digest_is_keyed_blake2b_of_the_keys_utf8() -> None:
    for key in ("", "k", "模型", "x" * 100_000):
        expected = hashlib.blake2b(key.encode(), digest_size=20, person=b"transferd key").hexdigest()
        assert key_digest(key) == expected


def test_keys_of_any_length_and_any_characters_have_digests_of_one_form() -> None:
    keys = ["", " ", "/", "\0", "\ud800", "\udfff\ud800", "\u00e9", "e\u0301", "😀", "a" * 1_000_000]
    digests = [key_digest(key) for key in keys]
    assert len(set(digests)) == len(keys)
    assert all(re.fullmatch("[0-9a-f]{40}", digest) for digest in digests)


def test_a_plain_name_reads_as_the_documentation_says() -> None:
    namer = ObjectNamer("demo", "0123456789abcdef")
    digest = key_digest("k1")
    assert namer.names("RL-STEP03", [digest], 3)[0] == f"demo/0123456789abcdef/RL-STEP03/{digest}/3"
    assert namer.names("", [digest], 0)[0] == f"demo/0123456789abcdef//{digest}/0"


def test_the_names_of_a_rank_are_the_names_of_its_objects_in_order() -> None:
    namer = ObjectNamer("a/b c", "f0")
    digests = namer.ids(["k1", "k2", "k1"])
    assert namer.names("g/1", digests, 12) == [namer.names("g/1", [digest], 12)[0] for digest in digests]
    assert namer.names("g", [], 0) == []


@given(any_text, any_text, any_text, any_text)
def test_a_name_is_ascii_with_four_slashes_whatever_the_parts_hold(model: str, mark: str, gen: str, key: str) -> None:
    namer = ObjectNamer(model, mark)
    name = namer.names(gen, [key_digest(key)], 0)[0]
    assert name.isascii()
    assert name.isprintable()
    assert name.count("/") == 4


@given(st.tuples(any_text, any_text, any_text), st.tuples(any_text, any_text, any_text))
def test_two_identities_never_share_a_name(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    names = [ObjectNamer(model, mark).names(generation, ["d"], 0)[0] for model, mark, generation in (one, other)]
    assert (names[0] == names[1]) == (one == other)


def test_slashes_cannot_move_text_from_one_part_into_another() -> None:
    assert ObjectNamer("m/f1", "f2").names("x", ["d"], 0)[0] != ObjectNamer("m", "f1").names("f2/x", ["d"], 0)[0]


@pytest.mark.parametrize(
    ("text", "part"),
    [("RL-1", "RL-1"), ("a/b", "a%2Fb"), ("é", "%C3%A9"), ("a b~", "a%20b%7E"), ("x" * 120, "x" * 120)],
)
def test_a_part_of_at_most_120_characters_reads_as_its_text_and_leads_back_to_it(text: str, part: str) -> None:
    assert quote_part(text) == part
    assert unquote_part(part) == text


@pytest.mark.parametrize("part", ["%FF", "%C3", "a/b", quote_part("x" * 121)])
def test_what_is_nobodys_part_leads_back_to_none(part: str) -> None:
    assert unquote_part(part) is None


@pytest.mark.parametrize("text", ["x" * (PART_BYTES + 1), "é" * 1000, "\ud800" * 500])
def test_a_long_part_is_cut_and_stays_distinct(text: str) -> None:
    assert len(quote_part(text)) == PART_BYTES == 120
    assert quote_part(text) != quote_part(text + "y")
    assert quote_part(text) != quote_part(quote_part(text)), "the short form of one text is not another text's own"


def test_the_digest_comes_back_out_of_a_name_of_the_same_generation_only() -> None:
    namer = ObjectNamer("a/model", "f00d")
    digest = key_digest("key")
    for rank in (0, 11):
        assert namer.id_of("RL-1", namer.names("RL-1", [digest], rank)[0]) == digest
    for other in (
        namer.names("RL-2", [digest], 0)[0],
        ObjectNamer("b", "f00d").names("RL-1", [digest], 0)[0],
        "",
        "x/y",
    ):
        assert namer.id_of("RL-1", other) is None
