"""What another daemon says is wrong, in words that can stand here."""

from __future__ import annotations

import pytest

from transferd.errors import PeerLost
from transferd.storage.peer.messages import ABOUT_A_TRANSFER, LONGEST_MESSAGE, theirs
from transferd.tasks import ErrorInfo
from transferd.wire.codes import CODES


@pytest.mark.parametrize("code", sorted(ABOUT_A_TRANSFER))
def test_a_code_about_the_transfer_means_the_same_here(code: str) -> None:
    assert theirs(ErrorInfo(code, "why")) == ErrorInfo(code, "why")


@pytest.mark.parametrize("code", ["device_lost", "rank_died", "engine_gone", "internal", "made up", "", "x" * 10_000])
def test_a_peers_code_that_would_describe_this_daemon_is_replaced(code: str) -> None:
    said = theirs(ErrorInfo(code, "why"))
    assert said.code == "peer_refused"
    assert said.message == f"why ({code[:64]} there)"
    assert theirs(ErrorInfo(code, "why"), PeerLost.code).code == "peer_lost"


def test_every_code_that_comes_out_is_one_of_the_table() -> None:
    assert {theirs(ErrorInfo(code, "")).code for code in [*CODES, "made up"]} <= set(CODES)


def test_a_message_is_cut() -> None:
    assert len(theirs(ErrorInfo("expired", "m" * 10**6)).message) == LONGEST_MESSAGE
