"""Who may connect: groups by name or number, and who the kernel says a peer is."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from transferd.errors import ConfigError
from transferd.wire.credentials import Credentials, credentials_of, resolve_group


def test_a_group_is_given_by_name_or_number_or_not_at_all() -> None:
    assert resolve_group("server.group", "1234") == 1234
    assert resolve_group("server.group", "root") == 0
    assert resolve_group("server.group", "") == -1


@pytest.mark.parametrize("group", ["²", "no such group", "-1"])
def test_an_unknown_group_is_named_with_its_key(group: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.group: no such group") as refusal:
        resolve_group("server.group", group)
    assert group in str(refusal.value)


def test_credentials_are_read_from_the_connection(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as peer:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        peer.connect(str(tmp_path / "s"))
        accepted, _ = listening.accept()
        with accepted:
            assert credentials_of(accepted) == Credentials(os.getpid(), os.geteuid(), os.getegid())
            assert str(credentials_of(accepted)) == f"uid {os.geteuid()}, pid {os.getpid()}"


def test_a_tcp_peer_has_no_credentials() -> None:
    with socket.socket() as peer:
        assert credentials_of(peer) is None
