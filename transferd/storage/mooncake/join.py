"""Joins a pool: dials until the master listens, then sets up the client.

It dials first because a set-up holds the interpreter lock (client.py): without a master, the daemon would
freeze for seconds at a time instead of answering `/readyz` and signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import structlog

from transferd.config import MooncakeStorageSection, Size
from transferd.errors import ConfigError, StorageUnavailable
from transferd.runtime.address import host_and_port, is_loopback
from transferd.runtime.aio import uncancelled
from transferd.runtime.clock import Clock
from transferd.runtime.compat import timeout
from transferd.storage.mooncake.client import PoolClient
from transferd.storage.mooncake.native_calls import CallKind, NativeCalls

log = structlog.get_logger(__name__)

DIAL_TIMEOUT_S = 2.0
DIAL_INTERVAL_S = 0.25

LEAST_SEGMENT = 16 * 1024**2  # with less, the library's `setup` fails with a meaningless code


class Dialled(NamedTuple):
    """A connection to the master: this machine's address on it, and the master's."""

    here: str
    there: str


SetUp = Callable[[MooncakeStorageSection], PoolClient]


async def join(section: MooncakeStorageSection, calls: NativeCalls, clock: Clock, set_up: SetUp) -> PoolClient:
    """Join the configured pool and return its client. Retries until `connect_timeout`, and logs once that it waits.

    Raises ConfigError, or StorageUnavailable after the timeout. If cancelled, it leaves no client behind.
    """
    check_section(section)
    address = dial_address(section.master_server_addr)
    give_up = clock.monotonic() + section.connect_timeout
    waiting = False
    while True:
        try:
            known = reachable(section, await _dial(address))
            return await _set_up(calls, functools.partial(set_up, known))
        except StorageUnavailable as error:
            where, seconds = section.master_server_addr, f"{section.connect_timeout:g}"
            if clock.monotonic() >= give_up:
                what = f"could not join the Mooncake pool at {where} within {seconds} s: {error}"
                raise StorageUnavailable(what) from None
            if not waiting:
                waiting = True
                log.warning("waiting for the Mooncake pool", master=where, at_most_s=seconds, problem=str(error))
            await asyncio.sleep(DIAL_INTERVAL_S)


def check_section(section: MooncakeStorageSection) -> None:
    """Raise ConfigError, which names the wrong key, if no client can join with these settings."""
    if not section.master_server_addr:
        raise ConfigError("storage.mooncake.master_server_addr", "is required, for example 127.0.0.1:50051")
    if 0 < section.global_segment_size < LEAST_SEGMENT:
        what = f"must be 0 or at least {Size(LEAST_SEGMENT)}, the smallest segment that Mooncake accepts"
        raise ConfigError("storage.mooncake.global_segment_size", what, str(section.global_segment_size))
    if section.lender and host_and_port(section.lender) is None:
        raise ConfigError("storage.mooncake.lender", "expected host:port", section.lender)
    for name in ("segment_per_rank", "drain_at_stop"):
        if section.lender and (value := getattr(section, name)):
            what = "is for a daemon that lends its memory itself: leave it out, or storage.mooncake.lender"
            raise ConfigError(f"storage.mooncake.{name}", what, str(value))


def reachable(section: MooncakeStorageSection, dialled: Dialled | None) -> MooncakeStorageSection:
    """The section with a local_hostname. dialled: the connection to the master, if one was made.

    Raises ConfigError for a node that lends memory at a loopback address to a pool whose master is on another machine:
    no other node could read what it stores.
    """
    named = section.local_hostname
    if not named:
        here = dialled.here if dialled is not None else socket.gethostbyname(socket.gethostname())
        return msgspec.structs.replace(section, local_hostname=here)
    elsewhere = dialled is not None and dialled.there != dialled.here and not is_loopback(dialled.there)
    if elsewhere and is_loopback(named) and section.global_segment_size:
        what = f"is loopback, and the master at {section.master_server_addr} is on another machine, so no other node"
        what += " could read what this one stores: leave it out, or name the address that others reach"
        raise ConfigError("storage.mooncake.local_hostname", what, named)
    return section


async def _set_up(calls: NativeCalls, set_up: Callable[[], PoolClient]) -> PoolClient:
    made: list[PoolClient] = []
    try:
        await uncancelled(calls.call(CallKind.PROBE, lambda: made.append(set_up())))
    except asyncio.CancelledError:
        for client in made:
            await uncancelled(calls.call(CallKind.PROBE, client.close))
        raise
    return made[0]


def dial_address(master: str) -> tuple[str, int] | None:
    """Where to dial; None if the library finds the master itself (etcd://…). Raises ConfigError."""
    if "://" in master:
        return None
    address = host_and_port(master)
    if address is None:
        raise ConfigError("storage.mooncake.master_server_addr", "expected host:port", master)
    return address


async def _dial(address: tuple[str, int] | None) -> Dialled | None:
    """Connect to `address` and hang up. Returns both ends. Raises StorageUnavailable if nothing listens there."""
    if address is None:
        return None
    try:
        async with timeout(DIAL_TIMEOUT_S):
            _, writer = await asyncio.open_connection(*address)
    except TimeoutError:
        raise StorageUnavailable(f"no connection within {DIAL_TIMEOUT_S:g} s") from None
    except (OSError, UnicodeError) as error:  # UnicodeError: a host name that IDNA cannot encode
        number = getattr(error, "errno", None)  # the message differs between event loops
        raise StorageUnavailable(os.strerror(number) if number and number > 0 else str(error)) from None
    ends = Dialled(writer.get_extra_info("sockname")[0], writer.get_extra_info("peername")[0])
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return ends
