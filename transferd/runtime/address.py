"""Addresses as people write them."""

from __future__ import annotations

import re

_PORT = re.compile("[0-9]{1,5}")  # str.isdigit() also takes digits that int() does not, and thousands of them


def host_and_port(address: str) -> tuple[str, int] | None:
    """Split `host:port`, an IPv6 host without its brackets. None unless there is a host and a port of 1 to 65,535."""
    host, _, port = address.rpartition(":")
    if not host or not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)
