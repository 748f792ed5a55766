"""`transferd pool lend`: a process that lends a node's memory to a pool, and outlives the daemon that stores there.

    systemd ── transferd-lend.service ── the segment, in which the pool keeps objects
            └─ transferd.service ─────── a client that lends nothing, and stores its first copies there

A segment's objects are gone with the process that lent it. This one does nothing else, so that it need not be restarted
with the daemon, nor with a new version of transferd.
"""

from __future__ import annotations

import asyncio
import signal

import msgspec

from transferd.config import MooncakeStorageSection, Size
from transferd.daemon.systemd import Notifier
from transferd.errors import ConfigError
from transferd.observability import logs
from transferd.observability.units import size
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.storage.mooncake.client import PoolClient
from transferd.storage.mooncake.join import check_section, join
from transferd.storage.mooncake.native_calls import CallKind, NativeCalls


def run(section: MooncakeStorageSection) -> None:
    """Lend until SIGTERM or SIGINT. Raises ConfigError, or StorageUnavailable if there is no master in time."""
    check_section(section)
    if not section.lender:
        raise ConfigError("storage.mooncake.lender", "is required: host:port at which other nodes reach this process")
    if not section.global_segment_size:
        raise ConfigError("storage.mooncake.global_segment_size", "is the memory to lend, so it must not be 0", "0")
    asyncio.run(_lend(section))


async def _lend(section: MooncakeStorageSection) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    own = msgspec.structs.replace(section, local_hostname=section.lender, lender="", local_buffer_size=Size(0))
    calls = NativeCalls(section.timeout)
    calls.open()
    client = await join(own, calls, SYSTEM_CLOCK, PoolClient)
    notifier = Notifier.from_environment()
    notifier.notify("READY=1", f"STATUS=lends {size(section.global_segment_size)}")
    logs.say(f"lending {size(section.global_segment_size)} to the pool at {section.lender}", level="info")
    await ended.wait()
    notifier.notify("STOPPING=1")
    await calls.call(CallKind.PROBE, client.close)
    calls.close(0.0)
