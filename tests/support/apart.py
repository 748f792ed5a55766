"""Ports and addresses for each of the test processes that run at once: none takes what another one has in mind.

A claim is an abstract socket. It ends with its process, and holds where ports and addresses do: in a network namespace.
"""

from __future__ import annotations

import itertools
import random
import socket

from transferd.cli.pool import master

PARTS = 10  # of the ports. pytest-xdist's processes are five; those beyond take any port
_claims: list[socket.socket] = []


def own_number(what: str, most: int) -> int | None:
    """A number below `most` that no other process has until this one ends; None if all are taken."""
    for number in range(most):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0transferd-tests-{what}-{number}")
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        return number
    return None


def own_ports() -> None:
    """Let `free_port` go through a part of its ports that is ours: no other process finds one free that we have chosen.

    Otherwise two processes that began at random places meet at a port before either has bound it, or while its program
    is restarted.
    """
    part = own_number("ports", PARTS)
    if part is not None:
        each = (master._first_ephemeral() - master._LOWEST_PORT) // PARTS
        begin = random.randrange(each)
        ours = [part * each + (begin + one) % each for one in range(each)]
        master._port_numbers = itertools.cycle(ours)  # type: ignore[assignment]
