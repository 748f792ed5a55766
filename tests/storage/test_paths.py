"""Names to paths and back: nothing escapes, nothing collides, nothing foreign is taken for ours."""

from __future__ import annotations

import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transferd.blocks.formats import ObjectNamer
from transferd.storage.paths import is_directory_of_ours, is_set_aside, is_temporary, name_of, path_of, temporary_of

any_text = st.text(st.characters(exclude_categories=()), max_size=40) | st.text("ab/.%@~", max_size=12)
any_name = st.tuples(any_text, any_text).map("/".join) | any_text


def test_an_ordinary_name_is_readable_as_a_path() -> None:
    digest = "ab" * 20
    assert path_of(f"demo/0123456789abcdef/RL-1/{digest}/3") == f"demo/0123456789abcdef/RL-1/ab/{digest}@3"
    assert path_of(f"demo/0123456789abcdef//{digest}/0") == f"demo/0123456789abcdef/%/ab/{digest}@0"


@given(any_name)
@example("../../etc/passwd")
@example("/etc/passwd")
@example("/")
@example("..a/..")
def test_a_path_stays_below_its_directory_and_leads_back_to_its_name(name: str) -> None:
    path = path_of(name)
    assert path.isascii()
    parts = path.split("/")
    assert all(part and not part.startswith(".") for part in parts)
    assert os.path.normpath(path) == path
    assert not os.path.isabs(path)
    assert name_of(path) == name


@given(any_name, any_name)
def test_different_names_have_paths_that_neither_are_equal_nor_nest(one: str, other: str) -> None:
    if one != other:
        assert path_of(one) != path_of(other)
        assert not path_of(one).startswith(path_of(other) + "/")


@given(any_text, st.integers(0))
def test_a_temporary_file_is_known_as_one_and_never_taken_for_an_object(text: str, number: int) -> None:
    path = path_of(f"demo/f/{text}/ab/0")
    temporary = temporary_of(path, number)
    assert os.path.dirname(temporary) == os.path.dirname(path)
    assert is_temporary(temporary)
    assert is_set_aside(os.path.basename(temporary))
    assert name_of(temporary) is None
    assert not is_temporary(path)


@pytest.mark.parametrize(
    "path",
    [
        "README",
        "ab/README.md",
        "demo/f/g/ab/notes.txt",
        "demo/f/g/cd/abab@0",  # in another digest's fan directory
        "demo/f/g/ab/abab@0.bak",
        "demo/f/g/ab/abab@0~",
        "demo/f/g/ab/.abab@0",
        "demo/f/g/ab/ab@ab@0",
        "demo/f/g/ab/abab@0 ",
        "demo/f/%2f/ab/abab@0",  # would be written %2F
        "demo/f/%61/ab/abab@0",  # would be written a
        "demo/f/%FF/ab/abab@0",  # not text
        "demo/f/%/ab/abab@",
        "modèle/f/g/ab/abab@0",
        "demo/f/g/ab/abab@0\udcff",
    ],
)
def test_a_foreign_path_has_no_name(path: str) -> None:
    if path.endswith(".bak"):
        assert name_of(path) == "demo/f/g/abab/0.bak"  # a rank of that text: harmless, and never asked for
    else:
        assert name_of(path) is None


@pytest.mark.parametrize("name", ["note~", "a@b~", "a@b~1x", "a~1", ".a@b~1", "a@b~1.bak"])
def test_a_foreign_file_is_not_a_temporary_of_ours(name: str) -> None:
    assert not is_temporary(name)


def test_directories_that_no_name_gives_are_not_ours() -> None:
    assert is_directory_of_ours("RL-1")
    assert is_directory_of_ours("%2E%2E")
    for name in ("", ".git", "lost+found", "a b", "é"):
        assert not is_directory_of_ours(name)


def test_the_longest_names_fit_a_file_system() -> None:
    name = ObjectNamer("模" * 1000, "f" * 16).names("é/" * 1000, ["ab" * 20], 1023)[0]
    assert max(len(part) for part in path_of(name).split("/")) + len("~12345678901234567890") <= 255
    assert name_of(path_of(name)) == name
