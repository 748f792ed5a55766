"""Who is a part of an engine and who may control it, decided from tokens and users alone."""

from __future__ import annotations

import itertools
import os

import pytest

from transferd.daemon.belonging import NOT_THIS_ENGINE, digest, is_operator, may_control, refusal, shows
from transferd.wire import protocol as wire

MINE, OTHERS = "a" * 32, "b" * 32
USERS: list[int | None] = [None, 0, 1000, 1001]


@pytest.mark.parametrize(("owner", "uid", "shown"), list(itertools.product(USERS, USERS, [MINE, OTHERS, ""])))
def test_only_the_owners_user_with_the_token_belongs(owner: int | None, uid: int | None, shown: str) -> None:
    error = refusal("llama", MINE, owner, shown, uid)
    if owner != uid:
        assert error is not None
        assert error.code == "not_yours"
        assert error.message.endswith("a client of a tcp:// endpoint" if owner is None else f"the user {owner}")
    elif shown != MINE:
        assert error is not None
        assert error.code == NOT_THIS_ENGINE
    else:
        assert error is None


def test_a_refusal_names_registrations_by_digest_and_shows_no_token() -> None:
    error = refusal("llama", MINE, 1000, OTHERS, 1000)
    assert error is not None
    assert MINE not in error.message
    assert OTHERS not in error.message
    assert digest(MINE) in error.message
    assert digest(OTHERS) in error.message
    assert len({digest(MINE), digest(OTHERS), digest("")}) == 3
    assert digest("") == ""
    assert len(digest(MINE)) == 12, "as logs and reports of other releases show it"


def test_operators_are_the_daemons_user_and_root_and_nobody_from_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert [uid for uid in (*USERS, 1, -1) if is_operator(uid)] == [0, 1000]


@pytest.mark.parametrize("shown", ["", MINE[:-1], MINE + "a", MINE.upper(), "模型"])
def test_a_token_is_shown_whole_or_not_at_all(shown: str) -> None:
    assert shows(MINE, MINE)
    assert not shows(MINE, shown)


def test_the_owners_user_the_daemons_and_root_may_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 77)
    assert [may_control(1000, uid) for uid in (1000, 77, 0, 1001, None)] == [True, True, True, False, False]
    assert not any(may_control(None, uid) for uid in (1000, 77, 0, None)), "an engine of tcp has no user"


def test_control_names_no_block_of_an_engine() -> None:
    """Some name stored blocks, by their keys: to keep or to remove them shows and changes nobody's bytes."""
    for kind in wire.OfUser.__subclasses__():
        assert not {"gpu_block_ids", "cpu_block_ids", "rank", "handle"} & set(kind.__struct_fields__)
