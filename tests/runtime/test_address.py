"""Addresses as people write them, and sockets whose path fits into the kernel's structure."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from transferd.runtime.address import LONGEST_SOCKET_PATH, host_and_port, socket_path


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("node-7.example:65535", ("node-7.example", 65535)),
        ("[::1]:5555", ("::1", 5555)),
        ("a:1", ("a", 1)),
        (":80", None),
        ("host", None),
        ("host:", None),
        ("host:0", None),
        ("host:65536", None),
        ("host:٣", None),
        ("host:-1", None),
        ("host:1e3", None),
        ("host:" + "9" * 5000, None),
        ("", None),
    ],
)
def test_an_address_is_a_host_and_a_port_that_exists(address: str, found: tuple[str, int] | None) -> None:
    assert host_and_port(address) == found


@pytest.mark.parametrize("length", [LONGEST_SOCKET_PATH - 1, LONGEST_SOCKET_PATH, LONGEST_SOCKET_PATH + 1, 240])
def test_a_socket_can_be_bound_there_whatever_the_length_of_its_directory(tmp_path: Path, length: int) -> None:
    name = "s"
    room = length - len(os.fsencode(tmp_path)) - 1 - len(name) - 1
    directory = tmp_path / ("d" * room)
    directory.mkdir()
    assert len(os.fsencode(directory / name)) == length
    with socket_path(directory, name) as path, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert (path.parent == directory) == (length <= LONGEST_SOCKET_PATH)
    assert path.exists() == (path.parent == directory), "a directory of its own goes with the context"


def test_a_name_of_several_bytes_a_letter_is_counted_in_bytes(tmp_path: Path) -> None:
    directory = tmp_path / ("模" * 25)
    directory.mkdir()
    assert len(str(directory / "s")) <= LONGEST_SOCKET_PATH < len(os.fsencode(directory / "s"))
    with socket_path(directory, "s") as path, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
