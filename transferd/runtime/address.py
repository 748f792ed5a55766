"""Addresses: as people write them, and short enough for the kernel."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

LONGEST_SOCKET_PATH = 107  # bytes; sockaddr_un holds one more, the terminator

_PORT = re.compile("[0-9]{1,5}")  # str.isdigit() also takes digits that int() does not, and thousands of them


def host_and_port(address: str, least: int = 1) -> tuple[str, int] | None:
    """Split `host:port`, without an IPv6 host's brackets. None without a host, or a port of `least` to 65,535."""
    host, _, port = address.rpartition(":")
    if not host or not _PORT.fullmatch(port) or not least <= int(port) < 65536:
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name: it may resolve to another address tomorrow
        return False


@contextlib.contextmanager
def socket_path(directory: Path, name: str) -> Iterator[Path]:
    """A path for a unix socket: in this directory or, if that path is too long, in a new directory in /tmp.

    The new directory exists while the context lasts. Job schedulers set TMPDIR to paths that are too long for a socket.
    """
    path = directory / name
    if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="transferd-", dir="/tmp") as short:
        yield Path(short, name)
